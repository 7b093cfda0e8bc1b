"""What the runtime does with memory, collectives and exceptions, beside computing the right thing."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from node.island import (
    IslandError,
    Schedule,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    sharded_parameters,
)
from node.island.dbuffer import DBuffer
from node.island.runtime import units_of
from node.island.unit import Phase
from tests.island.rig import Member, Ranks, device, pool
from tests.island.tiny_llama import Case, batch, build, loss_of, optimizers, shard

# ---- memory


def storage_bytes() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if type(item) in (Tensor, nn.Parameter) and item.device.type == device().type:
            storage = item.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def memory(member: Member, steps: int) -> dict[str, Any]:
    case = Case(tied=True, frozen=True)
    before = storage_bytes()
    model = build(case)
    whole = sum(p.nbytes for p in model.parameters())
    numel = sum(p.numel() for p in model.parameters())
    originals = [ref(p) for p in model.parameters()]
    shard(model, case, member)
    alive = sum(r() is not None for r in originals)
    groups = [group for _, unit in units_of(model) for group in unit.groups]
    resident = sum(group.buffer.resident_bytes for group in groups)
    after_setup = storage_bytes() - before
    named = [(e.name, e.parameter) for e in sharded_parameters(model)]
    steppers = optimizers(case, named)
    sizes = []
    for step in range(steps):
        loss_of(model, batch(step).chunk(member.ranks)[member.rank], case.dtype).backward()
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
        if 0 < step < 6 or step > steps - 6:
            sizes.append(storage_bytes() - before)
    return {
        "whole": whole,
        "resident": resident,
        "alive": alive,
        "after_setup": after_setup,
        "sizes": sizes,
        "padding": sum(group.layout.padding for group in groups) * 8,
        "numel": numel,
        "full": sum(group.buffer.full_bytes for group in groups),
        "held": sum(e.piece.numel for e in sharded_parameters(model) if e.piece),
    }


@pytest.mark.parametrize(("ranks", "steps"), [(1, 6), (3, 100), (4, 6)])
def test_resident_bytes_are_the_parameters_and_the_padding(ranks: int, steps: int) -> None:
    answers = pool().run(memory, ranks, steps)
    assert sum(a["resident"] for a in answers) == answers[0]["whole"] + answers[0]["padding"]
    assert sum(a["held"] for a in answers) == answers[0]["numel"]
    for answer in answers:
        assert answer["alive"] == 0  # the original parameters are gone
        assert answer["after_setup"] == answer["resident"]  # and so is every other copy
        assert answer["full"] == 0
        # nothing is left behind by a step; gloo's threads may still hold the last buffer of one
        assert min(answer["sizes"][:5]) == min(answer["sizes"][-5:])


def test_a_model_that_is_dropped_is_freed() -> None:
    before = storage_bytes()
    model = build(Case(conditional=True))
    fully_shard(model, units=model.layers)
    for step in range(2):
        loss_of(model, batch(step), torch.float64).backward()
    assert storage_bytes() > before
    alive = ref(model)
    del model
    assert storage_bytes() == before and alive() is None


def gathered_at_once(member: Member, case: Case) -> tuple[int, int]:
    """The most block groups that were whole or being gathered at once in a step, and those left after it."""
    model = build(case)
    shard(model, case, member)
    blocks = [group for name, unit in units_of(model) if name for group in unit.groups]
    most = 0
    allocate = DBuffer.allocate

    def counted(buffer: DBuffer) -> Tensor:
        nonlocal most
        result = allocate(buffer)
        most = max(most, sum(group.buffer.full_bytes > 0 for group in blocks))
        return result

    DBuffer.allocate = counted  # type: ignore[method-assign]
    try:
        for step in range(3):
            most = 0
            model.layers[1].extra_now = (step + member.rank) % 2 == 0
            loss_of(model, batch(step).chunk(member.ranks)[member.rank], case.dtype).backward()
    finally:
        DBuffer.allocate = allocate  # type: ignore[method-assign]
    return most, sum(group.buffer.full_bytes > 0 for group in blocks)


@pytest.mark.parametrize("conditional", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_blocks_are_released_as_backward_goes(conditional: bool, prefetch: int) -> None:
    case = Case(conditional=conditional, schedule=Schedule(prefetch=prefetch))
    # a gather is issued before the last block is done with: one block, and one more that runs ahead
    assert pool().run(gathered_at_once, 2, case) == [(1 + prefetch, 0)] * 2


# ---- collectives


class CollectiveCount(TorchDispatchMode):
    """Counts what reaches the process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(member: Member) -> tuple[list[str], list[str], int]:
    case = Case()
    model = build(case)
    shard(model, case, member)
    steppers = optimizers(case, [(e.name, e.parameter) for e in sharded_parameters(model)])
    with CollectiveCount() as training:
        loss_of(model, batch(0).chunk(member.ranks)[member.rank], case.dtype).backward()
    with CollectiveCount() as clipping:
        clip_grad_norm_(model, 1.0)
    with CollectiveCount() as stepping:
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad()
    return stepping.seen, clipping.seen, len(training.seen)


def test_the_optimizer_step_runs_no_collective_and_clipping_one() -> None:
    for stepping, clipping, training in pool().run(collectives_of_a_step, 4):
        assert stepping == []
        assert clipping == ["c10d::allreduce_"]
        assert training > 8


def norms(member: Member) -> tuple[float, float, float]:
    case = Case(hybrid=member.ranks == 4)
    model = build(case)
    shard(model, case, member)
    loss_of(model, batch(0).chunk(member.ranks)[member.rank], case.dtype).backward()
    two = model.clip_grad_norm_(1e9).item()  # type: ignore[operator]
    largest = model.clip_grad_norm_(1e9, float("inf")).item()  # type: ignore[operator]
    clip_grad_norm_(model, two / 2)
    return two, largest, clip_grad_norm_(model, 1e9).item()


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_norm_counts_every_share_once(ranks: int) -> None:
    model = build(Case())
    (sum(loss_of(model, part, torch.float64) for part in batch(0).chunk(ranks)) / ranks).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    two = torch.nn.utils.get_total_norm(gradients).item()
    largest = torch.nn.utils.get_total_norm(gradients, float("inf")).item()
    for answer in pool().run(norms, ranks):
        assert answer == pytest.approx((two, largest, two / 2), rel=1e-5)


def unlike_plans(member: Member) -> list[str]:
    found = []
    for unlike in ("owners", "schedule"):
        model = build(Case())
        options: dict[str, Any] = {"mesh": member.mesh}
        if unlike == "owners" and member.rank == 1:
            options["placement"] = "ragged"
        if unlike == "schedule" and member.rank == 1:
            options["schedule"] = Schedule(prefetch=2)
        fully_shard(model, units=model.layers, **options)
        for _ in range(2):  # it does not go on the second time either
            with pytest.raises(IslandError) as error:
                model(batch(0)[:, :-1])
        found.append(str(error.value))
    return found


def test_unlike_plans_are_refused_before_the_first_gather() -> None:
    for texts in pool().run(unlike_plans, 3):
        assert all("the ranks disagree on the sharding plan: rank 0: plan of 33 tensors" in t for t in texts)


def first_replica_wins(member: Member) -> float:
    torch.manual_seed(member.rank // 2)  # unlike replicas
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device())
    fully_shard(model, mesh=member.grid)
    model(torch.zeros(1, 6, device=device())).sum().backward()
    return sum(t.double().sum().item() for t in full_state_dict(model).values())


def test_replicas_start_equal() -> None:
    answers = pool().run(first_replica_wins, 4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(device())
    assert set(answers) == {sum(t.double().sum().item() for t in model.state_dict().values())}


# ---- steps that do not go as usual


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
