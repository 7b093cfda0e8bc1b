"""Committed results that a node keeps for others, and how a range of one is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import xxhash

from node.exchange.peers.base import PeerStream
from node.exchange.retry import within
from protos.atoll_pb2 import Commit
from protos.ring import RING_BYTES, RING_ROUNDS, RoundRing
from protos.upload import end_frame
from protos.wire import CHUNK, CHUNK_BYTES, encode_frame

Stretch = tuple[int, memoryview]  # bytes of a result, and where in it they begin


@dataclass(frozen=True)
class Kept:
    """A committed result; ``payload`` is empty for a round without voters."""

    commit: Commit
    payload: memoryview = field(repr=False)

    @property
    def round(self) -> int:
        """Whose result it is."""
        return self.commit.round

    @property
    def nbytes(self) -> int:
        """Of the payload."""
        return len(self.payload)


class Shelf:
    """The results of the last rounds, bounded by number and bytes; the newest is always kept."""

    def __init__(self, rounds: int = RING_ROUNDS, nbytes: int = RING_BYTES) -> None:
        self._ring: RoundRing[Kept] = RoundRing(rounds, nbytes)

    def put(self, round_index: int, commit: Commit, payload: bytes | bytearray | memoryview) -> None:
        """Keep a whole result. It is copied, but for ``bytes``.

        Raises:
            ValueError: the commit is another round's.
        """
        if commit.round != round_index:
            raise ValueError(f"a commit of round {commit.round + 1} is no result of round {round_index + 1}")
        self._ring.put(Kept(commit, memoryview(bytes(payload))))

    def get(self, round_index: int) -> Kept | None:
        """The result of a round, if it is still kept."""
        return self._ring.get(round_index)

    @property
    def oldest(self) -> int | None:
        """The first round whose result is kept."""
        return self._ring.oldest


def cut_out(stretches: Iterable[Stretch], start: int, end: int) -> list[Stretch] | None:
    """Bytes ``start`` to ``end`` out of stretches in ascending order; ``None`` if they are not all there."""
    found: list[Stretch] = []
    for first, body in stretches:
        last = first + len(body)
        if first > start:
            break
        if last > start:
            found.append((start, body[start - first : min(last, end) - first]))
            start = min(last, end)
        if start == end:
            return found
    return None


def chunks(stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    """The same bytes, cut to what a frame holds."""
    for first, body in stretches:
        for start in range(0, len(body), CHUNK_BYTES):
            yield first + start, body[start : start + CHUNK_BYTES]


async def send(stream: PeerStream, stretches: Iterable[Stretch], seconds: float) -> None:
    """CHUNK frames whose offsets count bytes of the result, END with the digest of what was sent, and the end
    of this direction.

    Raises:
        Trouble: the stream broke, or the other side took longer than ``seconds`` for one frame.
    """
    hasher = xxhash.xxh3_128()
    for offset, body in chunks(stretches):
        hasher.update(body)
        message = encode_frame(CHUNK, body, offset=offset)
        await within(seconds, "sending a chunk that was asked for", stream.write(message))
    await within(
        seconds, "sending the end of what was asked for", stream.write(end_frame(hasher.hexdigest()))
    )
    await within(seconds, "ending a fetch", stream.end())
