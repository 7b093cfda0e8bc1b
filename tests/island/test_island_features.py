"""Sharded training equals one process that holds everything, whatever is switched on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from node.island import CommPolicy, MixedPrecisionPolicy, Schedule
from tests.island.rig import pool
from tests.island.tiny_llama import Case, difference, sharded, train

STEPS = 6
EXACT = Schedule(find_unused_parameters=True)


@cache
def reference(case: Case, ranks: int, steps: int) -> Any:
    return train(case, steps, ranks)


def compare(case: Case, ranks: int, steps: int = STEPS, **of_the_sharded_run: Any) -> float:
    answers = pool().run(sharded, ranks, replace(case, **of_the_sharded_run), steps)
    assert all(answer[0] == answers[0][0] for answer in answers)
    return difference(answers[0], reference(case, ranks, steps))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_fifty_steps_of_muon_and_adamw_in_fp64(ranks: int) -> None:
    for reduce in ("chunks", "roots") if ranks > 1 else ("auto",):
        worst = compare(Case(), ranks, 50, comm=CommPolicy(reduce=reduce))
        assert worst <= (1e-12 if ranks > 1 else 0.0)


FEATURES = {
    "tied": Case(tied=True),
    "tied blocks": Case(tied_blocks=True),
    "frozen": Case(frozen=True),
    "conditional": Case(conditional=True),
    "unused": Case(unused=True),
    "inner checkpoint": Case(inner_checkpoint=True),
    "outer checkpoint": Case(outer_checkpoint=True),
    "block called twice": Case(twice=True),
    "accumulation": Case(accumulate=2),
    "no sync": Case(accumulate=3, no_sync=True),
    "clip": Case(clip=0.3),
    "all": Case(
        tied=True, frozen=True, conditional=True, inner_checkpoint=True, accumulate=2, no_sync=True, clip=0.3
    ),
    "outer checkpoint, twice, conditional": Case(
        outer_checkpoint=True, twice=True, conditional=True, tied_blocks=True
    ),
}


@pytest.mark.parametrize(("name", "ranks"), [*((name, 3) for name in FEATURES), ("all", 2), ("all", 4)])
def test_features(name: str, ranks: int) -> None:
    assert compare(FEATURES[name], ranks, schedule=EXACT) <= 1e-12


def test_compiled_blocks() -> None:
    assert compare(Case(), 2, 3, compiled=True) <= 1e-12


VARIANTS: dict[str, dict[str, Any]] = {
    "by block": {"by_block": True},
    "weights kept after forward": {"reshard": False},
    "root resharded too": {"reshard": True},
    "no prefetch": {"schedule": Schedule(prefetch=0, reduces_in_flight=1)},
    "deep prefetch": {"schedule": Schedule(prefetch=3, reduces_in_flight=4)},
    "roots": {"comm": CommPolicy(gather="roots", reduce="roots")},
    "chunks": {"comm": CommPolicy(gather="chunks", reduce="chunks")},
    "peers": {"comm": CommPolicy(gather="peers")},
    "measured": {"comm": CommPolicy(gather="measure")},
    "checked": {"comm": CommPolicy(check_signatures=True)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_runtime(name: str) -> None:
    case = Case(conditional=True, accumulate=2)
    schedule = replace(VARIANTS[name].get("schedule", EXACT), find_unused_parameters=True)
    assert compare(case, 4, **{**VARIANTS[name], "schedule": schedule}) <= 1e-12


def all_on_the_second(name: str, parameter: torch.Tensor) -> str:
    return "owner" if parameter.ndim == 2 else "ragged"


@pytest.mark.parametrize("granularity", ["element", "row", "rows:3", "matrix", 7])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_ragged_adamw_at_any_granularity(granularity: str | int, clip: float | None) -> None:
    case = Case(optimizer="adamw", clip=clip)
    assert compare(case, 3, placement="ragged", granularity=granularity) <= 1e-12


def test_placement_by_function() -> None:
    assert compare(Case(optimizer="adamw"), 4, placement=all_on_the_second) <= 1e-12


@pytest.mark.parametrize("name", ["tied", "all", "no sync", "outer checkpoint"])
def test_hybrid_sharding(name: str) -> None:
    assert compare(FEATURES[name], 4, hybrid=True, schedule=EXACT) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ordered_sums_are_bit_equal_in_fp32(ranks: int) -> None:
    case = Case(dtype=torch.float32, tied=True)
    assert compare(case, ranks, 50, comm=CommPolicy(ordered=True)) == 0.0


def test_default_sums_in_fp32_differ_by_their_order_only() -> None:
    case = Case(dtype=torch.float32, optimizer="sgd")
    assert 0.0 < compare(case, 4, 12, comm=CommPolicy(reduce="roots")) <= 2e-6


def test_mixed_precision_keeps_fp32_masters() -> None:
    """bf16 compute with fp32 sums stays near fp32 training, and trains."""
    case = Case(dtype=torch.float32, optimizer="adamw", accumulate=2, no_sync=True)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    answers = pool().run(sharded, 3, replace(case, precision=policy), 20)
    losses, state = answers[0]
    exact = reference(case, 3, 20)
    assert all(tensor.dtype == torch.float32 for tensor in state.values())
    assert max(abs(a - b) for a, b in zip(losses, exact[0], strict=True)) < 0.03
    assert sum(losses[-3:]) < sum(losses[:3])
    assert any((tensor != tensor.bfloat16().float()).any() for tensor in state.values())
