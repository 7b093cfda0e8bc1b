"""The reducer: many contributions in, one result out, piece by piece as soon as every voter has delivered it.

What is reduced, and how, is :mod:`optim.aggregate`'s; here are the order of the work, the frames and the
agreement of the votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from optim.aggregate import Aggregation, Bytes
from optim.pieces import Piece, united
from protos.buckets import BucketTable
from protos.wire import CHUNK, CHUNK_BYTES, encode_frame

INLINE_BYTES: Final = 256 << 10  # of votes: less than a millisecond of work is done at once

_ALIGN: Final = 64
_BLOCK: Final = 64 << 10  # bytes that stay in a core's first cache levels
_EXACT_BYTES: Final = 1 << 20  # up to here the agreement reads every vote, beyond it a rotating quarter


class Slab:
    """One row of payload size for each member, cache-line aligned and reused in every round."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._stride = -(-nbytes // _ALIGN) * _ALIGN
        self._rows: list[Bytes] = []

    def rows(self, count: int) -> list[Bytes]:
        """``count`` rows of uint8[nbytes] with undefined content; the same memory as long as it suffices."""
        if count > len(self._rows):
            memory: Bytes = np.empty(count * self._stride + _ALIGN, np.uint8)
            shift = -memory.ctypes.data % _ALIGN
            starts = range(shift, shift + count * self._stride, self._stride)
            self._rows = [memory[start : start + self._nbytes] for start in starts]
        return self._rows[:count]


class Reduction:
    """The result of one voter set, produced front to back.

    Not thread-safe: one :meth:`advance` at a time, on any thread.

    Args:
        pieces: of the table, see :func:`optim.pieces.cut`.
        aggregation: what reduces a part.
        rows: the voters' payloads in slot order.
        attempt: written into the frames.
        frame_bytes: of the result, in whole pieces, that are made at once and go into one frame where so much
            has been delivered; never less than a piece.
        phase: rotates which quarter of a large payload the agreement reads (the round's number).
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        aggregation: Aggregation,
        rows: Sequence[Bytes],
        *,
        attempt: int = 0,
        frame_bytes: int = 0,
        phase: int = 0,
    ) -> None:
        self._pieces = pieces
        self._frame_bytes = frame_bytes
        self._aggregation = aggregation
        self._rows = list(rows)
        self._attempt = attempt
        self._phase = phase
        self._next = 0
        self._hasher = xxhash.xxh3_128()
        largest = max((piece.end - piece.start for piece in pieces), default=0)
        whole = pieces[-1].end if pieces else 0
        self._scratch: Bytes = np.empty(max(largest, min(frame_bytes, whole)), np.uint8)
        self._differing = [0] * len(self._rows)  # bits of each voter that differ from the result
        self._compared = 0  # bits compared for each voter
        self._exact = not pieces or pieces[-1].end <= _EXACT_BYTES

    @property
    def done(self) -> bool:
        """Whether the whole result exists."""
        return self._next == len(self._pieces)

    def cost(self, delivered: int) -> int:
        """Of what :meth:`advance` would do for each voter if all had delivered ``delivered`` bytes; 0 if
        nothing. In bytes of votes that take as long, see :attr:`optim.pieces.Part.cost`."""
        last, cost = self._next, 0
        while last < len(self._pieces) and self._pieces[last].needs <= delivered:
            cost += self._pieces[last].cost
            last += 1
        return cost

    def advance(self, delivered: int) -> list[bytes]:
        """Reduce all pieces that need at most ``delivered`` bytes and return their CHUNK frames."""
        frames = []
        while ready := self._ready(delivered):
            start, end = ready[0].start, ready[-1].end
            result = self._scratch[: end - start]
            for part in united([part for piece in ready for part in piece.parts]):
                out = result[part.out_start - start : part.out_end - start]
                rows = [row[part.start : part.end] for row in self._rows]
                self._aggregation.reduce(part, rows, out)
                if part.rule == "majority":
                    self._compare(part.start, rows, out)
            self._hasher.update(result.data)
            for first in range(0, len(result), CHUNK_BYTES):
                body = result[first : first + CHUNK_BYTES].data
                frames.append(encode_frame(CHUNK, body, attempt=self._attempt, offset=start + first))
            self._next += len(ready)
        return frames

    def _ready(self, delivered: int) -> Sequence[Piece]:
        """The next pieces that can be made at once; none if the next one cannot."""
        first = last = self._next
        while last < len(self._pieces) and self._pieces[last].needs <= delivered:
            if last > first and self._pieces[last].end - self._pieces[first].start > self._frame_bytes:
                break
            last += 1
        return self._pieces[first:last]

    def _compare(self, start: int, rows: list[Bytes], result: Bytes) -> None:
        """Which blocks are compared does not depend on how the result is cut."""
        first = 0
        while first < len(result):
            block = (start + first) // _BLOCK
            last = min((block + 1) * _BLOCK - start, len(result))
            if self._exact or (block + self._phase) % 4 == 0:
                made = result[first:last].view(np.uint64)
                self._compared += made.size * 64
                for index, row in enumerate(rows):
                    differing = np.bitwise_count(row[first:last].view(np.uint64) ^ made)
                    self._differing[index] += int(differing.sum())
            first = last

    def commit(self) -> None:
        """The round is committed with this result."""
        self._aggregation.commit()

    def digest(self) -> str:
        """xxh3_128 of what has been produced, in hex."""
        return self._hasher.hexdigest()

    def counts(self, padding: int = 0) -> tuple[list[int], int]:
        """How many bits of each voter differ from the result, and how many of each were compared.

        ``padding`` is the number of pad bits of what is reduced, 0 in votes and result alike: they count for
        nothing. Payloads over 1 MiB are sampled: every fourth block of 64 KiB, other blocks in other rounds.
        """
        return list(self._differing), max(0, self._compared - (padding if self._exact else 0))

    def agreement(self, padding: int = 0) -> list[float]:
        """Share of each voter's bits that equal the result, see :meth:`counts`; NaN if nothing is voted."""
        differing, bits = self.counts(padding)
        return [1.0 - count / bits if bits else float("nan") for count in differing]


def padding_bits(table: BucketTable, start: int = 0, end: int | None = None) -> int:
    """Pad bits in the voted part of a payload, or of bytes of it: those of a bucket are its last ones."""
    last = table.nbytes if end is None else end
    return sum(
        bucket.nbytes * 8 - bucket.elements
        for bucket, offset in zip(table.buckets, table.offsets, strict=True)
        if bucket.reduce == "majority" and start < offset + bucket.nbytes <= last
    )
