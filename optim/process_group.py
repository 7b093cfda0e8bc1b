"""Sign votes and exact means over a ``torch.distributed`` process group, for scripts without a
coordinator."""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from optim import bits
from optim.exchanged import ExchangedOptimizer
from optim.mean import Row, mean_into
from optim.packs import check_payload
from protos.buckets import LINE_BYTES, BucketTable

CHUNK_BYTES = 4 << 20


class GroupReduceError(RuntimeError):
    """A collective that failed or missed its deadline, or ranks that disagree; the text says which and in
    what round."""


class MajorityAllReduce:
    """The reduction of a round over a process group: majority of the voted bits, mean of the fp32 sections.

    Every rank gathers the contributions of all ranks, chunk by chunk, and reduces them in the order of the
    ranks: integers for votes, an fp64 sum for means, so that all ranks compute the same bytes. A rank that
    abstains takes part with weight 0; a tie takes the bit of voter ``round_index % voters``. Each rank
    receives ``world - 1`` payloads: fine within a machine room and up to about eight ranks, beyond that use a
    coordinator.

    Assign it to an optimizer: ``optimizer.reduce = MajorityAllReduce()``, and call
    :func:`broadcast_shared_tensors` once before the first step.

    Args:
        process_group: the default group if ``None``. With NCCL, contributions pass through ``device``.
        device: where collectives read and write; the CPU if ``None``.
        timeout: seconds that one collective may take.
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

    def __call__(self, payload: Tensor | None, *, round_index: int, table: BucketTable) -> Tensor | None:
        """Reduce one contribution (uint8, ``table.nbytes``, or ``None`` to abstain) with those of all other
        ranks.

        Returns the result on the CPU, or ``None`` if every rank abstained.

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
        result = torch.empty(table.nbytes, dtype=torch.uint8)
        for reduce, begin, end in table.sections():
            for start in range(begin, end, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, end)
                part = (
                    torch.zeros(stop - start, dtype=torch.uint8) if payload is None else payload[start:stop]
                )
                what = f"bytes {start}..{stop} of round {round_index}"
                rows = [row for rank, row in enumerate(self._gather(part, what)) if rank in voters]
                out = result[start:stop].numpy()
                if reduce == "majority":
                    bits.tally(rows, casting=round_index % len(rows), out=out)
                else:
                    mean_into(rows, [1] * len(rows), out)
        return result

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
        try:
            work = dist.all_gather(list(gathered), mine, group=self._group, async_op=True)
            if work is not None:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise GroupReduceError(
                f"gathering {what} failed or took longer than {self._timeout.total_seconds():g} s: {error}"
            ) from error
        return list(gathered.cpu().numpy())


def broadcast_shared_tensors(
    optimizer: ExchangedOptimizer, process_group: dist.ProcessGroup | None = None, *, source: int = 0
) -> None:
    """Copy parameters and shared state of rank ``source`` (a global rank) to every rank of the group."""
    for tensor in optimizer.shared_tensors().values():
        dist.broadcast(tensor, source, group=process_group)
