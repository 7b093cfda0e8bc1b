"""The reduction of a round: what an optimizer expects of it, and the ones for contributions in one memory.

:func:`reduce_payloads` serves simulated nodes, and is the definition that reductions over a network are held
to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from optim import bits
from optim.aggregate import Aggregation, ReducerMemory
from optim.packs import check_payload
from optim.pieces import parts_of
from protos.buckets import BucketTable


class Reduction(Protocol):
    """What turns the contributions of all nodes into one result."""

    def __call__(self, payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
        """Exchange ``payload`` (uint8, ``table.nbytes``; ``None`` from a node that abstains) and return the
        result.

        The result is uint8, ``table.result_nbytes``, with equal bytes on every node, or ``None`` if nobody
        contributed.
        """
        ...


def identity(payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
    """The reduction of a single node whose results are laid out as its contributions: votes and exact
    means."""
    return payload


class SingleNode:
    """The reduction of a single node: what a coordinator would return to it, bit for bit.

    Attributes:
        memory: of the lossy means and bases; empty for a fresh run, and part of a checkpoint.
    """

    def __init__(self) -> None:
        self.memory = ReducerMemory()

    def __call__(self, payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
        """The result of one contribution; the contribution itself where nothing is decoded.

        Raises:
            PayloadError: for a payload that does not fit the table.
        """
        if payload is None or all(part.bucket < 0 for part in parts_of(table)):
            return payload
        return reduce_payloads(table, [payload.cpu()], round_index=round_index, memory=self.memory)


def reduce_payloads(
    table: BucketTable,
    payloads: Sequence[Tensor],
    *,
    round_index: int,
    weights: Sequence[int] | None = None,
    mean_weights: Sequence[int] | None = None,
    memory: ReducerMemory | None = None,
) -> Tensor | None:
    """Majorities, means and bases of all contributions of a round.

    Args:
        table: layout of every contribution and of the result.
        payloads: uint8 CPU tensors of ``table.nbytes`` elements, in the order of the voters; nodes that
            abstain are left out.
        round_index: a tie takes the bit of :func:`~optim.aggregate.casting_voter`.
        weights: of the votes, integers from 1 to 65535; all 1 if ``None``.
        mean_weights: of the means, integers of at least 1; as the votes if ``None``.
        memory: carries residuals and bases from round to round, and has moved on when this returns; without
            one, this round is the first.

    Returns:
        A new uint8 tensor of ``table.result_nbytes`` elements, or ``None`` without contributions.

    Raises:
        PayloadError: for a contribution that does not fit the table.
    """
    if not payloads:
        return None
    for index, payload in enumerate(payloads):
        check_payload(table, payload, f"contribution {index}")
    result = torch.empty(table.result_nbytes, dtype=torch.uint8)
    out, rows = result.numpy(), [payload.detach().numpy() for payload in payloads]
    aggregation = Aggregation(
        table,
        len(payloads),
        round_index=round_index,
        tally=bits.tally,
        memory=ReducerMemory() if memory is None else memory,
        weights=weights,
        mean_weights=mean_weights,
    )
    for part in parts_of(table):
        slices = [row[part.start : part.end] for row in rows]
        aggregation.reduce(part, slices, out[part.out_start : part.out_end])
    aggregation.commit()
    return result
