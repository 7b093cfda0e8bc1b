"""Votes, means and bases over a ``torch.distributed`` process group, for scripts without a coordinator."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from optim import bits
from optim.aggregate import Aggregation, ReducerMemory
from optim.mean import Row
from optim.packs import check_payload
from optim.pieces import Part, parts_of
from optim.round_optimizer import RoundOptimizer
from protos.buckets import LINE_BYTES, BucketTable

CHUNK_BYTES = 4 << 20


class GroupReduceError(RuntimeError):
    """A collective that failed or missed its deadline, or ranks that disagree; the text says which and in
    what round."""


class MajorityAllReduce:
    """The reduction of a round over a process group.

    Votes and exact means: every rank gathers the contributions of all ranks, chunk by chunk, and reduces them
    in the order of the ranks: integers for votes, an fp64 sum for means, so that all ranks compute the same
    bytes. Encoded means and bases: the first rank gathers the contributions and sends the result to all, as
    a coordinator would; it alone holds the memory of them. A rank that abstains takes part with weight 0; a
    tie takes the bit of :func:`~optim.aggregate.casting_voter`. Each rank receives ``world - 1`` votes: fine
    within a machine room and up to about eight ranks, beyond that use a coordinator.

    Assign it to an optimizer: ``optimizer.reduce = MajorityAllReduce()``, and call
    :func:`broadcast_shared_tensors` once before the first step.

    Args:
        process_group: the default group if ``None``. With NCCL, contributions pass through ``device``.
        device: where collectives read and write; the CPU if ``None``.
        timeout: seconds that one collective may take.

    Attributes:
        memory: what the first rank carries from round to round, see :class:`~optim.aggregate.ReducerMemory`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | None = None,
        timeout: float = 300.0,
    ) -> None:
        self._group = process_group
        self._device = torch.device("cpu") if device is None else device
        self._timeout = timedelta(seconds=timeout)
        self._world = dist.get_world_size(process_group)
        self._first = 0 if process_group is None else dist.get_global_rank(process_group, 0)
        self.memory = ReducerMemory()

    def __call__(self, payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
        """Reduce one contribution (uint8, ``table.nbytes``, or ``None`` to abstain) with those of all other
        ranks.

        Returns the result (uint8, ``table.result_nbytes``) on the CPU, or ``None`` if every rank abstained.

        Raises:
            GroupReduceError: if the ranks are in different rounds or hold different bucket tables, or a
                collective fails or misses its deadline.
            PayloadError: for a payload that does not fit the table.
        """
        if payload is not None:
            check_payload(table, payload, "the contribution")
        voters = self._agree_on_round(round_index, table, payload is not None)
        if not voters:
            return None
        result = torch.empty(table.result_nbytes, dtype=torch.uint8)
        own = torch.zeros(table.nbytes, dtype=torch.uint8) if payload is None else payload
        aggregation = Aggregation(
            table, len(voters), round_index=round_index, tally=bits.tally, memory=self.memory
        )
        for part in parts_of(table):
            whole = part.bucket >= 0
            for piece in [part] if whole else part.chunks(CHUNK_BYTES):
                what = f"bytes {piece.out_start}..{piece.out_end} of round {round_index}"
                out = result[piece.out_start : piece.out_end]
                mine = own[piece.start : piece.end]
                if whole:
                    self._reduce_at_first(aggregation, piece, mine, voters, out, what)
                else:
                    rows = [row for rank, row in enumerate(self._gather(mine, what)) if rank in voters]
                    aggregation.reduce(piece, rows, out.numpy())
        aggregation.commit()
        return result

    def _reduce_at_first(
        self, aggregation: Aggregation, part: Part, mine: Tensor, voters: set[int], out: Tensor, what: str
    ) -> None:
        """A whole bucket: contributions to the first rank, the result from there to all."""
        first = dist.get_rank(self._group) == 0
        rows: list[Row] = []
        if part.end > part.start:
            gathered = self._gather_at_first(mine, what)
            rows = [row for rank, row in enumerate(gathered) if rank in voters]
        if first:
            aggregation.reduce(part, rows, out.numpy())
        sent = out.to(self._device)
        self._wait(
            lambda: dist.broadcast(sent, self._first, group=self._group, async_op=True),
            f"receiving {what} from the first rank",
        )
        out.copy_(sent)

    def _agree_on_round(self, round_index: int, table: BucketTable, votes: bool) -> set[int]:
        """Ranks that vote. A mismatch is found before any payload is exchanged, so nothing is reduced across
        rounds."""
        header = np.zeros(LINE_BYTES, np.uint8)
        header[:32] = np.frombuffer(bytes.fromhex(table.digest), np.uint8)
        header[32:40] = np.frombuffer(round_index.to_bytes(8, "little"), np.uint8)
        header[40] = votes
        headers = self._gather(torch.from_numpy(header), f"the headers of round {round_index}")
        for rank, other in enumerate(headers):
            if bytes(other[:32]) != bytes(header[:32]):
                raise GroupReduceError(
                    f"rank {rank} has the bucket table {bytes(other[:32]).hex()[:12]}, this rank "
                    f"{table.digest[:12]}: all ranks must build the same model and optimizer"
                )
            if bytes(other[32:40]) != bytes(header[32:40]):
                there = int.from_bytes(bytes(other[32:40]), "little")
                raise GroupReduceError(f"rank {rank} is in round {there}, this rank in round {round_index}")
        return {rank for rank, other in enumerate(headers) if other[40]}

    def _gather(self, part: Tensor, what: str) -> list[Row]:
        mine = part.to(self._device).contiguous()
        gathered = torch.empty(self._world, mine.numel(), dtype=torch.uint8, device=self._device)
        self._wait(
            lambda: dist.all_gather(list(gathered), mine, group=self._group, async_op=True),
            f"gathering {what}",
        )
        return list(gathered.cpu().numpy())

    def _gather_at_first(self, part: Tensor, what: str) -> list[Row]:
        """What all ranks hold, on the first rank; nothing on the others."""
        mine = part.to(self._device).contiguous()
        ranks = self._world if dist.get_rank(self._group) == 0 else 0
        gathered = torch.empty(ranks, mine.numel(), dtype=torch.uint8, device=self._device)
        into = list(gathered) or None
        self._wait(
            lambda: dist.gather(mine, into, dst=self._first, group=self._group, async_op=True),
            f"gathering {what} at the first rank",
        )
        return list(gathered.cpu().numpy())

    def _wait(self, start: Callable[[], dist.Work | None], what: str) -> None:
        """Run a collective to its end."""
        try:
            work = start()
            if work is not None:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise GroupReduceError(
                f"{what} failed or took longer than {self._timeout.total_seconds():g} s: {error}"
            ) from error


def broadcast_shared_tensors(
    optimizer: RoundOptimizer, process_group: dist.ProcessGroup | None = None, *, source: int = 0
) -> None:
    """Copy parameters and shared state of rank ``source`` (a global rank) to every rank of the group."""
    for tensor in optimizer.shared_tensors().values():
        dist.broadcast(tensor, source, group=process_group)
