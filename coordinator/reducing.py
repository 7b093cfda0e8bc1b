"""What reducing needs that rounds share: where CPU work is done, and what follows from a bucket table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from optim.aggregate import ReducerMemory, TallyFunction
from optim.inspection import Inspection
from optim.pieces import Piece, cut
from optim.reduction import padding_bits
from protos.buckets import BucketTable
from protos.upload import LEAST_BYTES


class Pool(Protocol):
    """Runs CPU work off the event loop and brings the outcome back to the loop's thread."""

    def submit(
        self,
        work: Callable[[], list[bytes]],
        done: Callable[[list[bytes] | None, BaseException | None], None],
    ) -> Future[list[bytes]]:
        """Run ``work`` on another thread, then call ``done`` on the event loop."""
        ...


@dataclass(frozen=True)
class Reducing:
    """What the rounds with one bucket table share."""

    table: BucketTable
    pieces: Sequence[Piece]
    inspection: Inspection
    padding: int
    memory: ReducerMemory
    tally: TallyFunction
    pool: Pool

    @classmethod
    def of(
        cls,
        table: BucketTable,
        *,
        memory: ReducerMemory,
        tally: TallyFunction,
        pool: Pool,
        piece_bytes: int = LEAST_BYTES,
    ) -> Reducing:
        """Derive the rest from the table."""
        pieces = cut(table, piece_bytes)
        return cls(table, pieces, Inspection(table), padding_bits(table), memory, tally, pool)
