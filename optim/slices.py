"""Slices of a round: which bytes of all contributions one reducer takes, and which of the result it makes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from optim.pieces import Piece, cut
from protos.buckets import LINE_BYTES, BucketTable

SHARES: Final = 256  # of a result, about, where it is large enough
MAX_PIECE_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Slice:
    """Bytes ``start`` to ``end`` of every contribution, which make bytes ``out_start`` to ``out_end`` of the
    result."""

    start: int
    end: int
    out_start: int
    out_end: int

    @property
    def nbytes(self) -> int:
        """Of a contribution."""
        return self.end - self.start

    @property
    def out_nbytes(self) -> int:
        """Of the result."""
        return self.out_end - self.out_start


def slice_pieces(table: BucketTable) -> tuple[Piece, ...]:
    """The pieces by which a round is cut whose slices travel between nodes: all must cut it alike.

    They are smaller than a hub's: with :data:`SHARES` of them a fair share can be given to many reducers.
    """
    share = table.result_nbytes // SHARES
    return cut(table, min(max(share - share % LINE_BYTES, LINE_BYTES), MAX_PIECE_BYTES))


def units(table: BucketTable, pieces: Sequence[Piece]) -> tuple[Slice, ...]:
    """The finest slices, in the order of the table; they cover contribution and result.

    Every bound lies between two of the ``pieces`` of ``table``, and none between a basis and the bucket that
    it is made of.
    """
    outs = {
        bucket.name: (out, out + bucket.result_nbytes)
        for bucket, out in zip(table.buckets, table.result_offsets, strict=True)
    }
    tied = [  # first byte of a source, end of its basis
        (outs[bucket.source][0], outs[bucket.name][1]) for bucket in table.buckets if bucket.reduce == "basis"
    ]
    found: list[Slice] = []
    for piece in pieces:
        start = found[-1].end if found else 0
        unit = Slice(start, max(start, piece.needs), piece.start, piece.end)
        if any(first < piece.start < last for first, last in tied):
            unit = replace(found.pop(), end=unit.end, out_end=unit.out_end)
        found.append(unit)
    if found:
        found[-1] = replace(found[-1], end=table.nbytes)
    return tuple(found)


def pieces_within(pieces: Sequence[Piece], part: Slice) -> tuple[Piece, ...]:
    """The pieces of a slice, with offsets that count from its first byte."""
    starts = [piece.start for piece in pieces]
    first, last = bisect.bisect_left(starts, part.out_start), bisect.bisect_left(starts, part.out_end)
    return tuple(
        Piece(
            piece.start - part.out_start,
            piece.end - part.out_start,
            max(0, piece.needs - part.start),
            tuple(
                replace(
                    own,
                    start=own.start - part.start,
                    end=own.end - part.start,
                    out_start=own.out_start - part.out_start,
                    out_end=own.out_end - part.out_start,
                )
                for own in piece.parts
            ),
        )
        for piece in pieces[first:last]
    )
