"""The shared state of a node whose ranks hold a part of it each: its digest, and its way through the leader.

The leader alone speaks with the coordinator. For an upload it collects what the others hold, one tensor after
the other; after a download it hands out what is theirs. Both are apart from the network: a transfer that
breaks off there leaves nobody waiting here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from node.exchange.base import ExchangeError
from node.exchange.tensor_bytes import LayoutError, Row, total_bytes
from node.joint import disjoint, gathered
from node.ranks import Ranks
from node.state import SharedState, main_dtype
from protos.digests import combine


class WholeState:
    """All of a node's shared state. Everything but the attributes is a collective of the node's ranks.

    Args:
        part: what this rank holds.
        ranks: of the node; more than one are those of the default process group.

    Attributes:
        part: what this rank holds.
        nbytes: of all tensors.
        dtype: that most of the elements have.

    Raises:
        LayoutError: two ranks hold a tensor of one name.
        ExchangeError: a rank is gone.
    """

    def __init__(self, part: SharedState, ranks: Ranks) -> None:
        self.part = part
        self._ranks = ranks
        mine = [[row.name, row.dtype, list(row.shape)] for row in part.rows]
        held = gathered(ranks, "the tensors that each rank holds", mine)
        self._rows = sorted(
            (
                (rank, Row(name, dtype, tuple(shape)))
                for rank, rows in enumerate(held)
                for name, dtype, shape in rows
            ),
            key=lambda item: item[1].name,
        )
        for (_, one), (_, other) in zip(self._rows, self._rows[1:], strict=False):
            if one.name == other.name:
                raise LayoutError(f"two ranks of this node hold {one.name!r}: each tensor has one owner")
        rows = [row for _, row in self._rows]
        self.nbytes = total_bytes(rows)
        self.dtype = main_dtype(rows)

    def digest(self) -> str:
        """The digest of the whole."""
        mine = self.part.digests()
        return combine(disjoint(gathered(self._ranks, "the digests of the shared state", mine)))

    def staging(self) -> dict[str, torch.Tensor]:
        """Where the leader keeps the whole meanwhile: its own tensors, and new ones in host memory."""
        if self._ranks.rank:
            return {}
        return {
            row.name: torch.empty(row.shape, dtype=getattr(torch, row.dtype))
            if rank
            else self.part.tensors[row.name]
            for rank, row in self._rows
        }

    def collect(self) -> Mapping[str, torch.Tensor]:
        """All tensors on the leader, nothing on the others."""
        if self._ranks.size == 1:
            return self.part.tensors
        staged = self.staging()
        self._move(staged, to_leader=True)
        return staged

    def spread(self, staged: Mapping[str, torch.Tensor]) -> None:
        """Give every rank what it holds, out of the leader's ``staged``."""
        if self._ranks.size > 1:
            self._move(staged, to_leader=False)

    @torch.no_grad()
    def _move(self, staged: Mapping[str, torch.Tensor], *, to_leader: bool) -> None:
        me = self._ranks.rank
        try:
            for rank, row in self._rows:
                if rank == 0 or me not in (0, rank) or not row.nbytes:
                    continue
                tensor = self.part.tensors[row.name] if me else staged[row.name]
                host = tensor.cpu().contiguous()
                data = host.view(-1).view(torch.uint8)
                if to_leader == bool(me):
                    dist.send(data, 0 if me else rank)
                    continue
                dist.recv(data, rank if to_leader else 0)
                if host is not tensor:
                    tensor.copy_(host)
        except RuntimeError as error:
            what = "collecting" if to_leader else "handing out"
            raise ExchangeError(
                f"{what} the shared state failed between the ranks of this node: {error}"
            ) from error
