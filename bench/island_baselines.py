"""What our islands are measured against: stock FSDP2, and two ways to run Muon on its row-wise shards.

Both start from each rank's rows of every momentum and end with each rank's rows of every orthogonal factor:

* :func:`gathered`: every rank gathers every matrix, and orthogonalises all of them;
* :func:`scattered`: of matrices of one shape each rank gets its share whole by an all-to-all, orthogonalises
  those, and returns the rows by a second one (the way of microsoft/dion's batched Muon).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.island_ranks import Member

Factor = Callable[[Tensor], Tensor]


class Sharded:
    """A model under stock FSDP2, wrapped layer by layer, and what its optimizers step.

    These get plain tensors that share the shards' memory, which spares the baselines the dispatch of
    ``DTensor`` operations: some milliseconds a step.

    Args:
        model: whole, on the CPU.
        layers: submodules that are gathered one by one.
        member: this rank.
        is_matrix: which parameters are for Muon.

    Attributes:
        matrices: parameters for Muon, as FSDP2 holds them.
        local_matrices, local_rest: what the optimizers see.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Sequence[nn.Module],
        member: Member,
        is_matrix: Callable[[str, Tensor], bool],
    ) -> None:
        from torch.distributed.fsdp import fully_shard  # torch 2.6 has it under this name

        for layer in layers:
            fully_shard(layer, mesh=member.mesh)
        fully_shard(model, mesh=member.mesh)
        named = [(name, cast(DTensor, parameter)) for name, parameter in model.named_parameters()]
        self.matrices = [parameter for name, parameter in named if is_matrix(name, parameter)]
        rest = [parameter for name, parameter in named if not is_matrix(name, parameter)]
        self.local_matrices, self.local_rest = _stand_ins(self.matrices), _stand_ins(rest)
        self._pairs = [
            *zip(self.matrices, self.local_matrices, strict=True),
            *zip(rest, self.local_rest, strict=True),
        ]

    def take_gradients(self) -> None:
        """Give the optimizers the gradients that backward has left."""
        for parameter, local in self._pairs:
            gradient: Any = parameter.grad
            local.grad = None if gradient is None else gradient.to_local()

    def forget_gradients(self) -> None:
        """After the step."""
        for parameter, _ in self._pairs:
            parameter.grad = None


def _stand_ins(parameters: Sequence[DTensor]) -> list[nn.Parameter]:
    return [nn.Parameter(parameter.to_local().detach()) for parameter in parameters]


def gathered(
    matrices: Sequence[DTensor], rows: Sequence[Tensor], group: dist.ProcessGroup, factor: Factor
) -> list[Tensor]:
    """All matrices on all ranks: one gather each, and the same Newton–Schulz everywhere.

    Args:
        matrices: sharded by rows.
        rows: this rank's, of what is to be orthogonalised.
        group: the ranks.
        factor: the orthogonal factor of a whole matrix.

    Returns:
        This rank's rows of the factors.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    results = []
    for matrix, mine in zip(matrices, rows, strict=True):
        sharded = DTensor.from_local(
            mine,
            matrix.device_mesh,
            matrix.placements,
            run_check=False,
            shape=matrix.shape,
            stride=matrix.stride(),
        )
        whole: Any = sharded.full_tensor()
        parts = factor(whole).chunk(ranks)
        results.append(parts[rank] if rank < len(parts) else mine)
    return results


def scattered(
    matrices: Sequence[DTensor], rows: Sequence[Tensor], group: dist.ProcessGroup, factor: Factor
) -> list[Tensor]:
    """Every matrix on one rank: an all-to-all of rows there and one back, for all of a shape together.

    Arguments and result are those of :func:`gathered`.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(matrix.shape), []).append(index)
    results: list[Tensor] = list(rows)
    for (height, width), indices in by_shape.items():
        share, part = -(-len(indices) // ranks), -(-height // ranks)
        sent = rows[0].new_zeros(ranks, share, part, width)
        for place, index in enumerate(indices):
            sent[place % ranks, place // ranks, : len(rows[index])] = rows[index]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        whole = received.transpose(0, 1).reshape(share, ranks * part, width)
        for slot in range(share):
            if slot * ranks + rank < len(indices):
                whole[slot, :height] = factor(whole[slot, :height])
        back = whole.view(share, ranks, part, width).transpose(0, 1).contiguous()
        returned = torch.empty_like(back)
        dist.all_to_all_single(returned, back, group=group)
        for place, index in enumerate(indices):
            results[index] = returned[place % ranks, place // ranks, : len(rows[index])]
    return results
