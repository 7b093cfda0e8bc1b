"""A run of real processes on one machine, through the command line: started, hit, and read from outside."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from bench.faults import stopped
from bench.ports import free_port
from deploy.event_log import EventReader
from deploy.processes import Child, Children
from protos.runfile import RunFile

ROOT: Final = Path(__file__).resolve().parents[1]
DEADLINE: Final = 240.0  # seconds; only a hang reaches it
TOKEN: Final = "bed-token"
ENVIRONMENT: Final = {  # of every process; its events go where the bed looks
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "NO_COLOR": "1",
    "ATOLL_LOG_DIR": "off",
}
_POLL_SECONDS: Final = 0.02
_never = threading.Event()


class BedError(AssertionError):
    """A run does not do what it must; the text says what was waited for, and what a process told last."""


class Log:
    """The events of one process, read as they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader, self._events = EventReader(path), list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        """All so far; a line that is still being written is left out."""
        self._events += self._reader.new()
        return self._events


class Bed:
    """Processes of one run; everything lies in one folder.

    Args:
        folder: for run file, journal, logs and events.
        children: what starts them.
        command: what ``children`` are given before the arguments of ``atoll``.
        host: where the coordinator listens.
        token: of the invite.
    """

    def __init__(
        self,
        folder: Path,
        children: Children,
        *,
        command: tuple[str, ...] = (sys.executable, "-m", "deploy.cli"),
        environment: Mapping[str, str] = ENVIRONMENT,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder, self.children = folder, children
        self.coordinator: Child | None = None
        self.nodes: dict[str, Child] = {}
        self.invite = ""
        self._command, self._environment, self._host = command, dict(environment), host
        self._logs: dict[str, list[Log]] = {}
        self._port = 0

    @property
    def journal(self) -> Path:
        """The coordinator's folder."""
        return self.folder / "journal"

    def write(self, values: Mapping[str, Any]) -> RunFile:
        """Write the run file: a tiny run with these values."""
        run = RunFile.model_validate(merged(TINY, values))
        (self.folder / "run.toml").write_text(run.to_toml())
        return run

    def start(self, name: str, *arguments: str, **more: Any) -> Child:
        """Start ``atoll`` with these arguments."""
        log = self.folder / f"{name}.log"
        command = [*self._command, *arguments]
        return self.children.start(name, command, log=log, environment=self._environment, **more)

    def lead(self, *options: str, **more: Any) -> Child:
        """Start the coordinator, for the first time or again; wait until it listens, or has stopped itself
        before."""
        if not self._port:
            self._port = free_port(self._host) if self._host == "127.0.0.1" else FIRST_PORT
        where = self.folder / "invite"
        where.unlink(missing_ok=True)
        arguments = ["--listen", f"{self._host}:{self._port}", "--journal", str(self.journal)]
        arguments += ["--token", TOKEN, "--invite-file", str(where), *options]
        run_file = str(self.folder / "run.toml")
        child = self.coordinator = self.start("coordinator", "coordinator", run_file, *arguments, **more)
        self.until(lambda: where.exists() or stopped(child.pid), "the coordinator's invite")
        self.invite = self.invite or where.read_text().strip()
        return child

    def join(self, name: str, *options: str, **more: Any) -> Child:
        """Start a node, for the first time or again."""
        logs = self._logs.setdefault(name, [])
        logs.append(Log(self.folder / f"{name}-{len(logs)}.jsonl"))
        arguments = ["--name", name, "--threads", "1", "--events", str(logs[-1].path), *options]
        self.nodes[name] = self.start(name, "join", self.invite, *arguments, **more)
        return self.nodes[name]

    def until(
        self,
        holds: Callable[[], bool],
        what: str,
        *,
        watch: Child | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        """Wait until ``holds()``.

        Raises:
            BedError: ``watch`` (default: the coordinator) ends before, or it takes longer than ``deadline``.
        """
        child, end = watch or self.coordinator, time.monotonic() + deadline
        assert child is not None
        while not holds():
            if child.code is not None:
                if holds():
                    return
                raise BedError(f"{what} did not come: {child.fate()}")
            if time.monotonic() > end:
                raise BedError(f"{what} did not come within {deadline:g} s: {child.fate()}")
            _never.wait(_POLL_SECONDS)

    def events(self, name: str, kind: str = "") -> list[dict[str, Any]]:
        """What a node, in all its lives, has told so far, of one kind or of all."""
        told = [event for log in self._logs.get(name, []) for event in log.read()]
        return [event for event in told if event["event"] == kind] if kind else told

    def rounds(self, name: str) -> dict[int, dict[str, Any]]:
        """The rounds that a node has applied, by number."""
        return {event["round"]: event for event in self.events(name, "RoundDone")}

    def last(self, name: str) -> int:
        """The last round that a node has applied; -1 before the first."""
        return max(self.rounds(name), default=-1)

    def reached(self, name: str, round_index: int, deadline: float = DEADLINE) -> None:
        """Wait until a node has applied a round."""
        self.until(
            lambda: self.last(name) >= round_index,
            f"round {round_index + 1} of {name}",
            watch=self.nodes[name],
            deadline=deadline,
        )

    def ended(self, child: Child, seconds: float = DEADLINE) -> int:
        """Wait for a process's end and return its exit code."""
        return self.children.wait(child, seconds)

    def kill(self, child: Child, number: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a process and return its exit code."""
        os.kill(child.pid, number)
        return self.ended(child)

    def digests(self, *names: str) -> dict[int, str]:
        """The digest of the state after every round that any of the nodes has told.

        Raises:
            BedError: two nodes, or two lives of one, differ.
        """
        digests: dict[int, str] = {}
        for name in names or self._logs:
            for event in self.events(name, "RoundDone"):
                first = digests.setdefault(event["round"], event["digest"])
                if first != event["digest"]:
                    raise BedError(f"after round {event['round'] + 1} {name} has another state")
        return digests


TINY: Final[dict[str, dict[str, Any]]] = {
    "run": {"name": "bed", "evaluate_every": 0, "validation_windows": 4},
    "model": {"d_model": 16, "layers": 1, "heads": 2, "context": 16},
    "data": {"batch": 1},
    "round": {"deadline": 60.0, "start_timeout": 100.0},
    "coordinator": {"metrics": "off"},
}
FIRST_PORT: Final = 4600  # in a namespace of its own all are free


def merged(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a run file, those of ``values`` over those of ``base``."""
    return {title: {**base.get(title, {}), **values.get(title, {})} for title in {*base, *values}}


@contextlib.contextmanager
def frozen(child: Child) -> Iterator[None]:
    """A process stands still within."""
    os.kill(child.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(child.pid, signal.SIGCONT)
