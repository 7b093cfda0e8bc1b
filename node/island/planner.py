"""Which rank of an island holds what of a whole model, and where its matrix optimizer works.

:func:`plan_island` is a pure function of the inventory, the number of ranks and the policy: every process
that asks comes to the same plan, with the same hash. Three placements:

* ``owner``: every matrix whole on one rank, whatever that does to the balance;
* ``ragged``: everything cut at a granularity, in equal segments where that costs next to no padding;
* ``auto``: matrices are owned as long as no rank then holds more than the average and some slack; the others
  are cut by rows, which fills the ranks up to the same level, and gathered to one rank for the optimizer's
  step.

In ``owner`` and ``auto``, embeddings, output heads and frozen weights are cut by rows, stacks of matrices one
matrix at a time, and the vectors of a block stay together on the rank that owns least of it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from node.island.inventory import Weight
from node.island.layout import EVEN_PADDING, GroupLayout, LayoutError, Plan
from node.island.planner_costs import (
    FP32,
    MATRIX,
    ROWS,
    STACK,
    TAIL,
    Floats,
    Integers,
    Priced,
    Rule,
    cut_by_rows,
    gathered_bytes,
    group_key,
    largest_matrix,
    largest_unit,
    price,
    rule_named,
)
from node.island.planner_owner import REFUSED, deal, lightest_of_block
from node.island.planner_parts import Parts, StepOwner
from node.island.planner_ragged import before_cuts, equal, layout_owned, uneven

PlacementName = Literal["auto", "owner", "ragged"]
LEVEL: Final = 0.01  # of the average: ranks that differ by less take equal shares of what is cut
COMPUTE_BYTES: Final = 2  # an entry of a gathered weight or of its gradient, in bfloat16


@dataclass(frozen=True)
class Policy:
    """What the planner may do.

    Attributes:
        placement: see the module's text.
        granularity: of what is cut: see :func:`~node.island.layout.granularity_of`.
        slack: how much more than the average a rank may hold before matrices are cut (``auto``).
        memory: bytes of a rank for weights, gradients, optimizer state and what is gathered; None: not known.
        compute_bytes: of an entry of a gathered weight, and of its gradient.
    """

    placement: PlacementName = "auto"
    granularity: str | int = "row"
    slack: float = 0.1
    memory: int | None = None
    compute_bytes: int = COMPUTE_BYTES

    def __post_init__(self) -> None:
        if self.placement not in get_args(PlacementName):
            raise LayoutError(f"placement {self.placement!r} is unknown: use auto, owner or ragged")
        if not self.slack >= 0:
            raise LayoutError(f"slack {self.slack}: a rank may hold the average and something >= 0 more")


@dataclass(frozen=True)
class IslandPlan:
    """A plan and what it comes to.

    Attributes:
        plan: the layouts, one or two for each block; what ``fully_shard(placement=…)`` takes.
        rule: the optimizer that was planned for.
        policy: as given.
        owners: rank of every tensor that is whole, -1 for those that are cut, in the order of ``priced``.
        parts: the matrices of tensors that are cut or taken apart, and who works on them.
        priced: the tensors and their costs.
        elements: of every rank, without padding.
        resident: bytes of every rank: fp32 weights, gradients, optimizer state.
        flops: of the matrix optimizer in a step, of every rank.
        spread: largest share that a rank has of a block, over the average rank's; averaged over the blocks.
        spread_bound: the least that ``spread`` could be with the tensors that are whole.
        gathered: bytes of weights and gradients that are whole on a rank at the same time.
    """

    plan: Plan
    rule: Rule
    policy: Policy
    parts: Parts = field(repr=False)
    priced: Priced = field(repr=False)
    owners: Integers = field(repr=False)
    elements: Integers = field(repr=False)
    resident: Floats = field(repr=False)
    flops: Floats = field(repr=False)
    spread: float
    spread_bound: float
    gathered: float

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.resident)

    @property
    def padding(self) -> int:
        """Elements of padding in all buffers together."""
        return sum(layout.total for layout in self.plan.groups) - int(self.priced.numel.sum())

    @property
    def padding_share(self) -> float:
        """Padding over elements."""
        return self.padding / max(1, int(self.priced.numel.sum()))

    @property
    def step_bytes(self) -> int:
        """fp32 bytes gathered to the owners of matrices that are cut, in a step; as many go back."""
        return int(self.parts.moved.sum()) * FP32

    @cached_property
    def step_owners(self) -> dict[str, StepOwner]:
        """Where the optimizer works on each tensor that is gathered for the step, by name."""
        return self.parts.step_owners(self.priced)

    @property
    def excess(self) -> float:
        """What the ranks that hold most of a block send more than an equal share, over all that is sent when
        every block is gathered once."""
        return (self.spread - 1) / self.ranks

    def hash(self) -> str:
        """SHA-256 of the layouts, in hexadecimal; see :meth:`Plan.hash`."""
        return self.plan.hash()


def plan_island(
    weights: Sequence[Weight], ranks: int, *, rule: Rule | str = "muon", policy: Policy | None = None
) -> IslandPlan:
    """Place ``weights`` on ``ranks`` ranks.

    Args:
        weights: of :mod:`node.island.inventory`.
        ranks: of the shard group.
        rule: the optimizer of the matrices, or its name.
        policy: what is allowed; ``Policy()`` if None.

    Raises:
        LayoutError: for no ranks, an empty inventory, an unknown optimizer or granularity.
    """
    policy = policy or Policy()
    rule = rule_named(rule) if isinstance(rule, str) else rule
    if ranks < 1:
        raise LayoutError(f"a plan for {ranks} ranks: give at least one")
    ragged = policy.placement == "ragged"
    with _collector_paused():
        priced = price(weights, rule, ragged=ragged, granularity=policy.granularity)
        return _Planner(priced, ranks, rule, policy).run()


class _Planner:
    """The state of one call of :func:`plan_island`; ``run`` fills it in order."""

    def __init__(self, priced: Priced, ranks: int, rule: Rule, policy: Policy) -> None:
        self.priced, self.ranks, self.rule, self.policy = priced, ranks, rule, policy
        self.mean = np.array([math.fsum(priced.resident.tolist()), math.fsum(priced.flops.tolist())]) / ranks
        self.mean[self.mean == 0] = 1.0
        self.loads: Floats = np.zeros((2, ranks))  # bytes and FLOPs, in units of a rank's average
        self.owners = np.full(len(priced.metas), REFUSED, np.int64)
        self.here: Floats = np.zeros((len(priced.groups), ranks))  # elements that are held of every block
        self.gathered = gathered_bytes(priced, policy.compute_bytes)
        self.cut: list[tuple[Integers, GroupLayout]] = []  # tensors and layout of groups that are cut

    def run(self) -> IslandPlan:
        self._own()
        self._pack()
        self.parts = Parts.of(self.priced)
        if self.policy.placement != "ragged":
            self._lend()
        owned = self._owned()
        self._cut()
        self._settle()
        return self._report([*owned, *(layout for _, layout in self.cut)])

    def _room(self) -> float:
        """The most that a rank may hold, in units of the average."""
        if self.policy.placement != "auto":
            return np.inf
        room = 1 + self.policy.slack
        if self.policy.memory is None:
            return room
        memory = (self.policy.memory - self.gathered) / float(self.mean[0])
        return min(room, memory) if memory >= 1 else room  # the model does not fit, however it is placed

    def _own(self) -> None:
        """Owners of whole matrices; those that no rank has room for are to be cut by rows."""
        priced, room = self.priced, self._room()
        items = np.flatnonzero(priced.kind == MATRIX)
        cost = np.stack([priced.resident[items], priced.flops[items]], 1) / self.mean
        owners = deal(cost, priced.group[items], priced.numel[items], self.loads, room)
        self.owners[items] = owners
        kept = owners != REFUSED
        np.add.at(self.here, (priced.group[items][kept], owners[kept]), priced.numel[items][kept])
        stacks = np.flatnonzero(priced.kind == STACK)
        largest = np.array([largest_matrix(priced, index) for index in stacks.tolist()]) / self.mean[0]
        for index in [*items[~kept].tolist(), *stacks[largest > room].tolist()]:
            cut_by_rows(priced, index, self.policy.granularity)

    def _pack(self) -> None:
        """The vectors of a block go together to the rank that has least of it, if anything there is owned;
        else they lie among what is cut."""
        priced = self.priced
        tails = np.flatnonzero(priced.kind == TAIL)
        groups = len(priced.groups)
        has = np.bincount(priced.group[self.owners != REFUSED], minlength=groups) > 0
        has |= (
            np.bincount(priced.group[(priced.kind == STACK) | (priced.kind == ROWS)], minlength=groups) == 0
        )
        tails = tails[has[priced.group[tails]]]
        sizes = np.bincount(priced.group[tails], priced.numel[tails], minlength=groups)
        weighs = np.bincount(priced.group[tails], priced.resident[tails], minlength=groups) / self.mean[0]
        blocks = np.flatnonzero(sizes)
        ranks = lightest_of_block(weighs[blocks], self.here[blocks], self.loads)
        self.here[blocks, ranks] += sizes[blocks]
        chosen = np.full(groups, REFUSED, np.int64)
        chosen[blocks] = ranks
        self.owners[tails] = chosen[priced.group[tails]]

    def _lend(self) -> None:
        """A rank for the optimizer's work on every matrix that is to be cut. Under ``auto`` before the cuts,
        which then make up for the factors; under ``ragged`` after them, when it is known which are whole."""
        parts = self.parts
        open_ = np.flatnonzero((parts.worker == REFUSED) & (self.priced.kind[parts.tensor] == ROWS))
        cost = np.stack([parts.factors[open_], parts.flops[open_]], 1) / self.mean
        group = self.priced.group[parts.tensor[open_]]
        parts.worker[open_] = deal(cost, group, parts.numel[open_], self.loads)

    def _settle(self) -> None:
        """Matrices that lie whole on a rank after all are worked on there; of the others it is known now how
        much of them is elsewhere."""
        parts = self.parts
        spans = parts.spans(self.priced, self.cut, self.ranks)
        whole = spans.first == spans.last
        parts.worker[whole] = spans.first[whole]
        if self.policy.placement == "ragged":
            self.loads[1] += np.bincount(spans.first[whole], parts.flops[whole], self.ranks) / self.mean[1]
            self._lend()
        parts.moved[:] = parts.numel - spans.held(parts.worker)
        workers = parts.workers(len(self.priced.metas))
        for number, (members, layout) in enumerate(self.cut):
            named = tuple([workers[index] for index in members.tolist()])
            if any(named):
                self.cut[number] = members, replace(layout, workers=named)

    def _owned(self) -> list[GroupLayout]:
        """The layouts of what is whole."""
        priced, layouts = self.priced, []
        for members in _members(priced.group, self.owners != REFUSED):
            metas = [priced.metas[index] for index in members.tolist()]
            layouts.append(layout_owned(metas, priced.numel[members], self.owners[members], self.ranks))
        return layouts

    def _cut(self) -> None:
        """The layouts of what is cut: into equal segments if the ranks are level and it costs next to no
        padding; else in proportion to what the ranks lack, errors made up for by the groups that follow.
        Groups of small units come last."""
        priced, bytes_each = self.priced, self.priced.resting
        groups = _members(priced.group, self.owners == REFUSED)
        whole = [math.fsum((bytes_each[members] * priced.numel[members]).tolist()) for members in groups]
        lacking = water_level(self.loads[0] * self.mean[0], math.fsum(whole))
        level = float(np.ptp(lacking)) <= LEVEL * float(self.mean[0])
        if level:
            lacking[:] = math.fsum(whole) / self.ranks
        shapes = [group_key([priced.metas[index] for index in members.tolist()]) for members in groups]
        units = {key: max(largest_unit(*kind) for kind in set(key)) for key in set(shapes)}
        known: dict[object, GroupLayout] = {}
        got, done, everything = np.zeros(self.ranks), 0.0, max(math.fsum(whole), 1.0)
        for number in sorted(range(len(groups)), key=lambda g: (-units[shapes[g]], g)):
            members = groups[number]
            metas = [priced.metas[index] for index in members.tolist()]
            done += whole[number]
            layout = None
            if level:
                key = shapes[number]
                if key not in known:  # most blocks of a model are alike
                    known[key] = equal(metas, self.ranks)
                layout = replace(known[key], tensors=tuple(metas))
                if layout.padding > EVEN_PADDING * sum(meta.numel for meta in metas):
                    layout = None
            if layout is None:
                want = np.maximum(lacking * (done / everything) - got, 0.0)
                layout = uneven(metas, want if want.any() else np.ones(self.ranks))
            got += np.diff(before_cuts(layout, bytes_each[members]))
            self.here[int(priced.group[members[0]])] += np.diff(before_cuts(layout, np.ones(len(members))))
            self.cut.append((members, layout))

    def _report(self, layouts: list[GroupLayout]) -> IslandPlan:
        priced, ranks = self.priced, self.ranks
        kept = self.owners != REFUSED
        at = self.owners[kept]
        resident = np.bincount(at, priced.resident[kept], minlength=ranks).astype(np.float64)
        flops = np.bincount(at, priced.flops[kept], minlength=ranks).astype(np.float64)
        for members, layout in self.cut:
            resident += np.diff(before_cuts(layout, priced.entry[members]))
        flops += np.bincount(self.parts.worker, self.parts.flops, ranks)
        resident += np.bincount(self.parts.worker, self.parts.factors, ranks)
        elements = self.here.sum(0).astype(np.int64)
        sizes = self.here.sum(1)
        bound = np.maximum(sizes / ranks, _largest_whole(priced, kept))
        average = max(1.0, float(sizes.sum()) / ranks)
        return IslandPlan(
            plan=Plan(tuple(layouts)),
            rule=self.rule,
            policy=self.policy,
            parts=self.parts,
            priced=priced,
            owners=self.owners,
            elements=elements,
            resident=resident,
            flops=flops,
            spread=float(self.here.max(1).sum()) / average,
            spread_bound=float(bound.sum()) / average,
            gathered=self.gathered,
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile: it would look again and again at tens of thousands of new objects,
    none of which is garbage, and take longer than making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _members(group: Integers, chosen: NDArray[np.bool_]) -> list[Integers]:
    """The chosen tensors of every group that has some, in order."""
    indices = np.flatnonzero(chosen)
    indices = indices[np.argsort(group[indices], kind="stable")]
    return [part for part in np.split(indices, np.flatnonzero(np.diff(group[indices])) + 1) if len(part)]


def _largest_whole(priced: Priced, kept: NDArray[np.bool_]) -> Floats:
    """Elements of the largest tensor of every block that is whole on a rank."""
    largest = np.zeros(len(priced.groups))
    np.maximum.at(largest, priced.group[kept], priced.numel[kept].astype(np.float64))
    return largest


def water_level(loads: Floats, amount: float) -> Floats:
    """What each rank gets of ``amount`` if the lowest loads are raised to one level."""
    order = np.sort(loads)
    levels = (np.cumsum(order) + amount) / np.arange(1, len(order) + 1)
    reached = int(np.flatnonzero(levels >= order)[-1])  # so many ranks and one more are raised
    result: Floats = np.maximum(levels[reached] - loads, 0.0)
    return result
