"""A stream from a node to itself: what it contributes to its own slices, and fetches from its own shelf."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from node.exchange.trouble import Kind, Trouble
from protos.wire import MAX_MESSAGE_BYTES

_MESSAGES: Final = 8  # in each direction, that have been written and not been read


class _Direction:
    """Messages on their way; one task writes, another one reads."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.ended = False
        self.changed = asyncio.Event()

    def wake(self) -> None:
        self.changed.set()

    async def wait(self) -> None:
        self.changed.clear()
        await self.changed.wait()


class _Pair:
    def __init__(self) -> None:
        self.directions = _Direction(), _Direction()
        self.broken = ""

    def give_up(self, reason: str) -> None:
        if self.broken or all(direction.ended for direction in self.directions):
            return
        self.broken = reason
        for direction in self.directions:
            direction.messages.clear()
            direction.wake()

    def check(self) -> None:
        if self.broken:
            raise Trouble(Kind.BROKEN, self.broken)


class Loopback:
    """One end of a pair; implements :class:`node.exchange.peers.base.PeerStream`."""

    def __init__(self, shared: _Pair, side: int) -> None:
        self._shared = shared
        self._out, self._in = shared.directions[side], shared.directions[1 - side]

    async def read(self) -> bytes | None:
        """See the protocol."""
        while True:
            self._shared.check()
            if self._in.messages:
                message = self._in.messages.popleft()
                self._in.wake()
                return message
            if self._in.ended:
                return None
            await self._in.wait()

    async def write(self, message: bytes) -> None:
        """See the protocol."""
        if len(message) > MAX_MESSAGE_BYTES:
            self._shared.give_up(
                f"a message of {len(message)} bytes was written; at most {MAX_MESSAGE_BYTES} are carried"
            )
        while True:
            self._shared.check()
            if self._out.ended:
                raise Trouble(Kind.BROKEN, "a message was written behind the end of a stream")
            if len(self._out.messages) < _MESSAGES:
                self._out.messages.append(message)
                self._out.wake()
                return
            await self._out.wait()

    async def end(self) -> None:
        """See the protocol."""
        self._out.ended = True
        self._out.wake()

    def cancel(self) -> None:
        """See the protocol."""
        self._shared.give_up("a stream of this node to itself was given up")


def pair() -> tuple[Loopback, Loopback]:
    """Both ends of a stream within this process, and within one event loop; bounded, and nothing is
    counted."""
    shared = _Pair()
    return Loopback(shared, 0), Loopback(shared, 1)
