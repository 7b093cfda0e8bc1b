"""Delay, jitter and loss without netem: a process that holds packets back in queues of netfilter.

The kernel keeps the packets; this process learns their numbers, and one verdict frees all that are due. When
it ends, however it does, the rules that feed its queues let packets pass at once. It is started, changed and
ended by :mod:`deploy.links.delays`, over a socket in the abstract namespace of its network namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

_TIMER_SLACK: Final = 29  # of prctl
_PRIORITY: Final = 10  # among real-time processes
_REQUEST_SECONDS: Final = 0.2
_REQUEST_BYTES: Final = 65536
_LOOK_SECONDS: Final = 2.0  # between two looks whether the interface is still there
_DENSE: Final = 48  # packets in one reading from which waiting a little saves more than it costs
_GATHER_SECONDS: Final = 0.0002


class Waiting(Protocol):
    """A queue as :class:`Line` uses it."""

    def read(self) -> list[bytes]:
        """Numbers of the packets that have come."""
        ...

    def free(self, number: bytes) -> None:
        """Let that packet pass, and all before it."""
        ...

    def drop(self, number: bytes) -> None:
        """Drop that packet."""
        ...


class Line:
    """One queue with its delay, jitter and loss.

    The order of packets is kept. So the jitter is drawn anew for every stretch of two jitters, not for each
    packet: of those that follow each other closely the one with the longest delay would hold up the others.
    """

    def __init__(self, queue: Waiting, uniform: Callable[[], float], clock: Callable[[], float]) -> None:
        self.queue = queue
        self.delay = self.jitter = self.loss = 0.0
        self._uniform, self._clock = uniform, clock
        self._due: deque[tuple[float, bytes]] = deque()
        self._shift, self._drawn = 0.0, float("-inf")

    def set(self, delay: float, jitter: float, loss: float) -> None:
        """Change it for the packets to come; seconds, seconds, share."""
        self.delay, self.jitter, self.loss = delay, jitter, loss
        self._shift, self._drawn = 0.0, float("-inf")

    def read(self) -> int:
        """Take in what has come; returns how many packets."""
        numbers = self.queue.read()
        count = len(numbers)
        if self.loss:
            numbers = [number for number in numbers if not self._lost(number)]
        if numbers:
            now = self._clock()  # after reading: rather late than early
            if self.jitter and now - self._drawn >= 2 * self.jitter:
                self._shift, self._drawn = self.jitter * (2 * self._uniform() - 1), now
            due = now + self.delay + self._shift
            self._due.append((max(due, self._due[-1][0]) if self._due else due, numbers[-1]))
        return count

    def release(self, now: float) -> float | None:
        """Free what is due; returns when the next packet is, ``None`` if none waits."""
        last = None
        while self._due and self._due[0][0] <= now:
            last = self._due.popleft()[1]
        if last is not None:
            self.queue.free(last)
        return self._due[0][0] if self._due else None

    def _lost(self, number: bytes) -> bool:
        if self._uniform() >= self.loss:
            return False
        self.queue.drop(number)
        return True


class Desk:
    """Requests to the process: one JSON object each way over a connection, from our own user only."""

    def __init__(self, name: str, lines: Mapping[int, Line]) -> None:
        self.lines = lines
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.bind(name)
        self.socket.listen(4)
        self.socket.setblocking(False)

    def fileno(self) -> int:
        """Of its socket, for ``select``."""
        return self.socket.fileno()

    def answer(self) -> bool:
        """Answer one request; ``False`` if that was to end."""
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return True
        with contextlib.ExitStack() as closing:
            closing.enter_context(connection)
            try:
                if self._take(connection):
                    return True
            except (OSError, ValueError, TypeError, AttributeError):
                return True  # whoever asked sees no answer
            closing.pop_all()  # the connection lasts as long as this process, so that its end can be seen
            self._last = connection
            return False

    def _take(self, connection: socket.socket) -> bool:
        connection.settimeout(_REQUEST_SECONDS)
        size = struct.calcsize("=3i")
        _, user, _ = struct.unpack("=3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if user != os.geteuid():
            return True
        request = json.loads(connection.recv(_REQUEST_BYTES))
        set_lines(self.lines, request.get("lines", {}))
        state = {str(number): [line.delay, line.jitter, line.loss] for number, line in self.lines.items()}
        connection.sendall(json.dumps({"lines": state}).encode())
        return not request.get("end", False)


def set_lines(lines: Mapping[int, Line], values: Mapping[str, Any]) -> None:
    """Set lines by queue numbers to ``[delay, jitter, loss]``; raises ``ValueError`` for anything else."""
    chosen = {int(number): [float(value) for value in triple] for number, triple in values.items()}
    if any(number not in lines or len(triple) != 3 for number, triple in chosen.items()):
        raise ValueError("not the lines of this process")
    for number, triple in chosen.items():
        lines[number].set(*triple)


def hurry() -> str:
    """Get the CPU as soon as a packet is due, as far as we may; returns how."""
    ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        return "real time"
    except OSError:
        pass
    try:  # a container is refused real time, but with SYS_NICE not this
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        return "nice -20"
    except OSError:
        return "normal priority"


def serve(desk: Desk, interface: int, owned: bool) -> None:
    """Hold and free packets until told to end, or the interface or (if ``owned``) our parent is gone."""
    lines = list(desk.lines.values())
    by_queue: dict[Any, Line] = {line.queue: line for line in lines}
    watched: list[Any] = [*by_queue, desk, *([sys.stdin] if owned else [])]
    wait, look = 0.0, time.monotonic() + _LOOK_SECONDS
    while True:
        # select, as its time-out is in microseconds; that of epoll is in milliseconds
        ready = select.select(watched, (), (), wait)[0]
        dense = False
        for source in ready:
            if source is desk:
                if not desk.answer():
                    return
            elif source is sys.stdin:
                return  # nothing is ever written there: our parent has ended
            else:
                dense |= by_queue[source].read() >= _DENSE
        if dense:
            time.sleep(_GATHER_SECONDS)
        now = time.monotonic()
        if now >= look:
            look = now + _LOOK_SECONDS
            try:
                socket.if_indextoname(interface)
            except OSError:
                return
        due = [time for time in (line.release(now) for line in lines) if time is not None]
        wait = max(0.0, min([look, *due]) - time.monotonic())


def main() -> int:
    """``python -m deploy.links.delay SETTING``; says ``ready`` and how it is scheduled, or what failed."""
    from deploy.links.namespace import enter
    from deploy.links.netfilter import Queue

    setting = json.loads(sys.argv[1])
    try:
        if setting["netns"]:
            enter(setting["netns"])
        lines = {
            int(number): Line(Queue(int(number)), random.random, time.monotonic)
            for number in setting["lines"]
        }
        set_lines(lines, setting["lines"])
        desk = Desk(setting["name"], lines)
    except OSError as error:
        print(error.strerror or error, flush=True)
        return 1
    print("ready", hurry(), flush=True)
    serve(desk, setting["index"], setting["owned"])
    for line in lines.values():
        line.release(float("inf"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
