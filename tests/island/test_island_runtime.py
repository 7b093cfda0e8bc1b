"""What the runtime does with memory and collectives, beside computing the right thing."""

from __future__ import annotations

import gc
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
from tests.island.rig import Member, device, pool
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
