"""Which node reduces which slice of a round: the shares of :mod:`coordinator.shares`, cut from the table."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from coordinator.shares import Site, Workload, best, workload
from optim.slices import Slice, slice_pieces, units
from protos.buckets import BucketTable, TableSchedule

GAIN: Final = Fraction(1, 10)  # of the time of a round, for which it is cut anew where the nodes are the same


@dataclass(frozen=True)
class Assigned:
    """A slice and the node that reduces it."""

    slice: Slice
    reducer: str


@dataclass(frozen=True)
class Plan:
    """Who reduces what of one table.

    Attributes:
        slices: in the order of the table, without gaps, none of them empty; none at all: nobody is able, and
            the round goes by the hub.
        seconds: that the slowest link needs for a round; ``None`` where no link is known.
        reason: in words.
    """

    slices: tuple[Assigned, ...]
    seconds: float | None
    reason: str


def plan(table: BucketTable, sites: Sequence[Site], coordinator: Site | None = None) -> Plan:
    """Cut the rounds of ``table`` into slices by the :func:`~coordinator.shares.shares` of ``sites``.

    Each bound is the one between two :func:`~optim.slices.units` that is nearest to the exact bound; who is
    left without a unit reduces nothing. The slices are in the order of the sites, the coordinator's is last.

    Raises:
        ValueError: two sites have one name.
    """
    work = workload(sites, table.nbytes, table.result_nbytes, coordinator)
    shares = best(work)
    if not any(shares.fractions.values()):
        return Plan((), None, shares.reason)
    finest = units(table, slice_pieces(table))
    # A unit weighs the mean of what it is of a contribution and of a result, in whole numbers.
    weights = [unit.nbytes * work.out_nbytes + unit.out_nbytes * work.nbytes for unit in finest]
    bounds = [0, *itertools.accumulate(weights)]
    exact = itertools.accumulate(fraction * bounds[-1] for fraction in shares.fractions.values())
    assigned: list[Assigned] = []
    first = 0
    for node, target in zip(shares.fractions, exact, strict=True):
        last = bisect.bisect_left(bounds, target)
        if last and target - bounds[last - 1] <= bounds[last] - target:
            last -= 1
        if last > first:
            start, end = finest[first], finest[last - 1]
            assigned.append(Assigned(Slice(start.start, end.end, start.out_start, end.out_end), node))
            first = last
    return _plan(work, assigned, shares.reason)


def plan_all(
    tables: TableSchedule, sites: Sequence[Site], coordinator: Site | None = None
) -> tuple[Plan, ...]:
    """The :func:`plan` of every table of a run."""
    return tuple(plan(table, sites, coordinator) for table in tables.tables)


def renewed(
    table: BucketTable, assigned: Sequence[Assigned], sites: Sequence[Site], coordinator: Site | None = None
) -> Plan:
    """The :func:`plan` after something has changed: what was ``assigned`` stays if the same nodes reduce in
    both, and a round would hardly take less time (:data:`GAIN`).

    Raises:
        ValueError: two sites have one name.
    """
    fresh = plan(table, sites, coordinator)
    if not fresh.slices or {one.reducer for one in fresh.slices} != {one.reducer for one in assigned}:
        return fresh
    work = workload(sites, table.nbytes, table.result_nbytes, coordinator)
    before, after = _slowest(work, _load(work, assigned)), _slowest(work, _load(work, fresh.slices))
    if after < before * (1 - GAIN):
        return fresh
    return _plan(work, assigned, fresh.reason)


def moved(
    assigned: Sequence[Assigned],
    away_from: Collection[str],
    sites: Sequence[Site],
    coordinator: Site | None = None,
) -> Plan:
    """The same slices without the nodes ``away_from``, and without those that are not there any more.

    Each of their slices, in order, goes to the able site with which the slowest link of the round is done
    soonest; of several such to a member before the coordinator, then to the one that is itself done soonest,
    then to the first.

    Args:
        assigned: all slices of the table.
        away_from: who shall not reduce; they may still be members.
        sites: all members of the round, as they are now.
        coordinator: if it may reduce.

    Raises:
        ValueError: two sites have one name, or there are no slices.
    """
    nbytes = sum(one.slice.nbytes for one in assigned)
    work = workload(sites, nbytes, sum(one.slice.out_nbytes for one in assigned), coordinator)
    takers = [node for node in work.able if node not in away_from]
    away = {one.reducer for one in assigned if one.reducer in away_from or one.reducer not in work.rates}
    if away and not takers:
        return Plan((), None, f"nobody else can be reached who could reduce for {', '.join(sorted(away))}")
    load = _load(work, [one for one in assigned if one.reducer not in away])
    slowest = _slowest(work, load)
    slices, words = [], []
    for one in assigned:
        if one.reducer in away:
            with_it = {node: _added(load[node], one.slice) for node in takers}
            after = {node: work.seconds(node, *with_it[node]) for node in takers}
            taker = min(
                takers, key=lambda node: (max(slowest, after[node]), node == work.coordinator, after[node])
            )
            load[taker], slowest = with_it[taker], max(slowest, after[taker])
            words.append(f"{taker} reduces {one.slice.out_nbytes} bytes instead of {one.reducer}")
            one = replace(one, reducer=taker)
        slices.append(one)
    return _plan(work, slices, "; ".join(words) or "all reducers stay")


def _plan(work: Workload, assigned: Sequence[Assigned], reason: str) -> Plan:
    seconds = float(_slowest(work, _load(work, assigned))) if work.measured else None
    return Plan(tuple(assigned), seconds, reason)


def _load(work: Workload, assigned: Sequence[Assigned]) -> dict[str, tuple[int, int]]:
    """What everybody reduces: bytes of every contribution, and of the result."""
    load = dict.fromkeys(work.rates, (0, 0))
    for one in assigned:
        load[one.reducer] = _added(load[one.reducer], one.slice)
    return load


def _added(load: tuple[int, int], part: Slice) -> tuple[int, int]:
    return load[0] + part.nbytes, load[1] + part.out_nbytes


def _slowest(work: Workload, load: Mapping[str, tuple[int, int]]) -> Fraction:
    """Seconds that the slowest link needs."""
    return max(work.seconds(node, *own) for node, own in load.items())
