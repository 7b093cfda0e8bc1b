"""A stream between nodes whose messages are counted."""

from __future__ import annotations

from node.exchange.meter import Kind, Meter
from node.exchange.peers.base import PeerStream
from protos.wire import Message


class Metered:
    """Implements :class:`node.exchange.peers.base.PeerStream`.

    Args:
        stream: carries the messages.
        meter: counts them.
        up: what is sent counts as.
        down: what comes counts as.
        peer: the other node's name.
    """

    def __init__(self, stream: PeerStream, meter: Meter, up: Kind, down: Kind, peer: str) -> None:
        self._stream, self._meter, self._up, self._down = stream, meter, up, down
        self._peer = peer

    async def read(self) -> Message | None:
        """See the protocol."""
        message = await self._stream.read()
        if message is not None:
            self._meter.add("down", self._down, len(message), self._peer)
        return message

    async def write(self, message: bytes) -> None:
        """See the protocol."""
        await self._stream.write(message)
        self._meter.add("up", self._up, len(message), self._peer)

    async def end(self) -> None:
        """See the protocol."""
        await self._stream.end()

    def cancel(self) -> None:
        """See the protocol."""
        self._stream.cancel()
