"""The reduction of a round: what an optimizer expects of it, and the one for contributions in one memory.

The latter serves simulated nodes, and is the definition that reductions over a network are held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from optim import bits
from optim.mean import mean_into
from optim.packs import check_payload
from protos.buckets import BucketTable


class Reduction(Protocol):
    """What turns the contributions of all nodes into one result."""

    def __call__(self, payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
        """Exchange ``payload`` (uint8, ``table.nbytes``; ``None`` from a node that abstains) and return the
        result.

        The result has the layout of the payload and equal bytes on every node, or is ``None`` if nobody
        voted.
        """
        ...


def identity(payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
    """The reduction of a single node."""
    return payload


def reduce_payloads(
    table: BucketTable,
    payloads: Sequence[Tensor],
    *,
    round_index: int,
    weights: Sequence[int] | None = None,
) -> Tensor | None:
    """Majority of the voted sections and mean of the fp32 sections of all contributions of a round.

    Args:
        table: layout of every contribution.
        payloads: uint8 CPU tensors of ``table.nbytes`` elements, in the order of the voters; nodes that
            abstain are left out.
        round_index: a tie takes the bit of voter ``round_index % voters``.
        weights: of the voters, integers from 1 to 65535; all 1 if ``None``.

    Returns:
        A new uint8 tensor of ``table.nbytes`` elements, or ``None`` without contributions.

    Raises:
        PayloadError: for a contribution that does not fit the table.
    """
    if not payloads:
        return None
    for index, payload in enumerate(payloads):
        check_payload(table, payload, f"contribution {index}")
    result = torch.empty(table.nbytes, dtype=torch.uint8)
    for reduce, begin, end in table.sections():
        rows = [payload[begin:end].numpy() for payload in payloads]
        out = result[begin:end].numpy()
        if reduce == "majority":
            bits.tally(rows, weights, casting=round_index % len(rows), out=out)
        else:
            mean_into(rows, weights or [1] * len(rows), out)
    return result
