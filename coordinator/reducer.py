"""The reducer: many contributions in, one result out, piece by piece as soon as every voter has delivered it.

The majority is all integers, so it depends on neither order nor number of threads. The mean is added in
float64 in slot order at this one place, so every node receives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from optim.mean import mean_into
from protos.buckets import BucketTable
from protos.wire import CHUNK, CHUNK_BYTES, encode_frame

Bytes = NDArray[np.uint8]

_ALIGN: Final = 64
_BLOCK: Final = 64 << 10  # bytes that stay in a core's first cache levels
_EXACT_BYTES: Final = 1 << 20  # up to here the agreement reads every vote, beyond it a rotating quarter


class TallyFunction(Protocol):
    """``optim.bits.tally``: the weighted majority of each bit; a tie takes the bit of ``votes[casting]``."""

    def __call__(
        self,
        votes: Sequence[Bytes],
        weights: Sequence[int] | None = None,
        *,
        casting: int,
        out: Bytes | None = None,
    ) -> Bytes:
        """uint8 arrays of equal length, a multiple of 64."""
        ...


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


@dataclass(frozen=True)
class Part:
    """A range of the payload with one reduce rule."""

    rule: Literal["majority", "mean"]
    start: int
    end: int


@dataclass(frozen=True)
class Piece:
    """One result message: a range of the payload, cut where the rule changes."""

    start: int
    end: int
    parts: tuple[Part, ...]


def cut(table: BucketTable, piece_bytes: int = CHUNK_BYTES) -> tuple[Piece, ...]:
    """Cut a payload into pieces on a fixed grid of ``piece_bytes`` (a multiple of 64)."""
    sections = table.sections()
    pieces = []
    for start in range(0, table.nbytes, piece_bytes):
        end = min(start + piece_bytes, table.nbytes)
        parts = tuple(
            Part(rule, max(start, first), min(end, last))
            for rule, first, last in sections
            if first < end and last > start
        )
        pieces.append(Piece(start, end, parts))
    return tuple(pieces)


class Reduction:
    """The result of one voter set, produced front to back.

    Not thread-safe: one :meth:`advance` at a time, on any thread.

    Args:
        pieces: of the payload, see :func:`cut`.
        rows: the voters' payloads in slot order.
        weights: of the voters, 1 to 65535.
        casting: index of the voter whose bit decides a tie.
        tally: majority function.
        attempt: written into the frames.
        phase: rotates which quarter of a large payload the agreement reads (the round's number).
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        rows: Sequence[Bytes],
        weights: Sequence[int],
        *,
        casting: int,
        tally: TallyFunction,
        attempt: int = 0,
        phase: int = 0,
    ) -> None:
        self._pieces = pieces
        self._rows = list(rows)
        self._weights = list(weights)
        self._tally_weights = None if all(weight == 1 for weight in weights) else self._weights
        self._casting = casting
        self._tally = tally
        self._attempt = attempt
        self._phase = phase
        self._next = 0
        self._hasher = xxhash.xxh3_128()
        self._scratch: Bytes = np.empty(
            max((piece.end - piece.start for piece in pieces), default=0), np.uint8
        )
        self._differing = [0] * len(self._rows)  # bits of each voter that differ from the result
        self._compared = 0  # bits compared for each voter
        self._exact = not pieces or pieces[-1].end <= _EXACT_BYTES

    @property
    def done(self) -> bool:
        """Whether the whole result exists."""
        return self._next == len(self._pieces)

    def reducible(self, delivered: int) -> int:
        """Bytes that :meth:`advance` would produce if every voter had delivered ``delivered`` bytes."""
        last, produced = self._next, 0
        while last < len(self._pieces) and self._pieces[last].end <= delivered:
            produced += self._pieces[last].end - self._pieces[last].start
            last += 1
        return produced

    def advance(self, delivered: int) -> list[bytes]:
        """Reduce all pieces below ``delivered`` and return their CHUNK frames."""
        frames = []
        while not self.done and self._pieces[self._next].end <= delivered:
            piece = self._pieces[self._next]
            result = self._scratch[: piece.end - piece.start]
            for part in piece.parts:
                self._reduce(part, result[part.start - piece.start : part.end - piece.start])
            self._hasher.update(result.data)
            frames.append(encode_frame(CHUNK, result.data, attempt=self._attempt, offset=piece.start))
            self._next += 1
        return frames

    def _reduce(self, part: Part, out: Bytes) -> None:
        rows = [row[part.start : part.end] for row in self._rows]
        if part.rule == "mean":
            mean_into(rows, self._weights, out)
            return
        if len(rows) == 1:
            out[:] = rows[0]
        else:
            self._tally(rows, self._tally_weights, casting=self._casting, out=out)
        self._compare(part.start, rows, out)

    def _compare(self, start: int, rows: list[Bytes], result: Bytes) -> None:
        for first in range(0, len(result), _BLOCK):
            if not self._exact and ((start + first) // _BLOCK + self._phase) % 4:
                continue
            block = result[first : first + _BLOCK].view(np.uint64)
            self._compared += block.size * 64
            for index, row in enumerate(rows):
                differing = np.bitwise_count(row[first : first + _BLOCK].view(np.uint64) ^ block)
                self._differing[index] += int(differing.sum())

    def digest(self) -> str:
        """xxh3_128 of what has been produced, in hex."""
        return self._hasher.hexdigest()

    def agreement(self, padding: int = 0) -> list[float]:
        """Share of each voter's bits that equal the result; NaN where nothing is voted.

        ``padding`` is the number of pad bits of the payload, 0 in votes and result alike. Payloads over 1 MiB
        are sampled: every fourth block of 64 KiB, other blocks in other rounds.
        """
        bits = self._compared - (padding if self._exact else 0)
        return [1.0 - differing / bits if bits > 0 else float("nan") for differing in self._differing]


def padding_bits(table: BucketTable) -> int:
    """Pad bits in the voted part of a payload."""
    return sum(bucket.nbytes * 8 - bucket.elements for bucket in table.buckets if bucket.reduce == "majority")


def all_finite(row: Bytes, table_sections: Sequence[tuple[str, int, int]], start: int, end: int) -> bool:
    """Whether the fp32 values of mean sections in ``row[start:end]`` are finite; bounds multiples of 4."""
    for rule, first, last in table_sections:
        if rule == "mean" and first < end and last > start:
            values = row[max(start, first) : min(end, last)].view("<f4")
            if not np.isfinite(values).all():
                return False
    return True
