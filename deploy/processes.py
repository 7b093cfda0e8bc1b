"""Child processes that cannot outlive their parent: in their own group, logged to a file, ended in stages.

The parent ends its children on every way out of the ``with`` block: SIGINT first (a node then leaves the run
by itself), SIGTERM, SIGKILL, each with a deadline. A parent that is killed itself takes its children along,
since each child calls :func:`follow_parent` before anything else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

PARENT_KEY = "ATOLL_PARENT_PID"  # in the environment of a child: the process it must not outlive

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.02


class ProcessError(RuntimeError):
    """A child that ended when it should not have; the text holds the last lines of its log."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP reached this process; unwinds like Ctrl-C, exit code 128 + signal."""


@dataclass(frozen=True)
class Grace:
    """Seconds that a child gets after each signal before the next one."""

    interrupt: float = 8.0
    terminate: float = 2.0
    kill: float = 5.0


class Process(Protocol):
    """What is asked of a started process; :class:`subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        ...

    def poll(self) -> int | None:
        """Exit code (minus the signal that killed it), ``None`` while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended; raises :class:`subprocess.TimeoutExpired`."""
        ...


@dataclass(frozen=True)
class Child:
    """A started process, its name for people, and the file that holds its stdout and stderr."""

    name: str
    process: Process
    log: Path

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code (minus the signal that killed it), ``None`` while it runs."""
        return self.process.poll()

    def tail(self, lines: int = 12) -> str:
        """The last ``lines`` lines of its log."""
        return tail(self.log, lines)

    def fate(self) -> str:
        """How it ended, in words, with the last lines of its log."""
        code = self.code
        if code is None:
            how = "is running"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        text = self.tail()
        return f"{self.name} {how}; the last lines of {self.log}:\n{text}" if text else f"{self.name} {how}"


def tail(path: Path, lines: int, limit: int = 16384) -> str:
    """The last ``lines`` lines of a text file, at most ``limit`` bytes of it; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


class Children:
    """All children of one command. Use as a context manager; leaving it ends them.

    Start children from a thread that lives as long as they do (the main thread): on Linux the kernel counts
    the end of the starting thread as the parent's death.
    """

    def __init__(self, grace: Grace | None = None) -> None:
        self.children: list[Child] = []
        self._grace = grace or Grace()

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str] | None = None,
        directory: Path | None = None,
    ) -> Child:
        """Start ``command`` in its own process group with stdout and stderr appended to ``log``.

        Raises:
            ProcessError: the program or the log file cannot be opened.
        """
        env = {**os.environ, **(environment or {}), PARENT_KEY: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    env=env,
                    cwd=directory,
                    start_new_session=True,
                )
        except OSError as error:
            raise ProcessError(f"cannot start {name}: {error}") from error
        child = Child(name, process, log)
        self.children.append(child)
        return child

    def check(self) -> None:
        """Raise :class:`ProcessError` for a child that has ended with another exit code than 0."""
        for child in self.children:
            if child.code not in (None, 0):
                raise ProcessError(child.fate())

    def wait(self, child: Child, seconds: float) -> int:
        """Wait for one child's end and return its exit code.

        Raises:
            ProcessError: it still runs after ``seconds``.
        """
        try:
            return child.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{child.name} has not ended within {seconds:g} s; {child.fate()}") from None

    def stop(self, children: Sequence[Child] | None = None) -> None:
        """End ``children`` (all if ``None``): SIGINT, SIGTERM, SIGKILL. A second Ctrl-C skips to SIGKILL."""
        chosen = list(self.children if children is None else children)
        stages = (
            (signal.SIGINT, self._grace.interrupt),
            (signal.SIGTERM, self._grace.terminate),
            (signal.SIGKILL, self._grace.kill),
        )
        try:
            for number, seconds in stages:
                if not _signal_all(chosen, number, seconds):
                    return
        except BaseException:
            _signal_all(chosen, signal.SIGKILL, self._grace.kill)
            raise


def _signal_all(children: Sequence[Child], number: signal.Signals, seconds: float) -> list[Child]:
    """Send a signal to the groups of all that run, wait up to ``seconds``, and return those that still do."""
    running = [child for child in children if child.code is None]
    for child in running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
    until = time.monotonic() + seconds
    while running and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        running = [child for child in running if child.code is None]
    return running


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, of all its threads; Linux's alone can be asked for that of another."""
    if pid == os.getpid():
        return time.process_time()
    return time.clock_gettime((~pid << 3) | 2) if sys.platform.startswith("linux") else 0.0


def follow_parent(environment: Mapping[str, str] = os.environ, *, poll_seconds: float = 1.0) -> bool:
    """End this process when the parent named in its environment has ended; ``False`` if none is named.

    On Linux the kernel sends SIGKILL; elsewhere a daemon thread looks at the parent every ``poll_seconds``.
    """
    try:
        parent = int(environment.get(PARENT_KEY, ""))
    except ValueError:
        return False
    # A shell's background job ignores Ctrl-C and hands that on, but our parent means its interrupts.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0:
            if os.getppid() != parent:  # it ended before the call
                os.kill(os.getpid(), signal.SIGKILL)
            return True
    watch_parent(parent, os.getppid, lambda: os.kill(os.getpid(), signal.SIGKILL), poll_seconds)
    return True


def watch_parent(
    parent: int, current: Callable[[], int], end: Callable[[], None], poll_seconds: float
) -> threading.Thread:
    """Call ``end`` from a daemon thread once ``current()`` is no longer ``parent``."""

    def look() -> None:
        while current() == parent:
            time.sleep(poll_seconds)
        end()

    thread = threading.Thread(target=look, name="atoll-parent", daemon=True)
    thread.start()
    return thread


@contextlib.contextmanager
def unwinding_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack like Ctrl-C, so that ``with`` blocks end what they started."""

    def unwind(number: int, frame: FrameType | None) -> None:
        raise Terminated(128 + number)

    chosen = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
    previous = {number: signal.signal(number, unwind) for number in chosen}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
