"""The process that delays packets, seen from outside: start it, ask it, end it; and who holds a link.

Both are known by sockets in the abstract namespace of unix(7), which belongs to the network namespace: they
end with their processes, however these end, and leave no file behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Final, Protocol

from deploy.links.commands import ShapingError
from deploy.links.interface import Interface
from deploy.links.namespace import inside

START_SECONDS: Final = 20.0
ANSWER_SECONDS: Final = 5.0
_ROOT: Final = Path(__file__).parents[2]
_BYTES: Final = 65536

Lines = Mapping[int, tuple[float, float, float]]  # number of a queue -> delay, jitter, loss


class Hold(Protocol):
    """What says that a process holds an interface, until it is closed or the process ends."""

    def close(self) -> None:
        """Give the interface up."""
        ...


class Delays(Protocol):
    """What :mod:`deploy.links.shaping` asks of processes; :class:`Processes` is the real one."""

    def start(self, interface: Interface, lines: Lines, owned: bool) -> str:
        """Start the process; returns how it is scheduled. With ``owned`` it ends with the caller."""
        ...

    def ask(self, interface: Interface, lines: Lines | None = None, end: bool = False) -> Lines | None:
        """What the process does after taking ``lines`` over, or ``None`` if there is none."""
        ...

    def hold(self, interface: Interface) -> Hold:
        """Say that this process holds an interface; raises :class:`ShapingError` if another does."""
        ...

    def holder(self, interface: Interface) -> int | None:
        """The id of the process that holds an interface."""
        ...


class Processes:
    """Real processes."""

    def __init__(self) -> None:
        self._owned: dict[Interface, subprocess.Popen[str]] = {}

    def start(self, interface: Interface, lines: Lines, owned: bool) -> str:
        """See :meth:`Delays.start`.

        Raises:
            ShapingError: it ended before it was ready, or was not ready within 20 seconds.
        """
        setting = {
            "netns": interface.netns,
            "name": _name("delay", interface),
            "index": interface.index,
            "lines": {str(number): line for number, line in lines.items()},
            "owned": owned,
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "deploy.links.delay", json.dumps(setting)],
            stdin=subprocess.PIPE if owned else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=_ROOT,
            start_new_session=True,  # Ctrl-C is for the one who holds the link: it undoes everything in order
        )
        assert process.stdout is not None
        said = _first_line(process.stdout)
        process.stdout.close()
        if not said.startswith("ready"):
            process.kill()
            process.wait()
            raise ShapingError(
                f"the process that delays packets on {interface} did not start: {said or 'no word'}"
            )
        if owned:
            self._owned[interface] = process
        return said.removeprefix("ready").strip()

    def ask(self, interface: Interface, lines: Lines | None = None, end: bool = False) -> Lines | None:
        """See :meth:`Delays.ask`."""
        request = {"lines": {str(number): line for number, line in (lines or {}).items()}, "end": end}
        answer = _ask(interface, request)
        if end and (process := self._owned.pop(interface, None)) is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if answer is None:
            return None
        return {int(number): (line[0], line[1], line[2]) for number, line in answer["lines"].items()}

    def hold(self, interface: Interface) -> Hold:
        """See :meth:`Delays.hold`."""
        sign = inside(interface.netns, lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        try:
            sign.bind(f"{_name('holder', interface)}/{os.getpid()}")
        except OSError:
            sign.close()
            raise ShapingError(f"this process holds {interface} already") from None
        others = [pid for pid in _holders(interface) if pid != os.getpid()]
        if others:  # of two that start at once both may give up, but never both go on
            sign.close()
            raise held_by(others[0], interface)
        return sign

    def holder(self, interface: Interface) -> int | None:
        """See :meth:`Delays.holder`."""
        return next(iter(_holders(interface)), None)


def _name(what: str, interface: Interface) -> str:
    return f"\0atoll-link-{what}/{interface.name}"


def held_by(pid: int, interface: Interface) -> ShapingError:
    """What is said about an interface that a process holds."""
    return ShapingError(f"process {pid} holds {interface}: end that first, it takes everything away itself")


def _holders(interface: Interface) -> list[int]:
    """The ids in the names of the sockets of those who hold an interface."""
    sockets = inside(interface.netns, lambda: Path("/proc/thread-self/net/unix").read_text())
    sign = _name("holder", interface).replace("\0", "@") + "/"
    paths = (line.split()[-1] for line in sockets.splitlines())
    return [int(path.removeprefix(sign)) for path in paths if path.startswith(sign)]


def _ask(interface: Interface, request: Mapping[str, Any]) -> dict[str, Any] | None:
    with inside(interface.netns, lambda: socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as asking:
        asking.settimeout(ANSWER_SECONDS)
        with contextlib.suppress(OSError, ValueError, TypeError):
            asking.connect(_name("delay", interface))
            asking.sendall(json.dumps(request).encode())
            answer = json.loads(asking.recv(_BYTES))
            asking.recv(1)  # its end: a process that was told to end closes everything at once
            return dict(answer)
    return None


def _first_line(stream: IO[str]) -> str:
    ready = select.select([stream], (), (), START_SECONDS)[0]
    return stream.readline().strip() if ready else f"no word within {START_SECONDS:g} s"
