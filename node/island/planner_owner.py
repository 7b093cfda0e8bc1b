"""Which rank owns which whole matrix: longest processing time first, a class of equal matrices at a time.

Two steps. First *how many* matrices of each class every rank takes, which settles the balance of bytes and
FLOPs over the whole model; equal matrices are dealt all at once, so tens of thousands of experts cost no more
than a sort. Then *which* ones, block by block, so that no rank owns most of a block: it would have to send
all of it to everybody when the block is gathered. Ranks that are behind with their number come first, which
rotates the pattern from block to block.

A few matrices on a few ranks, where longest-processing-time-first may be a quarter above the optimum, are
searched to the end.

Costs are pairs (bytes, FLOPs), each in units of what a rank has on average; a rank is as loaded as the larger
of its two sums. All arithmetic is elementwise or sequential in float64, and ties go to the lower rank: every
process comes to the same owners.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from node.island.planner_costs import Floats, Integers

REFUSED: Final = -1
GOOD_ENOUGH: Final = 1.01  # of the lower bound: no search for more
_SEARCH: Final = 2_000_000  # exchanges to look at, all in all
_FEW: Final = 16  # items, and ranks, that are searched to the end
_NODES: Final = 20_000  # of that search, at most
_ONE_BY_ONE: Final = 32  # so many matrices of a block and class, or fewer, see each other's rank


class Classes(NamedTuple):
    """Items sorted into classes of equal cost, the heaviest class first."""

    of: Integers  # the class of each item
    cost: Floats  # [classes, 2]
    size: Integers  # items of each class


def classify(cost: Floats) -> Classes:
    """The classes of items whose costs are the rows of ``cost``."""
    if not len(cost):
        return Classes(np.zeros(0, np.int64), np.zeros((0, 2)), np.zeros(0, np.int64))
    order = np.lexsort((-cost[:, 1], -cost[:, 0], -cost.max(1)))
    ordered = cost[order]
    new = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(1)])
    of = np.empty(len(cost), np.int64)
    of[order] = np.cumsum(new) - 1
    return Classes(of, ordered[new], np.bincount(of))


def deal(
    cost: Floats, group: Integers, sizes: Floats | Integers, loads: Floats, room: float = np.inf
) -> Integers:
    """An owner for each item, or :data:`REFUSED` where it would give every rank more than ``room``.

    Args:
        cost: [items, 2], bytes and FLOPs in units of a rank's average.
        group: the block of each item; blocks are served in ascending order.
        sizes: what an item adds to the traffic of its owner when its block is gathered.
        loads: [2, ranks], what the ranks have already; brought up to date.
        room: the most bytes that a rank may have afterwards.
    """
    classes = classify(cost)
    counts = np.zeros((len(classes.size), loads.shape[1]), np.int64)
    for number, size in enumerate(classes.size.tolist()):
        counts[number] = fill(loads, classes.cost[number], size, room)
        loads += classes.cost[number][:, None] * counts[number]
    placed = counts.sum(1)
    if (placed == classes.size).all():
        exchange(loads, classes.cost, counts, room)
        if len(cost) <= _FEW and loads.shape[1] <= _FEW:
            search(loads, classes.cost, counts, room)
    taken = np.ones(len(cost), bool)
    for number in np.flatnonzero(placed < classes.size).tolist():
        members = np.flatnonzero(classes.of == number)
        members = members[np.argsort(group[members], kind="stable")]
        steps = np.arange(len(members) + 1) * placed[number] // len(members)
        taken[members] = np.diff(steps) > 0  # those refused are spread evenly over the blocks
    owners = np.full(len(cost), REFUSED, np.int64)
    chosen = np.flatnonzero(taken)
    owners[chosen] = spread(classes.of[chosen], group[chosen], sizes[chosen], counts)
    return owners


def fill(loads: Floats, cost: Floats, count: int, room: float) -> Integers:
    """How many of ``count`` equal items each rank takes if each in turn goes to the rank that is then loaded
    least (of equals, to the one given fewest); fewer altogether where there is no ``room``.

    The load of a rank with j of them grows with j, so the ``count`` smallest of all those loads are the ones
    that would have been chosen one by one.
    """
    ranks = loads.shape[1]
    depth = min(count, -(-count // ranks) + 1)
    while True:
        more = np.arange(1, depth + 1)[:, None]
        weight = loads[0] + more * cost[0]
        after = np.maximum(weight, loads[1] + more * cost[1])
        after[weight > room] = np.inf
        order = np.argsort(after, axis=None, kind="stable")[:count]
        order = order[np.isfinite(after.reshape(-1)[order])]
        counts = np.bincount(order % ranks, minlength=ranks)
        if depth >= count or counts.max(initial=0) < depth:
            return counts
        depth = min(count, 2 * depth)


def exchange(loads: Floats, cost: Floats, counts: Integers, room: float) -> None:
    """Lower the largest load by moving an item off it, or by exchanging one for another rank's, while that
    helps; ``loads`` and ``counts`` are brought up to date.

    What longest-processing-time-first leaves on the table is in the last few items, so a few dozen of the
    best exchanges of this kind recover most of it.
    """
    classes, ranks = counts.shape
    work = classes * (classes + 1) * ranks
    if not classes:
        return
    bound = _bound(loads, cost)
    back = np.concatenate([np.zeros((1, 2)), cost])  # nothing, or an item of a class, comes back
    for _ in range(min(256, _SEARCH // work)):
        busy = int(np.argmax(loads.max(0)))
        top = float(loads[:, busy].max())
        mine = np.flatnonzero(counts[:, busy])
        if top <= GOOD_ENOUGH * bound or not len(mine):
            return
        given = cost[mine][:, None, :] - back[None, :, :]  # [mine, classes + 1, 2]
        here = (loads[:, busy] - given).max(2)
        there = loads.T[None, None] + given[:, :, None, :]  # [mine, classes + 1, ranks, 2]
        score = np.maximum(there.max(3), here[:, :, None])
        score[there[..., 0] > room] = np.inf
        score[:, 1:][np.broadcast_to(counts == 0, (len(mine), classes, ranks))] = np.inf
        score[:, :, busy] = np.inf
        best = int(np.argmin(score))
        if not score.reshape(-1)[best] < top * (1 - 1e-9):
            return
        gives, takes, other = (int(x) for x in np.unravel_index(best, score.shape))
        change = given[gives, takes]
        loads[:, busy] -= change
        loads[:, other] += change
        counts[mine[gives], busy] -= 1
        counts[mine[gives], other] += 1
        if takes:
            counts[takes - 1, busy] += 1
            counts[takes - 1, other] -= 1


def search(loads: Floats, cost: Floats, counts: Integers, room: float) -> None:
    """Lower the largest load as far as it goes, by branch and bound over the ranks of one item after the
    other; ``loads`` and ``counts`` are brought up to date. What it has found after :data:`_NODES` steps, or
    within :data:`GOOD_ENOUGH` of the lower bound, is taken.
    """
    if not len(cost):
        return
    enough = GOOD_ENOUGH * _bound(loads, cost)
    top = float(loads.max())
    start = loads.copy()
    for number in range(len(cost)):
        start -= cost[number][:, None] * counts[number]
    start[np.abs(start) < 1e-12] = 0.0  # of what was added and is taken away again
    items = np.repeat(np.arange(len(cost)), counts.sum(1)).tolist()
    pairs = [(float(bytes_), float(flops)) for bytes_, flops in cost]
    best: list[int] | None = None
    nodes = 0

    def place(ranks: list[int], now: list[tuple[float, float]]) -> None:
        nonlocal best, top, nodes
        number = len(ranks)
        if number == len(items):
            best, top = ranks, max(map(max, now))
            return
        kind = items[number]
        first = ranks[-1] if number and items[number - 1] == kind else 0  # equal items: in order of ranks
        bytes_, flops = pairs[kind]
        tried: set[tuple[float, float]] = set()
        for rank in sorted(range(first, len(now)), key=lambda rank: (max(now[rank]), rank)):
            after = (now[rank][0] + bytes_, now[rank][1] + flops)
            if top <= enough or nodes >= _NODES:
                return
            if now[rank] in tried or after[0] > room or max(after) >= top * (1 - 1e-9):
                continue
            tried.add(now[rank])
            nodes += 1
            place([*ranks, rank], [*now[:rank], after, *now[rank + 1 :]])

    place([], [(float(bytes_), float(flops)) for bytes_, flops in start.T])
    if best is not None:
        counts[:] = 0
        np.add.at(counts, (np.array(items), np.array(best)), 1)
        loads[:] = start
        for number in range(len(cost)):
            loads += cost[number][:, None] * counts[number]


def _bound(loads: Floats, cost: Floats) -> float:
    """What the fullest rank has at least."""
    ranks = loads.shape[1]
    bytes_, flops = (math.fsum(row) / ranks for row in loads.tolist())
    return float(max(bytes_, flops, cost.max()))


def spread(kind: Integers, group: Integers, sizes: Floats | Integers, counts: Integers) -> Integers:
    """The rank of each item, given how many of each class a rank takes.

    Args:
        kind: class of each item, heaviest first.
        group: block of each item.
        sizes: what an item adds to its rank's share of the block.
        counts: [classes, ranks], adding up to the items of the class.
    """
    left = counts.copy()
    owners = np.empty(len(kind), np.int64)
    order = np.lexsort((kind, group))
    ordered_group, ordered_kind = group[order], kind[order]
    edges = np.flatnonzero((np.diff(ordered_group) != 0) | (np.diff(ordered_kind) != 0)) + 1
    before = -1
    here = np.zeros(counts.shape[1])
    for begin, end in zip([0, *edges.tolist()], [*edges.tolist(), len(order)], strict=True):
        if begin == end:
            continue
        if ordered_group[begin] != before:
            before = int(ordered_group[begin])
            here = np.zeros(counts.shape[1])
        items, quota = order[begin:end], left[ordered_kind[begin]]
        size = sizes[items[0]]
        if len(items) <= _ONE_BY_ONE:
            for item in items.tolist():
                open_ = quota > 0
                lightest = here[open_].min()
                rank = int(np.argmax(np.where(open_ & (here == lightest), quota, 0)))
                owners[item] = rank
                here[rank] += size
                quota[rank] -= 1
            continue
        at = 0
        while at < len(items):
            open_ranks = np.flatnonzero(quota)
            load = here[open_ranks]
            near = load < load.min() + size if size else load == load.min()  # lighter with one more
            turn = open_ranks[near]
            turn = turn[np.lexsort((-quota[turn], here[turn]))][: len(items) - at]
            rounds = min((len(items) - at) // len(turn), int(quota[turn].min()))
            if not near.all() and size:
                rounds = min(rounds, int((load[~near].min() - here[turn].max()) / size))
            rounds = max(1, rounds)
            owners[items[at : at + rounds * len(turn)]] = np.tile(turn, rounds)
            here[turn] += rounds * size
            quota[turn] -= rounds
            at += rounds * len(turn)
    return owners


def lightest_of_block(bytes_: Floats, here: Floats, loads: Floats) -> Integers:
    """The rank of every block's tail: the one with the least of the block, of these the least loaded.

    Args:
        bytes_: what each block's tail weighs, in the units of ``loads``.
        here: [blocks, ranks], what the ranks own of each block.
        loads: [2, ranks]; brought up to date.
    """
    owners = np.empty(len(bytes_), np.int64)
    for number, row in enumerate(here):
        candidates = np.flatnonzero(row == row.min())
        rank = int(candidates[np.argmin(loads[:, candidates].max(0))])
        owners[number] = rank
        loads[0, rank] += bytes_[number]
    return owners
