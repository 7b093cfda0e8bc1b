"""A test bed of real processes: a coordinator and nodes, started through the command line as by a user."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.processes import Child, Children, Grace
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 120.0  # seconds; only a hang reaches it

RUN_FILE = """
[run]
name = "bed"
rounds = {rounds}
nodes = {nodes}
evaluate_every = 0
validation_windows = 4
[model]
d_model = 16
layers = 1
heads = 2
context = 16
[data]
batch = 1
[method]
name = "{method}"
{settings}
[round]
deadline = "{deadline}"
adaptive = false
start_timeout = "100s"
[coordinator]
listen = "{listen}"
metrics = "off"
"""


class Bed:
    """Processes of one run; everything lies in one folder."""

    def __init__(self, folder: Path, children: Children) -> None:
        self.folder = folder
        self.children = children
        self.coordinator: Child | None = None
        self.nodes: dict[str, Child] = {}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "deploy.cli", *arguments]

    def _start(self, name: str, *arguments: str) -> Child:
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        return self.children.start(
            name, self.command(*arguments), log=self.folder / f"{name}.log", environment=environment
        )

    def lead(
        self,
        *,
        nodes: int,
        rounds: int,
        method: str = "sign-muon",
        settings: Mapping[str, object] | None = None,
        deadline: str = "60s",
        listen: str = "127.0.0.1:0",
    ) -> None:
        """Start the coordinator and wait for its invite; ``settings`` are the method's, whole numbers."""
        run_file = self.folder / "run.toml"
        values = {
            "nodes": nodes,
            "rounds": rounds,
            "method": method,
            "settings": "\n".join(f"{key} = {value}" for key, value in (settings or {}).items()),
            "deadline": deadline,
            "listen": listen,
        }
        run_file.write_text(RUN_FILE.format_map(values))
        invite = self.folder / "invite"
        self.coordinator = self._start(
            "coordinator", "coordinator", str(run_file), "--invite-file", str(invite),
            "--journal", str(self.folder / "journal"),
        )  # fmt: skip
        self.until(lambda: invite.exists() and invite.read_text().strip() != "", "the coordinator's invite")
        self.invite = invite.read_text().strip()

    def join(self, name: str, *options: str) -> Child:
        """Start a node."""
        log = str(self.folder / f"{name}.jsonl")
        self.nodes[name] = self._start(
            name, "join", self.invite, "--name", name, "--threads", "1", "--events", log, *options
        )
        return self.nodes[name]

    def until(self, holds: Callable[[], bool], what: str, *, watch: Child | None = None) -> None:
        """Wait until ``holds()``; fails at once when ``watch`` (default: the coordinator) ends before."""
        child = watch or self.coordinator
        assert child is not None
        until(holds, what, watch=child.process, fate=child.fate, deadline=DEADLINE)

    def events(self, name: str) -> list[dict[str, Any]]:
        """What a node has told so far; a line still being written is left out."""
        path = self.folder / f"{name}.jsonl"
        if not path.exists():
            return []
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def rounds(self, name: str) -> dict[int, dict[str, Any]]:
        """The rounds that a node has applied, by number."""
        return {event["round"]: event for event in self.events(name) if event["event"] == "RoundDone"}

    def reached(self, name: str, round_index: int) -> None:
        """Wait until a node has applied ``round_index``."""
        self.until(
            lambda: any(number >= round_index for number in self.rounds(name)),
            f"round {round_index} of {name}",
            watch=self.nodes[name],
        )

    def ended(self, child: Child) -> int:
        """Wait for a process's end and return its exit code."""
        return self.children.wait(child, DEADLINE)

    def finished(self, *names: str) -> None:
        """The run is done: the coordinator and the named nodes end with exit code 0."""
        for child in [*(self.nodes[name] for name in names), self.coordinator]:
            assert child is not None
            assert self.ended(child) == 0, child.fate()

    def agree(self, *names: str) -> int:
        """All digests of the same round are equal; returns the rounds that at least two nodes have told."""
        digests: dict[int, dict[str, str]] = {}
        for name in names:
            for number, event in self.rounds(name).items():
                digests.setdefault(number, {})[name] = event["digest"]
        for number, of_nodes in digests.items():
            assert len(set(of_nodes.values())) == 1, f"round {number}: {of_nodes}"
        return sum(len(of_nodes) > 1 for of_nodes in digests.values())


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with Children(Grace(interrupt=3.0, terminate=2.0, kill=5.0)) as children:
        yield Bed(tmp_path, children)


def alive(pid: int) -> bool:
    """Whether a process of that id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
