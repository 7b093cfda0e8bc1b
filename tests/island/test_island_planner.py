"""Whole plans: legal, complete, as good as they say, the same everywhere, and what fully_shard takes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import prod
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.island.inventory import ROOT, Matrices, Weight, inventory_of, llama3_70b
from node.island.layout import LayoutError, Plan, TensorMeta
from node.island.planner import IslandPlan, PlacementName, Policy, plan_island, water_level
from node.island.planner_advice import Group, advise, largest_group
from node.island.planner_costs import (
    RULES,
    Rule,
    factor_bytes,
    newton_schulz_flops,
    price,
    rule_named,
    soap_flops,
)
from tests.island.rig import pool
from tests.island.tiny_llama import Case, build, difference, sharded, train

PLACEMENTS = ("auto", "owner", "ragged")


@st.composite
def inventories(draw: st.DrawFn) -> list[Weight]:
    """Blocks of matrices, stacks, fused weights and vectors, and a root with embeddings."""
    side = st.integers(1, 9)
    weights: list[Weight] = []
    for block in range(draw(st.integers(0, 4))):
        at = f"layers.{block}"
        for number in range(draw(st.integers(0, 5))):
            name, rows, columns = f"{at}.w{number}", draw(side), draw(side)
            kind = draw(st.sampled_from(("matrix", "stack", "fused", "vector", "frozen")))
            if kind == "matrix":
                weights.append(Weight(name, (rows, columns), at, "matrix", (Matrices(1, rows, columns),)))
            elif kind == "stack":
                shape = (draw(st.integers(2, 5)), rows, columns)
                weights.append(Weight(name, shape, at, "matrix", (Matrices(*shape),)))
            elif kind == "fused":
                parts = (Matrices(1, rows, columns), Matrices(1, rows + 1, columns))
                weights.append(Weight(name, (2 * rows + 1, columns), at, "matrix", parts))
            elif kind == "vector":
                weights.append(Weight(name, (rows,), at, "vector"))
            else:
                weights.append(Weight(name, (rows, columns), f"{at} (frozen)", "embedding"))
    weights.append(Weight("embed", (draw(st.integers(1, 40)), draw(side)), ROOT, "embedding"))
    weights.append(Weight("norm", (draw(side),), ROOT, "vector"))
    return weights


def check(plan: IslandPlan, weights: list[Weight], ranks: int) -> None:
    """The plan is legal and complete, and what it says of itself is what its layouts say."""
    rule, elements, resident, flops = plan.rule, [0] * ranks, [0.0] * ranks, [0.0] * ranks
    by_name = {weight.name: weight for weight in weights}
    assert sorted(plan.plan) == sorted(by_name)
    moved: dict[str, int] = {}
    for layout in plan.plan.groups:
        verdict = layout.legal()
        assert verdict.ok, verdict.reason
        assert layout.ranks == ranks
        assert len({meta.group for meta in layout.tensors}) == 1
        for index, meta in enumerate(layout.tensors):
            weight = by_name[meta.name]
            assert (meta.shape, meta.group) == (weight.shape, weight.group)
            state = rule.matrix_state if weight.role == "matrix" else rule.state
            pieces = {rank: piece for rank in range(ranks) if (piece := layout.piece(index, rank))}
            assert sum(piece.numel for piece in pieces.values()) == prod(weight.shape)
            for rank, piece in pieces.items():
                elements[rank] += piece.numel
                resident[rank] += piece.numel * (8 + state)
            if rule.flops is None:
                continue
            start, number = 0, 0
            for count, rows, columns in weight.matrices:
                for _ in range(count):
                    held = {
                        rank: min(start + rows * columns, piece.start + piece.numel) - max(start, piece.start)
                        for rank, piece in pieces.items()
                    }
                    held = {rank: size for rank, size in held.items() if size > 0}
                    worker = next(iter(held))
                    if meta.name in plan.step_owners:
                        worker = plan.step_owners[meta.name].ranks[number]
                    if len(held) == 1:
                        assert worker in held
                    missing = rows * columns - held.get(worker, 0)
                    moved[meta.name] = moved.get(meta.name, 0) + 4 * missing
                    flops[worker] += rule.flops(rows, columns)
                    resident[worker] += rule.factors(rows, columns)
                    start += rows * columns
                    number += 1
    assert plan.elements.tolist() == elements
    assert plan.resident == pytest.approx(resident)
    assert plan.flops == pytest.approx(flops)
    assert {name: owner.bytes for name, owner in plan.step_owners.items()} == {
        name: count for name, count in moved.items() if count
    }
    assert plan.step_bytes == sum(moved.values())
    total = sum(prod(weight.shape) for weight in weights)
    assert sum(layout.total for layout in plan.plan.groups) == total + plan.padding
    assert plan.spread >= plan.spread_bound - 1e-9


@settings(max_examples=60)
@given(inventories(), st.integers(1, 11), st.sampled_from(sorted(RULES)), st.sampled_from(PLACEMENTS))
def test_plans_are_legal_and_complete(
    weights: list[Weight], ranks: int, rule: str, placement: PlacementName
) -> None:
    plan = plan_island(weights, ranks, rule=rule, policy=Policy(placement=placement))
    check(plan, weights, ranks)
    groups = [layout.tensors[0].group for layout in plan.plan.groups]
    assert max(map(groups.count, groups)) <= 2
    if placement == "owner":
        assert plan.step_bytes == 0
        for weight in weights:
            _, layout, index = plan.plan.find(weight.name)
            if len(weight.matrices) == 1 and weight.matrices[0].number == 1 and RULES[rule].flops:
                assert layout.owner(index) is not None
            if len(weight.shape) < 2:
                assert layout.owner(index) is not None


def decoder(width: int, hidden: int, layers: int, vocab: int, *, heads: int | None = None) -> list[Weight]:
    weights = []
    for layer in range(layers):
        at = f"layers.{layer}"
        for name, rows, columns in (
            ("q", width, width),
            ("k", heads or width, width),
            ("v", heads or width, width),
            ("o", width, width),
            ("gate", hidden, width),
            ("up", hidden, width),
            ("down", width, hidden),
        ):
            shape = (rows, columns)
            weights.append(Weight(f"{at}.{name}", shape, at, "matrix", (Matrices(1, *shape),)))
        weights.append(Weight(f"{at}.norm", (width,), at, "vector"))
    weights.append(Weight("embed", (vocab, width), ROOT, "embedding"))
    return weights


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 13, 31, 64, 97, 1009])
@pytest.mark.parametrize("rule", ["muon", "soap", "adamw"])
def test_no_rank_holds_more_than_the_slack_allows(ranks: int, rule: str) -> None:
    weights = decoder(256, 688, 12, 4001, heads=64)
    plan = plan_island(weights, ranks, rule=rule)
    check(plan, weights, ranks)
    average = float(plan.resident.sum()) / ranks
    # beside the slack: a row of everything that is cut, and the factors of one matrix, are indivisible
    unit = 16 * 688 + (factor_bytes(688, 256) if rule == "soap" else 0)
    assert plan.resident.max() <= 1.1 * average + unit
    if ranks <= 8:
        assert plan.step_bytes == 0
        assert plan.flops.sum() == 0 or plan.flops.max() * ranks <= 1.1 * plan.flops.sum()
    assert plan.padding_share <= 0.01


def test_matrices_that_are_too_large_are_cut_and_the_largest_that_fit_are_owned() -> None:
    weights = llama3_70b()
    few, many = plan_island(weights, 64), plan_island(weights, 1024)
    assert few.step_bytes == 0 and few.padding_share < 0.01
    assert few.resident.max() * 64 <= 1.01 * few.resident.sum()
    assert few.flops.max() * 64 <= 1.02 * few.flops.sum()
    cut = set(many.step_owners)
    assert cut == {weight.name for weight in weights if "mlp" in weight.name and weight.matrices}
    assert many.resident.max() * 1024 <= 1.01 * many.resident.sum()
    assert len({owner.ranks for owner in many.step_owners.values()}) == len(cut)  # each at another rank
    owned = plan_island(weights, 1024, policy=Policy(placement="owner"))
    assert owned.resident.max() * 1024 > 3 * owned.resident.sum()
    assert (owned.elements == 0).sum() == 0 and owned.step_bytes == 0
    for granularity in ("row", "element"):
        cuts = plan_island(weights, 64, policy=Policy(placement="ragged", granularity=granularity))
        assert cuts.padding_share < 0.01
        assert all(layout.equal for layout in cuts.plan.groups)


def test_what_has_no_room_in_memory_is_cut() -> None:
    weights = [
        Weight(f"layers.{n}.w", (64, 48), f"layers.{n}", "matrix", (Matrices(1, 64, 48),)) for n in range(4)
    ]
    free = plan_island(weights, 3, policy=Policy(slack=0.6))
    assert free.step_bytes == 0 and free.resident.tolist() == [12 * 2 * 3072, 12 * 3072, 12 * 3072]
    memory = int(free.gathered + 1.1 * free.resident.sum() / 3)
    tight = plan_island(weights, 3, policy=Policy(slack=0.6, memory=memory))
    check(tight, weights, 3)
    assert tight.resident.max() + tight.gathered <= memory
    assert len(tight.step_owners) == 1
    hopeless = plan_island(weights, 3, policy=Policy(slack=0.6, memory=1))
    assert hopeless.plan == free.plan


def test_stacks_are_divided_between_matrices_unless_one_is_too_large() -> None:
    stack = [
        Weight(f"layers.{n}.experts", (5, 8, 16), f"layers.{n}", "matrix", (Matrices(5, 8, 16),))
        for n in range(6)
    ]
    plan = plan_island(stack, 4)
    check(plan, stack, 4)
    assert plan.step_bytes == 0
    assert plan.elements.max() <= 8 * 128 and plan.elements.min() >= 7 * 128
    many = plan_island(stack, 45)
    check(many, stack, 45)
    assert many.step_bytes > 0 and many.elements.max() <= 1.1 * many.elements.sum() / 45 + 16


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 60))
def test_water_fills_the_lowest_first(loads: list[int], amount: int) -> None:
    added = water_level(np.array(loads, np.float64), float(amount))
    assert added.sum() == pytest.approx(amount)
    raised = [load + more for load, more in zip(loads, added.tolist(), strict=True) if more > 0]
    if raised:
        assert max(raised) == pytest.approx(min(raised))
        untouched = [load for load, more in zip(loads, added.tolist(), strict=True) if more == 0]
        assert min(untouched, default=np.inf) >= max(raised) - 1e-9


PROGRAM = """
from node.island.inventory import llama3_70b
from node.island.planner import Policy, plan_island
for ranks, placement, rule in {cases}:
    print(plan_island(llama3_70b(), ranks, rule=rule, policy=Policy(placement=placement)).hash())
"""


def test_another_process_comes_to_the_same_plan() -> None:
    cases = [(48, "auto", "muon"), (64, "owner", "soap"), (1000, "auto", "soap"), (31, "ragged", "muon")]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(cases=cases)],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
        env={"PYTHONPATH": ".", "PYTHONHASHSEED": "1", "PATH": ""},
    )
    here = [
        plan_island(
            llama3_70b(), ranks, rule=rule, policy=Policy(placement=cast(PlacementName, placement))
        ).hash()
        for ranks, placement, rule in cases
    ]
    assert process.stdout.split() == here and len(set(here)) == len(here)


def test_a_plan_survives_json() -> None:
    whole = plan_island(decoder(16, 24, 3, 37), 5)
    cut = plan_island(decoder(16, 24, 3, 37), 40)
    for found in (whole, cut):
        assert Plan.from_json(found.plan.to_json()) == found.plan
        assert Plan.from_json(found.plan.to_json()).hash() == found.plan.hash()
        workers = {
            meta.name: ranks
            for layout in found.plan.groups
            for meta, ranks in zip(layout.tensors, layout.workers, strict=False)
            if ranks
        }
        assert workers == {name: owner.ranks for name, owner in found.step_owners.items()}
    assert cut.step_owners and not whole.step_owners
    layout = next(layout for layout in cut.plan.groups if layout.workers)
    for wrong, reason in ((layout.workers[:1], "lists of workers"), (((40,),) * len(layout.tensors), "40")):
        assert reason in replace(layout, workers=wrong).legal().reason
    plan = whole.plan
    assert all(isinstance(meta, TensorMeta) for layout in plan.groups for meta in layout.tensors)


def test_costs_by_hand() -> None:
    assert newton_schulz_flops(8192, 28672) == 5 * (4 * 8192**2 * 28672 + 2 * 8192**3)
    assert newton_schulz_flops(3, 2, steps=1) == newton_schulz_flops(2, 3, steps=1) == 4 * 4 * 3 + 2 * 8
    assert factor_bytes(30, 20) == 2 * (30**2 + 20**2) * 4
    assert factor_bytes(8192, 28672) == 2 * 8192**2 * 4  # no factor for a side of more than 10,000
    assert soap_flops(20_000, 20_000) == 0
    weights = [
        Weight("w", (30, 20), "a", "matrix", (Matrices(1, 30, 20),)),
        Weight("e", (7, 5), "", "embedding"),
        Weight("b", (6,), "a", "vector"),
    ]
    soap = price(weights, rule_named("soap"))
    assert soap.resident.tolist() == [16 * 600 + factor_bytes(30, 20), 16 * 35, 16 * 6]
    assert price(weights, rule_named("muon")).resident.tolist() == [12 * 600, 16 * 35, 16 * 6]
    quantised = price(weights, rule_named("adam8bit"), ragged=True, granularity="element")
    assert [meta.granularity for meta in quantised.metas] == [256, 35, 6]
    assert [meta.whole for meta in soap.metas] == [True, False, True]


def test_advice_names_the_largest_group_and_proposes_replicas() -> None:
    weights = llama3_70b()
    plan = plan_island(weights, 1024, policy=Policy(memory=80 * 10**9))
    advice = advise(plan)
    assert advice.largest == largest_group(plan) == 330  # 1.1 * 70.55e9 entries / 235e6, by bytes
    assert advice.proposal == Group(256, 4)
    assert "beyond 330 ranks" in advice.reason and "replicate 4 times" in advice.reason
    assert "240 cut tensors" in advice.reason
    assert advice.memory.ok and "left for activations" in advice.memory.reason
    alone = plan_island(weights, advice.proposal.ranks)
    assert alone.step_bytes == 0 and alone.resident.max() * 256 <= 1.1 * alone.resident.sum()
    assert advise(alone).proposal is None

    prime = advise(plan_island(weights, 1021))
    assert prime.proposal is None and "no smaller group divides 1,021" in prime.reason
    small = replace(plan, policy=replace(plan.policy, memory=16 * 10**9))
    assert advise(small).proposal is None
    full = advise(plan_island(weights, 8, policy=Policy(memory=80 * 10**9)))
    assert not full.memory.ok and "take 15 ranks" in full.memory.reason
    assert plan_island(weights, 15).resident.max() + plan.gathered <= 80 * 10**9
    assert advise(plan_island(weights, 8, rule="adamw")).largest is None
    nothing = advise(plan_island(weights, 8, policy=Policy(memory=10**9)))
    assert "wrap smaller blocks" in nothing.memory.reason
    idle = advise(plan_island(weights, 1024, policy=Policy(placement="owner")))
    assert "3.38 times the average" in idle.reason


def test_nonsense_is_refused() -> None:
    weights = decoder(8, 8, 1, 8)
    with pytest.raises(LayoutError, match="0 ranks"):
        plan_island(weights, 0)
    with pytest.raises(LayoutError, match="optimizer 'adam' is unknown: use muon"):
        plan_island(weights, 2, rule="adam")
    with pytest.raises(LayoutError, match="placement 'rows'"):
        Policy(placement=cast(PlacementName, "rows"))
    with pytest.raises(LayoutError, match="slack -1"):
        Policy(slack=-1)
    with pytest.raises(LayoutError, match="granularity 'tile'"):
        plan_island(weights, 2, policy=Policy(granularity="tile"))
    for wrong in ([], [*weights, weights[0]]):
        with pytest.raises(LayoutError, match="lists every tensor once"):
            plan_island(wrong, 2)


@pytest.mark.parametrize(
    ("ranks", "policy", "rule"),
    [
        (3, Policy(), "muon"),
        (4, Policy(slack=0.0), Rule("whole", 4.0, flops=newton_schulz_flops)),
        (2, Policy(placement="ragged", granularity="element"), "adamw"),
    ],
)
def test_fully_shard_trains_by_a_plan(ranks: int, policy: Policy, rule: Rule | str) -> None:
    case = Case(optimizer="adamw", tied=True, frozen=True)
    plan = plan_island(inventory_of(build(case)), ranks, rule=rule, policy=policy)
    answers = pool().run(sharded, ranks, replace(case, placement=plan.plan), 4)
    assert difference(answers[0], train(case, 4, ranks)) <= 1e-12
