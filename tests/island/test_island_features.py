"""Sharded training equals one process that holds everything, whatever is switched on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from node.island import (
    CommPolicy,
    MixedPrecisionPolicy,
    Schedule,
    full_state_dict,
    fully_shard,
    sharded_parameters,
)
from tests.island.rig import Member, device, pool
from tests.island.tiny_llama import (
    Case,
    batch,
    build,
    difference,
    loss_of,
    optimizers,
    shard,
    sharded,
    train,
)

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
@pytest.mark.parametrize("optimizer", ["muon", "adamw", "sgd"])
def test_fifty_steps_in_fp64(ranks: int, optimizer: str) -> None:
    for reduce in ("chunks", "roots") if ranks > 1 and optimizer == "muon" else ("auto",):
        worst = compare(Case(optimizer=optimizer), ranks, 50, comm=CommPolicy(reduce=reduce))
        assert worst <= (1e-12 if ranks > 1 else 0.0)


def one_matrix(member: Member | None, ranks: int) -> Tensor:
    """Fifty steps of Muon on the only matrix there is."""
    torch.manual_seed(0)
    model: Any = nn.Linear(6, 5, bias=False, dtype=torch.float64).to(device())
    if member is not None:
        fully_shard(model, mesh=member.mesh)
    steppers = optimizers(Case(), [("weight", model.weight)])
    assert len(steppers) == (member is None or member.rank == 0)
    for step in range(50):
        for rank in range(ranks) if member is None else [member.rank]:
            x = torch.randn(
                4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(9 * step + rank)
            )
            (model(x.to(device())).square().mean() / (ranks if member is None else 1)).backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
    return model.weight.detach().cpu() if member is None else full_state_dict(model)["weight"]


def test_more_ranks_than_matrices() -> None:
    plain = one_matrix(None, 4)
    for weight in pool().run(one_matrix, 4, 4):
        assert (weight - plain).abs().max().item() <= 1e-12


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


def owners_after_a_lone_unit(member: Member) -> tuple[list[bool], list[bool]]:
    """Which parameters this rank holds of a model, and of an equal one after a unit of no model."""
    held = []
    for lone in (False, True):
        if lone:
            fully_shard(nn.Linear(300, 200, dtype=torch.float64, device=device()), mesh=member.mesh)
        model = build(Case())
        shard(model, Case(), member)
        held.append([entry.parameter.numel() > 0 for entry in sharded_parameters(model)])
    return held[0], held[1]


def test_owners_do_not_depend_on_what_else_was_wrapped() -> None:
    for before, after in pool().run(owners_after_a_lone_unit, 3):
        assert before == after and any(before)


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


@pytest.mark.parametrize(("gather", "reduce"), [("roots", "roots"), ("peers", "chunks")])
def test_hybrid_sharding_by_other_collectives(gather: Any, reduce: Any) -> None:
    comm = CommPolicy(gather=gather, reduce=reduce)
    assert compare(FEATURES["all"], 4, hybrid=True, schedule=EXACT, comm=comm) <= 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ordered_sums_are_bit_equal_in_fp32(ranks: int) -> None:
    case = Case(dtype=torch.float32, tied=True)
    assert compare(case, ranks, 50, comm=CommPolicy(ordered=True)) == 0.0


def replicated(member: Member, case: Case, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    """The same training by ``DistributedDataParallel``."""
    model = build(case)
    replica = DistributedDataParallel(model, process_group=member.group)
    steppers, losses = optimizers(case, list(model.named_parameters())), []
    for step in range(steps):
        loss = loss_of(replica, batch(step).chunk(member.ranks)[member.rank], case.dtype)
        loss.backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        totals = torch.zeros(member.ranks, dtype=torch.float64, device=device())
        totals[member.rank] = loss.detach()
        dist.all_reduce(totals, group=member.group)
        losses += totals.tolist()
    return losses, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("optimizer", ["sgd", "muon"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_default_sums_in_fp32_are_within_the_noise_of_replicas(ranks: int, optimizer: str) -> None:
    case = Case(dtype=torch.float32, optimizer=optimizer)
    one = reference(case, ranks, 50)
    noise = difference(pool().run(replicated, ranks, case, 50)[0], one)
    assert noise < 0.1  # or it would show nothing
    for reduce in ("auto", "chunks", "roots"):
        ours = compare(case, ranks, 50, comm=CommPolicy(reduce=reduce))
        assert ours <= 2 * noise


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
