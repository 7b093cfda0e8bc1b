"""Gather and reduce of segments of unequal length: which collectives do it, and when each is the best.

A *gather* makes a group's whole buffer out of the segments of its ranks; a *reduce* adds the buffers of all
ranks and leaves every rank its own segment of the sum. The transports' own collectives want equal segments,
so there are several ways:

===========  =============================================================================================
``chunks``   gather: an uneven all-to-all makes equal chunks, moving only what is in excess, then an equal
             all-gather. Reduce: an equal all-to-all of chunks, a sum in the order of ranks, and an uneven
             all-to-all to the owners. With equal segments the uneven steps fall away.
``roots``    one broadcast, or one reduce, for every rank that holds something.
``peers``    gather by direct messages from every holder to every rank (MatrixFSDP's fan-out).
``fused``    reduce of equal segments by one reduce-scatter.
===========  =============================================================================================

Work is issued without waiting and progresses in stages (:class:`Transfer`), whose order is the same on all
ranks because the runtime advances them at the same points of the program.

On a GPU the stages run on a stream of their own, beside what is computed (:mod:`node.island.streams`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from node.island.costs import (
    Choice,
    GatherMode,
    Link,
    ReduceMode,
    choose,
    gather_costs,
    overlap,
    reduce_costs,
)
from node.island.deadline import ask, set_deadline
from node.island.layout import GroupLayout
from node.island.signature import signatures
from node.island.streams import Purpose, Side, side_of
from node.island.transfer import (
    Counters,
    IslandError,
    Stages,
    Transfer,
    all_gather_single,
    guarded,
    reduce_scatter_single,
)
from node.island.watch import WATCH


@dataclass(frozen=True)
class CommPolicy:
    """How the segments travel.

    Attributes:
        gather: a way, ``auto`` (by the cost model, from ``link``) or ``measure`` (by the clock, once).
        reduce: a way, or ``auto``.
        link: what the cost model assumes.
        ordered: sums are taken in the order of ranks, so that they equal one process that adds up the
            gradients of N micro-batches, bit for bit (reduces by ``chunks``).
        check_signatures: before each transfer all ranks compare what they are about to do; slow, for
            debugging.
        timeout: seconds that a collective may take before it fails; the process groups are given it as
            theirs. None: 300, or the timeout of the groups or of the default group if that is shorter.
    """

    gather: GatherMode | Literal["auto", "measure"] = "auto"
    reduce: ReduceMode | Literal["auto"] = "auto"
    link: Link = field(default_factory=Link)
    ordered: bool = False
    check_signatures: bool = False
    timeout: float | None = None


class Collectives:
    """The transfers of one shard group, and of the replicas beside it (hybrid sharding).

    Args:
        group: process group of the shards; None is the default group, or a single process without one.
        replicas: process group of the ranks that hold the same segment, or None.
        policy: how segments travel.
        sides: where transfers run, by device and kind.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        replicas: dist.ProcessGroup | None = None,
        policy: CommPolicy | None = None,
        sides: Callable[[torch.device, Purpose], Side] = side_of,
    ) -> None:
        self.policy = policy or CommPolicy()
        self.group, self.replicas, self._sides = group, replicas, sides
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank(group)
        self.ranks = 1 if alone else dist.get_world_size(group)
        self.copies = 1 if replicas is None else dist.get_world_size(replicas)
        self.backend = "gloo" if alone else str(dist.get_backend(group))
        self.counters = Counters()
        self._global = list(range(self.ranks))
        if group is not None:
            self._global = [dist.get_global_rank(group, rank) for rank in range(self.ranks)]
        groups = [each for each in (group or dist.group.WORLD, replicas) if each is not None]
        self.timeout = set_deadline(self.policy.timeout, groups)
        self._where, self._all = f"rank {self.rank} of {self.ranks}", list(self._global)
        if self.ranks * self.copies > 1:
            beside = [] if replicas is None else dist.get_process_group_ranks(replicas)
            self._where += f" (shard group of the global ranks {self._global}, replicas"
            self._where += f" {beside or 'none'}, timeout {self.timeout:g} s)"
            self._all += [rank for rank in beside if rank not in self._global]
        self._measured: GatherMode | None = None
        self._choices: dict[tuple[str, tuple[int, ...], int], str] = {}

    def guard(self, what: str) -> AbstractContextManager[None]:
        """Name what was under way when the transport fails."""
        return guarded(what, self._where, lambda said: ask(self._all, said))

    def _watch(self, what: str, side: Side) -> None:
        if (done := side.mark()) is not None:
            late = f"{what} has not ended on {self._where}"
            WATCH.begin(done, self.timeout, lambda: f"{late}. {ask(self._all, late)}")

    def gather_mode(self, layout: GroupLayout, itemsize: int) -> GatherMode:
        """The way this layout is gathered."""
        if self.policy.gather not in ("auto", "measure"):
            return cast(GatherMode, self.policy.gather)
        if self._measured is not None:
            return self._measured
        key = ("gather", layout.cuts, itemsize)
        if key not in self._choices:
            self._choices[key] = choose(gather_costs(layout, itemsize, self.policy.link)).mode
        return cast(GatherMode, self._choices[key])

    def reduce_mode(self, layout: GroupLayout, itemsize: int) -> ReduceMode:
        """The way this layout is reduced."""
        if self.policy.ordered:
            return "chunks"
        if self.policy.reduce != "auto":
            fits = self.policy.reduce != "fused" or layout.equal
            return self.policy.reduce if fits else "roots"
        key = ("reduce", layout.cuts, itemsize)
        if key not in self._choices:
            self._choices[key] = choose(reduce_costs(layout, itemsize, self.policy.link, self.backend)).mode
        return cast(ReduceMode, self._choices[key])

    def gather(
        self, what: str, layout: GroupLayout, segment: Tensor, allocate: Callable[[], Tensor]
    ) -> Transfer:
        """Start to make the whole buffer.

        Args:
            what: named in errors.
            layout: the same on all ranks.
            segment: this rank's, flat; not to be changed before the end.
            allocate: gives the buffer of ``layout.total`` elements. It is called at the second stage, so
                that the first (which needs a chunk only) can run ahead.
        """
        mode = self.gather_mode(layout, segment.element_size())
        self._announce("gather", what, mode, layout.total, segment)
        self.counters.gathers += 1
        return self._gather(what, layout, segment, allocate, mode)

    def _gather(
        self,
        what: str,
        layout: GroupLayout,
        segment: Tensor,
        allocate: Callable[[], Tensor],
        mode: GatherMode,
    ) -> Transfer:
        side = self._sides(segment.device, "gather")
        ways = {"chunks": self._gather_chunks, "roots": self._gather_roots, "peers": self._gather_peers}
        way = self._copy if self.ranks == 1 else ways[mode]
        stages = way(layout, segment, lambda: side.on_compute(allocate))
        return Transfer(what, stages, 2, self.guard, side, self._watch)

    def _copy(self, layout: GroupLayout, segment: Tensor, allocate: Callable[[], Tensor]) -> Stages:
        yield []
        full = allocate()
        full.copy_(segment)
        yield []
        return full

    def _gather_chunks(self, layout: GroupLayout, segment: Tensor, allocate: Callable[[], Tensor]) -> Stages:
        chunk, me = segment, self.rank
        if layout.equal:
            yield []
        else:
            arriving = [overlap(layout, rank, me) for rank in range(self.ranks)]
            leaving = [overlap(layout, me, rank) for rank in range(self.ranks)]
            chunk = segment.new_empty(layout.total // self.ranks)
            self.counters.gathered_bytes += (chunk.numel() - arriving[me]) * segment.element_size()
            yield [self._all_to_all(chunk, segment, arriving, leaving)]
        full = allocate()
        self.counters.gathered_bytes += (full.numel() - chunk.numel()) * segment.element_size()
        yield [_work(all_gather_single(full, chunk, group=self.group, async_op=True))]
        return full

    def _gather_roots(self, layout: GroupLayout, segment: Tensor, allocate: Callable[[], Tensor]) -> Stages:
        yield []
        full = allocate()
        parts = self._parts(layout, full)
        parts[self.rank].copy_(segment)
        self.counters.gathered_bytes += (full.numel() - segment.numel()) * segment.element_size()
        yield [
            _work(dist.broadcast(part, src=self._global[root], group=self.group, async_op=True))
            for root, part in enumerate(parts)
            if part.numel()
        ]
        return full

    def _gather_peers(self, layout: GroupLayout, segment: Tensor, allocate: Callable[[], Tensor]) -> Stages:
        yield []
        full = allocate()
        parts = self._parts(layout, full)
        parts[self.rank].copy_(segment)
        self.counters.gathered_bytes += (full.numel() - segment.numel()) * segment.element_size()
        operations = []
        for distance in range(1, self.ranks):  # every rank begins with another peer
            to, source = (self.rank + distance) % self.ranks, (self.rank - distance) % self.ranks
            if segment.numel():
                operations.append(dist.P2POp(dist.isend, parts[self.rank], self._global[to], self.group))
            if parts[source].numel():
                operations.append(dist.P2POp(dist.irecv, parts[source], self._global[source], self.group))
        yield list(dist.batch_isend_irecv(operations)) if operations else []
        return full

    def reduce(self, what: str, layout: GroupLayout, buffer: Tensor) -> Transfer:
        """Start to add the flat ``buffer`` of all ranks (and replicas); gives this rank's segment of the sum.

        ``buffer`` (``layout.total`` elements) is used up.
        """
        mode = self.reduce_mode(layout, buffer.element_size())
        self._announce("reduce", what, mode, layout.total, buffer)
        self.counters.reduces += 1
        stages = 0 if self.ranks == 1 else 1 if mode != "chunks" or layout.equal else 2
        if self._has_replicas(layout):
            stages += 1
        side = self._sides(buffer.device, "reduce")
        return Transfer(what, self._reduce(layout, buffer, mode, side), stages, self.guard, side, self._watch)

    def _reduce(self, layout: GroupLayout, buffer: Tensor | None, mode: ReduceMode, side: Side) -> Stages:
        assert buffer is not None
        if self.ranks == 1:
            segment = buffer
        else:
            way = self._reduce_chunks if mode == "chunks" else self._reduce_whole
            stages, buffer = way(layout, buffer, mode, side), None  # it is released in between
            segment = yield from stages
        if self._has_replicas(layout):
            self.counters.reduced_bytes += segment.numel() * segment.element_size()
            if self.policy.ordered:
                copies = [torch.empty_like(segment) for _ in range(self.copies)]
                yield [_work(dist.all_gather(copies, segment, group=self.replicas, async_op=True))]
                segment = _sum_in_order(copies)
            else:
                yield [_work(dist.all_reduce(segment, group=self.replicas, async_op=True))]
        return segment

    def _reduce_whole(
        self, layout: GroupLayout, buffer: Tensor | None, mode: ReduceMode, side: Side
    ) -> Stages:
        assert buffer is not None
        low, high = layout.cuts[self.rank], layout.cuts[self.rank + 1]
        self.counters.reduced_bytes += (buffer.numel() - (high - low)) * buffer.element_size()
        if mode == "fused":
            segment = buffer.new_empty(high - low)
            yield [_work(reduce_scatter_single(segment, buffer, group=self.group, async_op=True))]
        else:
            yield [
                _work(dist.reduce(part, dst=self._global[root], group=self.group, async_op=True))
                for root, part in enumerate(self._parts(layout, buffer))
                if part.numel()
            ]
            segment = buffer[low:high].clone()  # a view would keep the whole buffer
        side.join()  # the buffer is given back
        return segment

    def _reduce_chunks(
        self, layout: GroupLayout, buffer: Tensor | None, mode: ReduceMode, side: Side
    ) -> Stages:
        assert buffer is not None
        me, size = self.rank, buffer.element_size()
        received: Tensor | None = torch.empty_like(buffer)
        assert received is not None
        self.counters.reduced_bytes += buffer.numel() // self.ranks * (self.ranks - 1) * size
        yield [self._all_to_all(received, buffer, None, None)]
        side.join()  # the buffer is given back
        buffer = None
        summed = _sum_in_order(list(received.chunk(self.ranks))).clone()  # a view would keep all of them
        received = None
        if layout.equal:
            return summed
        arriving = [overlap(layout, me, rank) for rank in range(self.ranks)]
        leaving = [overlap(layout, rank, me) for rank in range(self.ranks)]
        segment = summed.new_empty(layout.resident(me))
        self.counters.reduced_bytes += (summed.numel() - leaving[me]) * size
        yield [self._all_to_all(segment, summed, arriving, leaving)]
        return segment

    def combine(self, what: str, value: Tensor, *, largest: bool = False) -> Tensor:
        """The sum (or maximum) of a scalar over the shard group: the one collective of clipping."""
        if self.ranks > 1:
            self._announce("scalar", what, "max" if largest else "sum", value.numel(), value)
            self.counters.scalars += 1
            with self.guard(what):
                operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
                dist.all_reduce(value, op=operation, group=self.group)
        return value

    def union(self, what: str, flags: Tensor) -> Tensor:
        """Elementwise maximum of uint8 ``flags`` over shards and replicas."""
        with self.guard(what):
            if self.ranks > 1:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            if self.copies > 1:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.replicas)
        return flags

    def copy_to_replicas(self, what: str, segment: Tensor) -> None:
        """Give all replicas the segment of the first."""
        if self.replicas is not None and self.copies > 1 and segment.numel():
            with self.guard(what):
                dist.broadcast(segment, src=dist.get_global_rank(self.replicas, 0), group=self.replicas)

    def require_same(self, what: str, text: str, device: torch.device) -> None:
        """Raise :class:`IslandError` on every rank unless all ranks and replicas give equal ``text``."""
        for group, count in ((self.group, self.ranks), (self.replicas, self.copies)):
            if count == 1:
                continue
            with self.guard(what):
                said = signatures(text, group, device)
            if len(set(said)) > 1:
                table = "; ".join(f"rank {rank}: {item}" for rank, item in enumerate(said))
                raise IslandError(
                    f"the ranks disagree on {what}: {table}. All ranks must build the same model and give"
                    f" fully_shard the same arguments, and run the same units in the same order"
                )

    def measure(self, layout: GroupLayout, sample: Tensor) -> Choice:
        """Time each way of gathering ``layout`` (of the dtype and device of ``sample``), twice; the fastest
        on the slowest rank becomes the way for all layouts."""
        seconds: dict[GatherMode, float] = {}
        segment = sample.new_zeros(layout.resident(self.rank))
        modes: tuple[GatherMode, ...] = ("chunks", "roots")
        for mode in modes:
            what = f"timing of {mode}"
            for _ in range(2):
                begin = time.perf_counter()
                self._gather(what, layout, segment, lambda: sample.new_empty(layout.total), mode).wait()
                if sample.is_cuda:
                    torch.cuda.synchronize(sample.device)
                spent = torch.tensor([time.perf_counter() - begin], device=sample.device)
                with self.guard(what):
                    dist.all_reduce(spent, op=dist.ReduceOp.MAX, group=self.group)
                seconds[mode] = min(seconds.get(mode, float("inf")), spent.item())
        choice = choose(seconds)
        self._measured = cast(GatherMode, choice.mode)
        return choice

    def _has_replicas(self, layout: GroupLayout) -> bool:
        return self.replicas is not None and self.copies > 1 and layout.resident(self.rank) > 0

    def _parts(self, layout: GroupLayout, buffer: Tensor) -> list[Tensor]:
        return [buffer[layout.cuts[rank] : layout.cuts[rank + 1]] for rank in range(self.ranks)]

    def _all_to_all(
        self, target: Tensor, source: Tensor, arriving: list[int] | None, leaving: list[int] | None
    ) -> dist.Work:
        return _work(
            dist.all_to_all_single(target, source, arriving, leaving, group=self.group, async_op=True)
        )

    def _announce(self, kind: str, what: str, mode: str, numel: int, tensor: Tensor) -> None:
        if self.policy.check_signatures:
            text = f"{kind} {what} {mode} {numel} {tensor.dtype}"
            self.require_same("the next transfer", text, tensor.device)


def _work(work: object) -> dist.Work:
    return cast(dist.Work, work)


def _sum_in_order(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total
