"""Raw streams that have carried a stream to its proper end, and can carry the next one.

Opening one takes libp2p several round trips. And over QUIC not every stream that libp2p's daemon closes ends
for both sides: it copies each direction by itself and resets the stream when one of the copies fails, and a
reset at the wrong moment leaves the stream counted for good. A connection has room for 256, so it opened no
more after some hundred, though nothing else was wrong with it. A raw stream that is used again is not closed.

Who opened it sends the four bytes of AGAIN, and the next stream's records at once: an answer would come
behind whatever else the connection carries, and at 1 Gbit/s rounds have waited 10 ms for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

from node.exchange.retry import within
from node.exchange.swarm.relaying import RawStream
from node.exchange.trouble import Trouble

AGAIN: Final = b"more"
_IDLE_SECONDS: Final = 240.0  # that the caller keeps it
_LISTEN_SECONDS: Final = 300.0  # that the one called does: longer, or the next stream would meet its close
_A_PEER: Final = 4  # that are kept to one peer
_TOTAL: Final = 256


class IdleStreams:
    """Those that this side has opened, by the peer at the other end.

    Args:
        now: clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._idle: dict[str, list[tuple[float, RawStream]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._idle.values()))

    def put(self, peer: str, raw: RawStream) -> None:
        """Keep one, unless there are enough."""
        kept = self._idle.setdefault(peer, [])
        if len(kept) >= _A_PEER or len(self) >= _TOTAL:
            raw[1].close()
        else:
            kept.append((self._now(), raw))

    def take(self, peer: str) -> RawStream | None:
        """One to ``peer`` for another stream, which has been announced to it; ``None``: there is none."""
        while kept := self._idle.get(peer):
            _, (reader, writer) = kept.pop()  # the one that was used last
            if reader.at_eof() or writer.is_closing():
                writer.close()
                continue
            writer.write(AGAIN)
            return reader, writer
        return None

    def drop(self, peer: str) -> None:
        """Close those to ``peer``."""
        for _, (_, writer) in self._idle.pop(peer, ()):
            with contextlib.suppress(OSError, RuntimeError):
                writer.close()

    def prune(self) -> None:
        """Close those that were not used for long, or that the other side has closed."""
        oldest = self._now() - _IDLE_SECONDS
        for peer, kept in tuple(self._idle.items()):
            standing = []
            for since, (reader, writer) in kept:
                if since < oldest or reader.at_eof():
                    writer.close()
                else:
                    standing.append((since, (reader, writer)))
            if standing:
                self._idle[peer] = standing
            else:
                del self._idle[peer]

    def close(self) -> None:
        """Close all."""
        for peer in tuple(self._idle):
            self.drop(peer)


async def asked_again(reader: asyncio.StreamReader) -> bool:
    """Whether the caller sends another stream on this raw one, which begins behind what has been read."""
    try:
        asked = await within(
            _LISTEN_SECONDS, "the next stream on an idle one", reader.readexactly(len(AGAIN))
        )
    except (OSError, EOFError, Trouble):
        return False
    return asked == AGAIN
