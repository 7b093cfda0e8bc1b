"""Steps that do not go as usual: with failures, other orders, unused parameters, and ranks that die."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.island import IslandError, Schedule, fully_shard, sharded_parameters
from node.island.param_group import Phase
from node.island.runtime import units_of
from tests.island.rig import Member, Ranks, device, pool
from tests.island.tiny_llama import Case, batch, build, loss_of, optimizers, shard


class Trip(torch.autograd.Function):
    """Identity that raises in backward when told to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trip: bool) -> Tensor:
        ctx.trip = trip
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.trip:
            raise ValueError("tripped in backward")
        return gradient, None


def tripping_steps(member: Member, where: str, explicit: bool) -> float:
    """Gradients after a step that fails in one block, against those of a model that never failed."""
    case = Case()
    gradients = []
    for trips in (False, True):
        model = build(case)
        shard(model, case, member)
        mine = batch(0).chunk(member.ranks)[member.rank]
        loss_of(model, mine, case.dtype).backward()  # so that prefetching knows the order
        for p in model.parameters():
            p.grad = None
        if trips:
            inner = model.layers[1].inner

            def tripping(x: Tensor, inner: Callable[[Tensor], Tensor] = inner) -> Tensor:
                if where == "forward":
                    raise ValueError("tripped in forward")
                return Trip.apply(inner(x), True)

            model.layers[1].inner = tripping
            with pytest.raises(ValueError, match=f"tripped in {where}"):
                loss_of(model, mine, case.dtype).backward()
            model.layers[1].inner = inner
            if explicit:
                model.reset_iter_state()  # type: ignore[operator]
                groups = [group for _, unit in units_of(model) for group in unit.groups]
                assert all(group.phase is Phase.SHARDED for group in groups)
                assert all(group.buffer.full_bytes == 0 for group in groups)
            for entry in sharded_parameters(model):
                entry.parameter.grad = None
        loss_of(model, mine, case.dtype).backward()
        gradients.append([e.parameter.grad for e in sharded_parameters(model)])
    return max(
        ((a - b).abs().max().item() for a, b in zip(*gradients, strict=True) if a is not None and a.numel()),
        default=0.0,
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("explicit", [False, True])
def test_a_step_after_a_failed_one_is_clean(where: str, explicit: bool) -> None:
    assert pool().run(tripping_steps, 3, where, explicit) == [0.0] * 3


def interleaved(member: Member) -> float:
    """Evaluations, forwards without backward, a block called alone, two forwards before two backwards."""
    case = Case(accumulate=2)
    gradients = []
    for disturbed in (False, True):
        model = build(case)
        shard(model, case, member)
        parts = batch(0).chunk(member.ranks)[member.rank].chunk(2)
        first = loss_of(model, parts[0], case.dtype)
        if not disturbed:
            first.backward()
        second = loss_of(model, parts[1], case.dtype)
        if disturbed:
            with torch.no_grad():
                model.layers[0](torch.zeros(1, 2, 16, dtype=case.dtype, device=device()))
                loss_of(model, parts[0], case.dtype)
                assert all(g.phase is Phase.SHARDED for _, u in units_of(model) for g in u.groups)
            first.backward()
        second.backward()
        if disturbed:
            loss_of(model, parts[0], case.dtype)  # a forward whose graph is thrown away
            model.unshard()  # type: ignore[operator]
            assert model.head.weight.shape == (37, 16)
            model.reshard()  # type: ignore[operator]
        gradients.append([e.parameter.grad for e in sharded_parameters(model)])
    return max(
        ((a - b).abs().max().item() for a, b in zip(*gradients, strict=True) if a is not None and a.numel()),
        default=0.0,
    )


def test_forwards_and_backwards_may_interleave() -> None:
    assert max(pool().run(interleaved, 3)) <= 1e-15


def gradients_of_unused(member: Member, find: bool) -> tuple[Any, Any]:
    case = Case(unused=True, schedule=Schedule(find_unused_parameters=find))
    model = build(case)
    shard(model, case, member)
    loss_of(model, batch(0).chunk(member.ranks)[member.rank], case.dtype).backward()
    entries = {e.name: e for e in sharded_parameters(model)}
    unused = entries["layers.1.extra.weight"]
    used = entries["layers.1.q.weight"]
    if not find:
        assert (unused.parameter.grad is None) == (unused.piece is None)
    return unused.parameter.grad is None or not unused.parameter.grad.any(), (
        unused.whole and unused.parameter.grad is None,
        used.parameter.grad is None,
    )


def test_unused_parameters_have_zero_gradients_or_none() -> None:
    for find in (False, True):
        answers = pool().run(gradients_of_unused, 2, find)
        assert all(zero for zero, _ in answers)
        assert sum(none for _, (none, _) in answers) == (1 if find else 0)
        assert sum(missing for _, (_, missing) in answers) == 1  # held by one of the two


def training_until_one_dies(member: Member, where: str) -> str:
    case = Case()
    model = build(case)
    shard(model, case, member)
    steppers = optimizers(case, [(e.name, e.parameter) for e in sharded_parameters(model)])

    def die(*_: Any) -> None:
        os._exit(3)

    try:
        for step in range(3):
            dies = step == 1 and member.rank == 1
            if dies and where == "forward":
                model.layers[1].register_forward_pre_hook(die)
            loss = loss_of(model, batch(step).chunk(member.ranks)[member.rank], case.dtype)
            if dies and where == "backward":
                nn.Module.register_full_backward_pre_hook(model.layers[1], die)
                loss = loss_of(model, batch(step).chunk(member.ranks)[member.rank], case.dtype)
            elif step == 1 and where == "backward":
                loss = loss_of(model, batch(step).chunk(member.ranks)[member.rank], case.dtype)
            loss.backward()
            if dies and where == "optimizer":
                steppers[0].register_step_pre_hook(die)
            for optimizer in steppers:
                optimizer.step()
    except IslandError:
        groups = [group for _, unit in units_of(model) for group in unit.groups]
        with suppress(IslandError):  # cleaning up meets the same dead rank, and says nothing else
            model.reset_iter_state()  # type: ignore[operator]
        assert all(group.phase is Phase.SHARDED and not group.buffer.full_bytes for group in groups)
        raise
    return "finished"


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_a_rank_that_dies_is_a_clear_error_on_the_others(where: str) -> None:
    ranks = Ranks(3, timeout=10.0)  # for the one that waits for the other survivor
    try:
        answers = ranks.answers_of(training_until_one_dies, 3, where, patience=60.0)
        for rank in (0, 2):
            ok, text = answers[rank]
            assert not ok and f"failed on rank {rank} of 3 (" in text
            assert "IslandError: gather of " in text or "IslandError: reduce of " in text
        assert answers[1] == (False, "the process died")
    finally:
        ranks.close()


class Sometimes(nn.Module):
    """Called twice, with a layer that only the second call uses: done with before the first call's turn."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        return self.linear(x) if use else x * 2


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(4, 4), Sometimes(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sometimes(self.first(x), False)
        return self.last(self.sometimes(x, True)).sum()  # type: ignore[no-any-return]


def gathers_of_a_unit_called_twice(member: Member) -> list[int]:
    torch.manual_seed(0)
    model = Around().to(device())
    fully_shard(model, units=[model.sometimes], mesh=member.mesh)
    unit = dict(units_of(model))["sometimes"]
    assert len(unit.groups) == 1
    counts = []
    for _ in range(3):
        loss = model(torch.ones(2, 4, device=device()))
        before = unit.comm.counters.gathers
        loss.backward()
        counts.append(unit.comm.counters.gathers - before)
    return counts


def test_a_unit_is_gathered_once_in_a_backward() -> None:
    assert pool().run(gathers_of_a_unit_called_twice, 2) == [[1, 1, 1]] * 2
