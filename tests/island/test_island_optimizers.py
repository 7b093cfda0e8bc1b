"""Unchanged optimizers on what a rank holds, against the same on whole parameters in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from node.island import CommPolicy, LayoutError, Plan, full_state_dict, fully_shard, inventory_of, plan_island
from node.island.optimizers import IslandOptimizer, PolarSteps
from node.island.routing import route
from optim.roles import classify
from tests.island.mixed_model import (
    BLOCKS,
    VOCAB,
    Case,
    Shampoo,
    adamw,
    fresh,
    loss_of,
    matrix_rule,
    parts,
    sharded,
)
from tests.island.rig import Member, device, pool


class Counter(TorchDispatchMode):
    """Counts what goes to a process group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.calls.append(str(func))
        return func(*args, **(kwargs or {}))


class Pieces:
    """The reference: whole parameters, whose fused matrices and experts are stepped as plain matrices."""

    def __init__(self, model: nn.Module, rule: str) -> None:
        roles = {role.name: role for role in classify(model, blocks=blocks_in(model))}
        self.views: list[tuple[nn.Parameter, nn.Parameter, int]] = []
        rest: list[nn.Parameter] = []
        build = matrix_rule(rule)
        for name, parameter in sorted(model.named_parameters()):
            role = roles[name]
            if role.role != "matrix" or build is None:
                rest.append(parameter)
                continue
            slices, rows, columns = role.view
            for number in range(slices):
                low = number * rows * columns
                view = parameter.detach().view(-1)[low : low + rows * columns].view(rows, columns)
                self.views.append((nn.Parameter(view), parameter, low))
        self.optimizers = [adamw(rest)]
        if build is not None:
            self.optimizers.append(build([{"params": [view for view, _, _ in self.views]}]))

    def step(self) -> None:
        for view, parameter, low in self.views:
            assert parameter.grad is not None
            view.grad = parameter.grad.view(-1)[low : low + view.numel()].view_as(view)
        for optimizer in self.optimizers:
            optimizer.step()


def blocks_in(model: nn.Module) -> dict[str, int]:
    return {name: number for name, number in BLOCKS.items() if name in dict(model.named_parameters())}


@cache
def reference(rule: str, ranks: int, steps: int, build: Callable[[], nn.Module] = fresh) -> dict[str, Tensor]:
    model = build()
    with patch("optim.muon.plan_stacks", one_by_one), patch("optim.local.polar.plan_stacks", one_by_one):
        stepper = Pieces(model, rule)
        for step in range(steps):
            for part in parts(step, ranks):
                loss_of(model, part).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(1.0 / ranks)
            stepper.step()
            model.zero_grad()
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


Answer = tuple[dict[str, Tensor], int, int, int]
Result = tuple[float, int, int, int]


def train(member: Member, cases: list[Case]) -> list[Answer]:
    """Of each case: the weights (of rank 0), collectives in all steps and in one backward, bytes."""
    # fp32 iterations round differently in stacks of other sizes, and which matrices are on one rank is the
    # layout's choice: one by one they round alike
    with patch("optim.muon.plan_stacks", one_by_one), patch("optim.local.polar.plan_stacks", one_by_one):
        return [steps_of(member, *sharded(case, member), case.steps) for case in cases]


def one_by_one(views: list[Any], device: torch.device) -> list[list[int]]:
    return [[index] for index in range(len(views))]


def steps_of(member: Member, model: nn.Module, optimizer: IslandOptimizer, steps: int) -> Answer:
    in_steps, in_backward = Counter(), Counter()
    for step in range(steps):
        with in_backward:
            loss_of(model, parts(step, member.ranks)[member.rank]).backward()
        with in_steps:
            optimizer.step()
        optimizer.zero_grad()
    state = full_state_dict(model, rank=0)
    return state, len(in_steps.calls), len(in_backward.calls), optimizer.moved_bytes


def compare(ranks: int, cases: list[Case]) -> list[tuple[Result, ...]]:
    """Of each case and rank the difference from one process, and what :func:`train` counts."""
    found = []
    for case, answers in zip(cases, zip(*pool().run(train, ranks, cases), strict=True), strict=True):
        build = fresh if case.dtype == torch.float64 else single
        difference = apart(answers[0][0], reference(case.rule, ranks, case.steps, build))
        found.append(tuple((difference, *counts) for _, *counts in answers))
    return found


def single() -> nn.Module:
    return fresh(torch.float32)


def apart(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    assert state.keys() == wanted.keys()
    return max((state[name] - tensor).abs().max().item() for name, tensor in wanted.items())


RULES = ("adamw", "torch-muon", "shampoo", "soap")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_owned_matrices_equal_one_process_and_send_nothing(ranks: int) -> None:
    """Fifty steps in fp64 with sums in any order, and in fp32 with ordered sums, bit for bit."""
    cases = [Case(rule, steps=50, ordered=False) for rule in RULES]
    cases += [Case(rule, steps=50, dtype=torch.float32) for rule in RULES]
    cases += [Case("muon"), Case("sign-muon")]  # their iterations are in fp32, signs jump: sums in order
    cases += [Case("shampoo", hybrid=True)] if ranks == 4 else []
    for case, answers in zip(cases, compare(ranks, cases), strict=True):
        exact = ranks == 1 or case.dtype == torch.float32
        for difference, in_steps, in_backward, moved in answers:
            assert difference <= (0.0 if exact else 1e-12), case
            assert in_steps == 0 and moved == 0
            assert in_backward > 0 or ranks == 1


def test_sums_in_any_order_stay_within_rounding() -> None:
    cases = [Case(rule, "ragged", 7, ordered=False, steps=10) for rule in ("adamw", "shampoo", "soap")]
    for answers in compare(4, cases):
        assert all(difference <= 1e-12 for difference, *_ in answers)


@pytest.mark.parametrize("ranks", [2, 4])
def test_divided_matrices_are_gathered_for_the_step(ranks: int) -> None:
    cases = [Case(rule, "ragged", "element") for rule in ("muon", "shampoo", "soap", "sign-muon")]
    cases += [Case("adamw", "ragged", "element")]
    answers = compare(ranks, cases)
    for members in answers:
        assert all(difference <= 1e-12 for difference, *_ in members)
    for members in answers[:-1]:
        assert all(in_steps == 2 * 6 for _, in_steps, _, _ in members)
        assert sum(moved for *_, moved in members) > 0
    assert all(in_steps == 0 and moved == 0 for _, in_steps, _, moved in answers[-1])


@pytest.mark.parametrize("name", ["Shampoo", "SOAP"])
def test_optimizers_of_another_package(name: str) -> None:
    pytest.importorskip("pytorch_optimizer")
    owned, divided = compare(3, [Case(name), Case(name, "ragged", "row")])
    assert all(difference <= 1e-12 and in_steps == 0 for difference, in_steps, *_ in owned)
    assert all(difference <= 1e-12 and in_steps > 0 for difference, in_steps, *_ in divided)


# ---- matrices that are too large for one rank, by a plan


class Lopsided(nn.Module):
    """Two matrices that are each more than a third of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB, bias=False)
        self.up, self.down = nn.Linear(8, 280), nn.Linear(280, 8, bias=False)
        self.small = nn.Linear(8, 8, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.head(x + self.small(torch.tanh(x)) + self.down(F.silu(self.up(x))))  # type: ignore[no-any-return]


def lopsided() -> nn.Module:
    torch.manual_seed(6)
    return Lopsided().to(device(), torch.float64)


def by_plan(member: Member, rules: list[str]) -> tuple[str, list[str], list[bool], list[Answer]]:
    """The plan's hash, what is gathered by it, whether the optimizers follow it, and trainings by it."""
    plan = plan_island(inventory_of(lopsided()), member.ranks)
    other = Plan(
        tuple(
            replace(
                layout,
                workers=tuple(tuple((r + 1) % member.ranks for r in ranks) for ranks in layout.workers),
            )
            for layout in plan.plan.groups
        )
    )
    answers, follows = [], []
    for rule in rules:
        for turned, layouts in ((0, plan.plan), (1, other)):
            model = lopsided()
            fully_shard(model, mesh=member.mesh, placement=layouts, comm_policy=CommPolicy(ordered=True))
            optimizer = IslandOptimizer(model, matrix_rule(rule), adamw)
            workers = {matrix.name: matrix.worker for matrix in optimizer.route.gathered}
            wanted = {name: owner.ranks for name, owner in plan.step_owners.items()}
            follows.append(
                {name: ((rank + turned) % member.ranks,) for name, (rank,) in wanted.items()}
                == {name: (rank,) for name, rank in workers.items()}
            )
            answers.append(steps_of(member, model, optimizer, 10))
    return plan.hash(), sorted(plan.step_owners), follows, answers


@pytest.mark.parametrize("ranks", [3, 4])
def test_the_optimizer_takes_the_step_owners_of_the_plan(ranks: int) -> None:
    rules = ["torch-muon", "soap"]
    results = pool().run(by_plan, ranks, rules)
    assert len({plan for plan, *_ in results}) == 1
    assert results[0][1] == ["down.weight", "up.weight"]
    for _, _, follows, _ in results:
        assert follows == [True] * 4
    for number, answer in enumerate(results[0][3]):
        state, in_steps, _, _ = answer
        assert in_steps == 2 * 10
        assert apart(state, reference(rules[number // 2], ranks, 10, lopsided)) <= 1e-12


def routed(member: Member) -> dict[str, Any]:
    model, found = fresh(), {}
    fully_shard(model, mesh=member.mesh, placement="ragged", granularity="element")
    divided = [matrix.name for matrix in route(model, blocks=BLOCKS).gathered]
    chosen = {"qkv.weight": [3, 2, 0], "o.weight": [1]}
    result = route(model, blocks=BLOCKS, step_owners=chosen)
    workers = {matrix.name: matrix.worker for matrix in result.matrices}
    found["chosen"] = [workers[f"qkv.weight#{i}"] for i in range(3) if f"qkv.weight#{i}" in divided]
    found["wanted"] = [rank for i, rank in enumerate(chosen["qkv.weight"]) if f"qkv.weight#{i}" in divided]
    optimizer = IslandOptimizer(model, Shampoo, adamw, blocks=BLOCKS, step_owners=chosen)
    loss_of(model, parts(0, 4)[member.rank]).backward()
    optimizer.step()
    found["memory"] = sum(
        p.untyped_storage().nbytes() for p in optimizer._proxies.values() if _shared(optimizer, p)
    )
    found["held"] = sorted(
        slot.name for slot in optimizer.slots() if slot.optimizer is optimizer.optimizers[0]
    )
    for bad in ({"o.weight": [4]}, {"o.weight": [0, 1]}, {"norm.weight": [0]}):
        with pytest.raises(LayoutError, match="step_owners"):
            route(model, step_owners=bad)
    return found


def _shared(optimizer: IslandOptimizer, proxy: nn.Parameter) -> bool:
    shared = {matrix.name for matrix in optimizer.route.gathered}
    return any(optimizer._proxies.get(name) is proxy for name in shared)


def test_step_owners_can_be_chosen_and_keep_no_copies() -> None:
    answers = pool().run(routed, 4)
    names = sorted(name for answer in answers for name in answer["held"])
    assert names == sorted(
        [
            "down.weight",
            "o.weight",
            *(f"qkv.weight#{i}" for i in range(3)),
            *(f"experts#{i}" for i in range(3)),
        ]
    )
    for answer in answers:
        assert answer["chosen"] == answer["wanted"] != []
        assert answer["memory"] == 0


def test_roles_and_views_in_one_process() -> None:
    model = fresh()
    fully_shard(model)
    found = route(model, blocks=BLOCKS)
    assert [m.name for m in found.matrices if not m.alone] == [
        *(f"experts#{i}" for i in range(3)),
        *(f"qkv.weight#{i}" for i in range(3)),
    ]
    assert sorted(e.name for e in found.embeddings) == ["embed.weight", "head.weight"]
    assert {e.name for e in found.vectors} == {"norm.weight", "down.bias", "qkv.bias"}
    optimizer = IslandOptimizer(model, lambda groups: PolarSteps(groups, 0.1), adamw, blocks=BLOCKS)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loss_of(model, parts(0, 1)[0]).backward()
    optimizer.step()
    schedule.step()
    assert [group["lr"] for group in optimizer.optimizers[0].param_groups] == [0.05]
    model.float().double()  # new memory: the views of experts must follow it
    before = model.experts.detach().clone()
    loss_of(model, parts(1, 1)[0]).backward()
    optimizer.step()
    assert (model.experts - before).abs().min() > 0
    optimizer.zero_grad(set_to_none=False)
    assert model.experts.grad is not None and not model.experts.grad.any()
    with pytest.raises(LayoutError, match=r"node\.island\.checkpoint"):
        optimizer.state_dict()


def without_gradient(member: Member) -> tuple[bool, bool]:
    model = fresh()
    fully_shard(model, mesh=member.mesh, placement="ragged", granularity=7)
    optimizer = IslandOptimizer(model, lambda groups: torch.optim.Muon(groups, 0.1), adamw, blocks=BLOCKS)
    assert "o.weight" in {matrix.name for matrix in optimizer.route.gathered}
    before = full_state_dict(model)
    loss_of(model, parts(0, member.ranks)[member.rank]).backward()
    model.o.weight.grad = None
    optimizer.step()
    after = full_state_dict(model)
    same = {name: torch.equal(before[name], after[name]) for name in before}
    return same.pop("o.weight"), any(same.values())


def test_a_divided_matrix_without_gradient_is_left_alone() -> None:
    assert pool().run(without_gradient, 3) == [(True, False)] * 3


# ---- polar steps


def test_polar_steps_refuse_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match="needs a matrix"):
        PolarSteps([nn.Parameter(torch.zeros(3))], 0.1)
    one, other = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.zeros(0))
    other.data = one.detach().clone()
    for parameter in (one, other):
        parameter.grad = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    PolarSteps([one], 0.1, signed=True, weight_decay=0.5, scaling="none").step(lambda: 0.0)
    before = copy.deepcopy(other.detach()) * 0.95
    assert torch.allclose((one - before).abs(), torch.full((4, 3), 0.1))
