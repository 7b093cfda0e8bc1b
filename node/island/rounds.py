"""A model over the ranks of an island that takes part in rounds as one node."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch
from torch import Tensor, nn

from node.evaluation import Model
from node.island.api import fully_shard
from node.island.collectives import CommPolicy
from node.island.inventory import blocks_of, inventory_of
from node.island.ownership import owners_of, plan_of
from node.island.placement import BoundPlan
from node.island.policies import MixedPrecisionPolicy
from node.island.runtime import units_of
from protos.buckets import BucketTable

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Loss(nn.Module):
    """The loss of a model as the forward of a module, around which the island gathers weights.

    Args:
        model: with a method ``loss``.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean nats per token of ``int64[B, T + 1]``."""
        return cast(Tensor, cast(Model, self.model).loss(tokens))

    def loss(self, tokens: Tensor) -> Tensor:
        """The same, with everything that is registered around it."""
        out: Tensor = self(tokens)
        return out


def shard(
    model: nn.Module,
    tables: Iterable[BucketTable],
    ranks: int,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    comm_policy: CommPolicy | None = None,
    reshard_after_forward: bool | None = None,
) -> Loss:
    """Shard ``model`` over the default process group, every tensor whole with its owner, block by block.

    Gradients are the sums of the ranks' own, not their mean: a rank weights its loss by its share of the
    samples.

    Args:
        model: in the same state on all ranks; sharded in place.
        tables: of the rounds that it takes part in.
        ranks: of the island.
        mp_policy: dtypes; the parameters themselves, which are exchanged, stay as they are.
        comm_policy: how segments travel.
        reshard_after_forward: see :func:`node.island.fully_shard`.

    Returns:
        The model's loss; train and evaluate through it.
    """
    weights = inventory_of(model)
    plan = plan_of(weights, owners_of(weights, tables, ranks), ranks)
    loss = fully_shard(
        Loss(model),
        placement=BoundPlan(plan, model),
        units=blocks_of(model).values(),
        mp_policy=mp_policy,
        comm_policy=comm_policy,
        reshard_after_forward=reshard_after_forward,
    )
    for _, unit in units_of(loss):
        unit.divisor = 1.0
    return loss


def transfers_of(model: nn.Module) -> dict[str, tuple[int, int]]:
    """What this rank has done for the sharded units of a model: by the kind of the collective, how often, and
    bytes of tensors (of a gather those received, of a reduce those sent)."""
    counters = {id(unit.comm): unit.comm.counters for _, unit in units_of(model)}.values()
    return {
        "gather": (sum(c.gathers for c in counters), sum(c.gathered_bytes for c in counters)),
        "reduce": (sum(c.reduces for c in counters), sum(c.reduced_bytes for c in counters)),
        "scalar": (sum(c.scalars for c in counters), 0),
    }


def tell_arrivals(model: nn.Module, arrived: Callable[[Tensor], None]) -> None:
    """Call ``arrived`` with each parameter of which this rank holds something, whenever a backward pass has
    put its reduced gradient in place."""
    for _, unit in units_of(model):
        for group in unit.groups:
            group.buffer.arrived = arrived
