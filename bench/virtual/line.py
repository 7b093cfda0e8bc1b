"""Lines between nodes and the coordinator: slow, silent or cut; calls overtake each other on them."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bench.virtual.network import Call

LATENCY: Final = (0.001, 0.02)  # seconds, drawn for every message
KEEPALIVE: Final = 6.0  # seconds of silence after which both ends of a line give its calls up

Act = Callable[[], None]


@dataclass(eq=False)
class Process:
    """A process, as far as the network knows: before ``awake_at`` it neither hears nor says anything."""

    name: str
    awake_at: float = 0.0
    alive: bool = True


@dataclass(eq=False)
class Line:
    """What lies between a node and the coordinator."""

    name: str
    random: random.Random
    silent_until: float = 0.0  # nothing arrives before, on either side
    slow_until: float = 0.0
    slow_by: float = 0.0  # seconds that every message sent before takes longer
    spread_until: float = 0.0
    spread_by: float = 0.0  # seconds by which calls are apart: they overtake each other
    doubled: bool = False  # the next contribution travels twice
    calls: list[Call] = field(default_factory=list)

    def latency(self, now: float, share: float) -> float:
        """Seconds for a message of a call whose ``share`` of the spread was drawn with it."""
        seconds = self.random.uniform(*LATENCY)
        if now < self.slow_until:
            seconds += self.slow_by
        if now < self.spread_until:
            seconds += self.spread_by * share
        return seconds

    def cut(self, client: bool = True, coordinator: bool = True) -> None:
        """Break all calls, for both ends or for one of them."""
        for call in list(self.calls):
            call.broken(client, coordinator)


class Wire:
    """One direction of a call."""

    def __init__(self, line: Line, sender: Process, receiver: Process) -> None:
        self._loop = asyncio.get_running_loop()
        self.line, self._sender, self._receiver = line, sender, receiver
        self._share = line.random.random()
        self._queue: deque[Act] = deque()
        self._due = 0.0
        self.dead = False

    def put(self, act: Act) -> None:
        """Let ``act`` happen at the other end."""
        now = max(self._loop.time(), self._sender.awake_at)
        self._due = max(self._due, now + self.line.latency(now, self._share))
        self._queue.append(act)
        self._loop.call_at(self._due, self._next)

    def _next(self) -> None:
        if self.dead:
            return
        ready = max(self.line.silent_until, self._receiver.awake_at)
        if ready > self._loop.time():
            self._loop.call_at(ready, self._next)
        elif self._queue:
            self._queue.popleft()()


class Inbox:
    """Messages that have arrived; read by one reader."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.over = False
        self._changed = asyncio.Event()

    def add(self, message: bytes) -> None:
        """One more."""
        self.messages.append(message)
        self._changed.set()

    def end(self) -> None:
        """There will be no more."""
        self.over = True
        self._changed.set()

    async def wait(self) -> None:
        """Until there is a message, or never will be."""
        while not self.messages and not self.over:
            self._changed.clear()
            await self._changed.wait()
