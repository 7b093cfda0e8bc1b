"""A sharded model as a method of rounds sees it: what this rank owns, and the shapes of all else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from node.island.layout import LayoutError
from node.island.param_group import ParamGroup
from node.island.runtime import units_of


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Within this context the modules of ``model`` hold for each sharded parameter the part of this rank
    where that is the whole tensor, and a tensor of the same shape without storage where another rank has it.

    What :func:`optim.methods.build_method` makes within keeps the state of what is owned here alone. No
    communication.

    Raises:
        LayoutError: for a tensor that is divided between ranks.
    """
    with ExitStack() as stack:
        for _, unit in units_of(model):
            for group in unit.groups:
                parts = [_held(group, index) for index in range(len(group.sites))]
                stack.enter_context(group.holding(parts))
        yield


def _held(group: ParamGroup, index: int) -> nn.Parameter:
    meta, sharded = group.layout.tensors[index], group.buffer.sharded[index]
    owner = group.layout.owner(index)
    if owner is None and meta.numel:
        raise LayoutError(f"{meta.name} is divided between ranks: what takes part in rounds has one owner")
    if owner == group.comm.rank:
        return sharded
    elsewhere = torch.empty(meta.shape, dtype=sharded.dtype, device="meta")
    return nn.Parameter(elsewhere, requires_grad=sharded.requires_grad)
