"""The single matrices of tensors that are cut or taken apart, and the ranks that work on them in the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from node.island.layout import GroupLayout
from node.island.planner_costs import FP32, ROWS, STACK, Floats, Integers, Priced
from node.island.planner_owner import REFUSED


class StepOwner(NamedTuple):
    """Where the optimizer works on the matrices of a tensor that does not lie whole on one rank.

    Attributes:
        ranks: of each of its matrices, in memory order.
        bytes: fp32 bytes that these ranks do not hold themselves: gathered before the step, sent back after.
    """

    ranks: tuple[int, ...]
    bytes: int


class Spans(NamedTuple):
    """Where matrices lie: their block, begin and end in its buffer, the first and the last rank that holds
    something of them, and the cuts of all blocks."""

    group: Integers
    begin: Integers
    end: Integers
    first: Integers
    last: Integers
    cuts: Integers

    def held(self, ranks: Integers) -> Integers:
        """Elements of each matrix that are on its rank of ``ranks``."""
        low = np.maximum(self.begin, self.cuts[self.group, ranks])
        high = np.minimum(self.end, self.cuts[self.group, ranks + 1])
        result: Integers = np.maximum(high - low, 0)
        return result


@dataclass(frozen=True)
class Parts:
    """The matrices of the tensors that are cut or taken apart: one entry a matrix in every array."""

    tensor: Integers
    start: Integers  # in the flattened tensor
    numel: Integers
    factors: Floats
    flops: Floats
    worker: Integers  # rank of the optimizer's work
    moved: Integers  # elements that the worker does not hold

    @staticmethod
    def of(priced: Priced) -> Parts:
        """Those of the tensors of kind ``STACK`` or ``ROWS``."""
        apart = np.flatnonzero((priced.kind == STACK) | (priced.kind == ROWS)).tolist()
        tables = [priced.costs[index].parts for index in apart]
        table = np.concatenate([np.zeros((0, 3)), *tables])
        lengths = np.array([len(part) for part in tables], np.int64)
        tensor = np.repeat(np.array(apart, np.int64), lengths)
        numel = table[:, 0].astype(np.int64)
        before = np.concatenate([[0], np.cumsum(numel)])[:-1]
        firsts = np.repeat(np.cumsum(lengths) - lengths, lengths)
        worker = np.full(len(tensor), REFUSED, np.int64)
        return Parts(
            tensor, before - before[firsts], numel, table[:, 1], table[:, 2], worker, np.zeros_like(numel)
        )

    def spans(self, priced: Priced, cut: Sequence[tuple[Integers, GroupLayout]], ranks: int) -> Spans:
        """Where they lie in the layouts of the groups that are ``cut``, given with their tensors."""
        group = priced.group[self.tensor]
        offsets = np.zeros(len(priced.metas), np.int64)
        cuts = np.zeros((len(priced.groups), ranks + 1), np.int64)
        for members, layout in cut:
            offsets[members] = layout.offsets
            cuts[priced.group[members[0]]] = layout.cuts
        begin = offsets[self.tensor] + self.start
        end = begin + self.numel
        first, last = np.empty_like(begin), np.empty_like(begin)
        for number in np.unique(group).tolist():
            here = group == number
            first[here] = np.searchsorted(cuts[number], begin[here], side="right") - 1
            last[here] = np.searchsorted(cuts[number], end[here], side="left") - 1
        return Spans(group, begin, end, first, last, cuts)

    def workers(self, tensors: int) -> list[tuple[int, ...]]:
        """Of each of so many tensors the ranks that work on its matrices, in memory order; none where every
        matrix is whole on its rank."""
        apart = np.flatnonzero(np.bincount(self.tensor, self.moved, minlength=tensors))
        first, last = np.searchsorted(self.tensor, apart), np.searchsorted(self.tensor, apart, side="right")
        found: list[tuple[int, ...]] = [()] * tensors
        ranks = self.worker.tolist()
        for index, low, high in zip(apart.tolist(), first.tolist(), last.tolist(), strict=True):
            found[index] = tuple(ranks[low:high])
        return found

    def step_owners(self, priced: Priced) -> dict[str, StepOwner]:
        """Where the optimizer works on tensors of which some matrix is not whole on its rank."""
        moved = np.bincount(self.tensor, self.moved, minlength=len(priced.metas)).astype(np.int64)
        found = zip(priced.metas, self.workers(len(moved)), moved.tolist(), strict=True)
        return {meta.name: StepOwner(ranks, count * FP32) for meta, ranks, count in found if ranks}
