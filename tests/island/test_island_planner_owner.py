"""Owners: dealing in bulk equals dealing one by one, is near the optimum, and spreads every block."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.island.inventory import Matrices, Weight
from node.island.planner import Policy, plan_island
from node.island.planner_costs import newton_schulz_flops
from node.island.planner_owner import (
    REFUSED,
    classify,
    deal,
    exchange,
    fill,
    lightest_of_block,
    search,
    spread,
)

Pair = tuple[float, float]


def one_by_one(loads: np.ndarray, cost: Pair, count: int, room: float) -> list[int]:
    """Longest processing time first, as the textbook has it; of equals, who has been given fewest."""
    bytes_, flops = loads.tolist()
    counts = [0] * len(bytes_)
    for _ in range(count):
        after = []
        for rank, had in enumerate(counts):
            weight = bytes_[rank] + (had + 1) * cost[0]
            if weight <= room:
                after.append((max(weight, flops[rank] + (had + 1) * cost[1]), had, rank))
        if not after:
            break
        counts[min(after)[2]] += 1
    return counts


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=7),
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.integers(0, 40),
    st.sampled_from((np.inf, 45.0, 20.0)),
)
def test_equal_items_dealt_at_once_or_one_by_one(
    loads: list[tuple[int, int]], cost: tuple[int, int], count: int, room: float
) -> None:
    start = np.array(loads, np.float64).T.copy()
    at_once = fill(start, np.array(cost, np.float64), count, room)
    assert at_once.tolist() == one_by_one(start, cost, count, room)


def optimum(cost: list[Pair], ranks: int) -> float:
    """The least possible largest load, by going through all assignments."""
    best = float("inf")
    loads = [[0.0, 0.0] for _ in range(ranks)]

    def assign(item: int, top: float) -> None:
        nonlocal best
        if top >= best:
            return
        if item == len(cost):
            best = top
            return
        tried = set()
        for load in loads:
            if tuple(load) not in tried:
                tried.add(tuple(load))
                load[0] += cost[item][0]
                load[1] += cost[item][1]
                assign(item + 1, max(top, *load))
                load[0] -= cost[item][0]
                load[1] -= cost[item][1]

    assign(0, 0.0)
    return best


def test_the_largest_load_is_near_that_of_the_best_assignment() -> None:
    rng = random.Random(4)
    ratios = []
    for _ in range(150):
        ranks = rng.choice((2, 3, 4))
        shapes = [
            (rng.choice((16, 24, 64, 96)), rng.choice((16, 48, 64, 128))) for _ in range(rng.randint(1, 8))
        ]
        cost = np.array([(m * n, newton_schulz_flops(m, n)) for m, n in shapes], np.float64)
        cost /= cost.sum(0) / ranks
        loads = np.zeros((2, ranks))
        owners = deal(cost, np.arange(len(cost)) // 3, cost[:, 0], loads)
        taken = np.array([[cost[owners == r, d].sum() for r in range(ranks)] for d in (0, 1)])
        assert np.allclose(taken, loads)
        ratios.append(float(loads.max()) / optimum([(float(b), float(f)) for b, f in cost], ranks))
    assert min(ratios) >= 1 - 1e-9
    assert max(ratios) <= 1.05  # also with fewer matrices than ranks: the optimum is then the largest matrix


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=60),
    st.integers(1, 12),
)
def test_spread_takes_the_numbers_that_were_dealt(items: list[tuple[int, int]], ranks: int) -> None:
    group = np.array([block for block, _ in items])
    cost = np.array([(float(size), float(size * size)) for _, size in items])
    classes = classify(cost)
    assert (classes.cost[classes.of] == cost).all()
    assert (np.diff(classes.cost.max(1)) <= 0).all()
    loads = np.zeros((2, ranks))
    counts = np.stack([fill(loads, classes.cost[c], int(n), np.inf) for c, n in enumerate(classes.size)])
    owners = spread(classes.of, group, cost[:, 0], counts)
    for number in range(len(classes.size)):
        found = np.bincount(owners[classes.of == number], minlength=ranks)
        assert found.tolist() == counts[number].tolist()


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 7, 8, 16])
def test_no_rank_owns_most_of_a_block(ranks: int) -> None:
    """A decoder's seven matrices: the largest share of a block is what the block alone would allow."""
    shapes = [(8, 8), (2, 8), (2, 8), (8, 8), (28, 8), (28, 8), (8, 28)]
    sizes = [m * n for m, n in shapes]
    blocks = 24
    cost = np.array([(m * n, newton_schulz_flops(m, n)) for m, n in shapes] * blocks, np.float64)
    cost /= cost.sum(0) / ranks
    group = np.repeat(np.arange(blocks), len(shapes))
    numel = np.array(sizes * blocks)
    loads = np.zeros((2, ranks))
    owners = deal(cost, group, numel, loads)
    alone = optimum([(float(size), 0.0) for size in sizes], ranks)
    shares = [
        max(int(numel[(group == block) & (owners == rank)].sum()) for rank in range(ranks))
        for block in range(blocks)
    ]
    assert sum(shares) / blocks <= 1.1 * alone
    assert loads.max() <= 1.05
    if ranks < len(shapes):  # the pattern rotates: every rank has the largest share of some block
        first = {tuple(owners[group == block].tolist()) for block in range(blocks)}
        assert len(first) > 1


def test_a_thousand_experts_lie_on_as_many_ranks_as_there_are() -> None:
    blocks, experts, ranks = 3, 50, 16
    group = np.repeat(np.arange(blocks), experts)
    cost = np.full((blocks * experts, 2), ranks / (blocks * experts))
    owners = deal(cost, group, np.ones(len(cost)), np.zeros((2, ranks)))
    for block in range(blocks):
        assert set(np.bincount(owners[group == block], minlength=ranks).tolist()) == {3, 4}
    assert set(np.bincount(owners, minlength=ranks).tolist()) == {9, 10}


def test_without_room_items_are_refused_evenly_over_the_blocks() -> None:
    cost = np.full((12, 2), 0.5)
    group = np.repeat(np.arange(6), 2)
    loads = np.zeros((2, 3))
    owners = deal(cost, group, np.ones(12), loads, 1.1)
    assert (owners != REFUSED).sum() == 6 and loads.max() == 1.0
    assert {int((owners[group == block] == REFUSED).sum()) for block in range(6)} == {1}


def test_exchanges_lower_the_largest_load() -> None:
    # 3, 3, 2, 2, 2 on two ranks: longest first gives 3 + 2 + 2 and 3 + 2, the best is 6 and 6
    cost = np.array([[3.0, 0.0], [2.0, 0.0]])
    counts = np.array([[1, 1], [2, 1]])
    loads = np.array([[7.0, 5.0], [0.0, 0.0]])
    exchange(loads, cost, counts, np.inf)
    assert loads.tolist() == [[6.0, 6.0], [0.0, 0.0]]
    assert sorted(counts.T.tolist()) == [[0, 3], [2, 0]]


def test_a_search_finds_the_best_assignment() -> None:
    # 5, 5, 4, 4, 3, 3, 3 on three ranks: 5 + 4, 5 + 4 and 3 + 3 + 3
    cost = np.array([[5.0, 0.0], [4.0, 0.0], [3.0, 0.0]])
    counts = np.array([[2, 0, 0], [0, 2, 0], [0, 0, 3]])
    loads = np.array([[10.5, 8.0, 9.0], [0.0, 0.0, 0.0]])  # the first rank has 0.5 already
    search(loads, cost, counts, 9.5)
    assert loads[0].tolist() == [9.5, 9.0, 9.0]
    assert counts.sum(1).tolist() == [2, 2, 3]
    assert (loads[0] - [0.5, 0.0, 0.0]).tolist() == (cost[:, 0] @ counts).tolist()


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 4),
    st.sampled_from(("muon", "soap")),
)
def test_plans_are_within_five_percent_of_brute_force(
    shapes: list[tuple[int, int, bool]], ranks: int, rule: str
) -> None:
    """Of matrices that stay whole: the fullest rank, in bytes or FLOPs, against all assignments."""
    weights = [
        Weight(
            f"w{n}", (8 * rows, 8 * columns), "ab"[second], "matrix", (Matrices(1, 8 * rows, 8 * columns),)
        )
        for n, (rows, columns, second) in enumerate(shapes)
    ]
    plan = plan_island(weights, ranks, rule=rule, policy=Policy(placement="owner"))
    cost = np.stack([plan.priced.resident, plan.priced.flops], 1)
    cost /= cost.sum(0) / ranks
    top = max(float(plan.resident.max() / plan.resident.mean()), float(plan.flops.max() / plan.flops.mean()))
    best = optimum([(float(bytes_), float(flops)) for bytes_, flops in cost], ranks)
    assert best - 1e-9 <= top <= 1.05 * best


def test_a_tail_goes_to_the_rank_that_has_least_of_its_block() -> None:
    loads = np.array([[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    here = np.array([[0.0, 5.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 9.0]])
    owners = lightest_of_block(np.array([0.5, 2.0, 0.1]), here, loads)
    assert owners.tolist() == [2, 1, 0]
    assert loads[0].tolist() == [3.1, 3.0, 2.5]
