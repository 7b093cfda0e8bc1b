"""Streams through a node that two others are connected to, for those that cannot connect to each other.

libp2p's own relays cut a connection after 128 KiB in each direction, or two minutes: enough for the hash
table, and for two routers to be opened towards each other. (The daemon of hivemind 1.1.12 has options for
more, but starts a second relay service with those limits over the first.) So what nodes send each other
travels as two streams that a relay node of the run joins. It reads what it carries, as the coordinator does
with a tunnel: therefore a node takes calls only from relays that it has chosen itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Final

from node.exchange.swarm.multiaddress import Multiaddress

_PIECE_BYTES: Final = 1 << 18

RawStream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def join(one: RawStream, other: RawStream, count: Callable[[int], None]) -> None:
    """Carry bytes between two raw streams until one of them ends; then both are closed, after what was read
    has been passed on.

    Args:
        one: raw stream.
        other: likewise.
        count: receives the number of bytes of every piece.
    """

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            while piece := await reader.read(_PIECE_BYTES):
                writer.write(piece)
                count(len(piece))
                await writer.drain()

    ways = {asyncio.create_task(carry(one[0], other[1])), asyncio.create_task(carry(other[0], one[1]))}
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        for _, writer in (one, other):
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()


def relays_of(addresses: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The relays that addresses of a peer lead through: the peer id of each, with its own addresses."""
    found: dict[str, tuple[str, ...]] = {}
    for text in addresses:
        with contextlib.suppress(ValueError):
            address = Multiaddress.parse(text)
            if address.relayed:
                way, _, _ = str(address).partition("/p2p-circuit")
                relay = Multiaddress.parse(way).peer
                if relay:
                    found[relay] = (*found.get(relay, ()), way)
    return found
