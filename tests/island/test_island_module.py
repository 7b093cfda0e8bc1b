"""The methods of FSDP2's modules, and modules that are wrapped together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule as StockModule

from node.island import (
    CommPolicy,
    FSDPModule,
    IslandModule,
    LayoutError,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    sharded_parameters,
)
from node.island.param_group import Phase
from node.island.runtime import units_of
from node.island.unit import Unit
from tests.island.rig import Member, device, pool
from tests.island.tiny_llama import Case, Llama, batch, build, loss_of

DTYPE = torch.float64

# what the docs give a reason for, or another name
ABSENT = {
    "set_all_reduce_hook",
    "set_allocate_memory_from_process_group_for_comm",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_force_sum_reduction_for_comms",
    "set_post_optim_event",
    "set_reduce_scatter_divide_factor",
    "set_reduce_scatter_max_input_buffers",
    "set_reduce_scatter_unused_params",
    "set_separate_reduce_scatter_group",
    "set_symm_mem_for_comm",
}


def wrapped(**options: Any) -> Any:
    model: Any = build(Case())
    return fully_shard(model, units=model.layers, **options)


def unit_of(module: nn.Module) -> Unit:
    return units_of(module)[0][1]


def whole(module: nn.Module) -> bool:
    return all(group.phase is Phase.WHOLE for group in unit_of(module).groups)


def step(model: nn.Module, number: int = 0) -> None:
    loss_of(model, batch(number), DTYPE).backward()


def test_every_name_of_fsdp2_is_there_or_accounted_for() -> None:
    names = {name for name in vars(StockModule) if not name.startswith("_")}
    assert names - set(dir(IslandModule)) <= ABSENT
    assert FSDPModule is IslandModule and isinstance(wrapped().layers[0], FSDPModule)


def test_a_handle_waits_for_a_gather() -> None:
    model = wrapped()
    handle = model.layers[0].unshard(async_op=True)
    assert isinstance(handle, UnshardHandle) and not whole(model.layers[0])
    assert model.layers[0].q.weight is unit_of(model.layers[0]).groups[0].buffer.sharded[2]
    handle.wait()
    assert whole(model.layers[0])
    model.layers[0].reshard()
    assert model.layers[0].unshard() is None and whole(model.layers[0])
    model.layers[0].reshard()
    model.layers[0].unshard(async_op=True)
    step(model)  # forward waits


def test_weights_kept_after_forward() -> None:
    model = wrapped()
    model.set_reshard_after_forward(False)
    model(batch(0)[:, :-1])
    assert all(whole(module) for module in [model, *model.layers])
    model.set_reshard_after_forward(True, recurse=False)
    model(batch(0)[:, :-1])
    assert not whole(model) and all(whole(layer) for layer in model.layers)


def gathers_of(model: Any, work: Any) -> int:
    counters = unit_of(model).comm.counters
    before: int = counters.gathers
    work()
    return int(counters.gathers) - before


def test_weights_kept_after_backward() -> None:
    model, plain = wrapped(), build(Case())
    step(model)
    model.set_reshard_after_backward(False)
    step(model)
    assert all(whole(module) for module in [model, *model.layers])
    assert gathers_of(model, lambda: model(batch(0)[:, :-1])) == 0
    model.set_reshard_after_backward(True)
    step(model)
    assert not any(whole(module) for module in [model, *model.layers])
    for _ in range(3):
        step(plain)
    for entry in sharded_parameters(model):
        wanted = plain.get_parameter(entry.name).grad
        assert wanted is not None and torch.equal(entry.parameter.grad, wanted)


def test_an_embedding_that_backward_does_not_gather() -> None:
    counts = []
    for needed in (True, False):
        model: Any = build(Case())
        fully_shard(model.embed)
        fully_shard(model)
        model.embed.set_unshard_in_backward(needed)
        step(model)
        loss = loss_of(model, batch(0), DTYPE)
        counts.append(gathers_of(model, loss.backward))
        assert model.embed.weight.grad is not None
    assert counts == [1, 0]


def test_a_divisor_of_gradients() -> None:
    one, other = wrapped(), wrapped()
    other.layers[0].set_gradient_divide_factor(4.0)
    step(one)
    step(other)
    for a, b in zip(sharded_parameters(one), sharded_parameters(other), strict=True):
        factor = 4.0 if a.name.startswith("layers.0.") else 1.0
        torch.testing.assert_close(b.parameter.grad * factor, a.parameter.grad)


def gathered_in_order(model: Any, work: Any) -> list[str]:
    seen: list[str] = []
    original = Unit.unshard

    def noted(unit: Unit) -> None:
        if any(group.phase is Phase.SHARDED for group in unit.groups):
            seen.append(unit.name)
        original(unit)

    Unit.unshard = noted  # type: ignore[method-assign]
    try:
        work()
    finally:
        Unit.unshard = original  # type: ignore[method-assign]
    return seen


def numbered(*layers: int) -> list[str]:
    return [f"layers.{number}" for number in layers]


def test_prefetches_by_name() -> None:
    model = wrapped()
    step(model)
    first, second, third = model.layers
    usual = gathered_in_order(model, lambda: step(model))
    assert usual == ["IslandLlama", *numbered(0, 1, 2, 2, 1, 0)]
    first.set_modules_to_forward_prefetch([third])
    third.set_modules_to_backward_prefetch([first, second])
    chosen = gathered_in_order(model, lambda: step(model))
    assert chosen == ["IslandLlama", *numbered(0, 2, 1, 2, 0, 1)]
    first.set_modules_to_forward_prefetch([])
    third.set_modules_to_backward_prefetch([])
    assert gathered_in_order(model, lambda: step(model)) == usual
    with pytest.raises(LayoutError, match="Linear is not wrapped"):
        first.set_modules_to_forward_prefetch([first.q])


class TwoWays(nn.Linear):
    def backwards(self, y: Tensor) -> Tensor:
        return y @ self.weight


def test_another_method_gathers_too() -> None:
    model = TwoWays(4, 3).to(device())
    twin = TwoWays(4, 3).to(device())
    twin.load_state_dict(model.state_dict())
    register_fsdp_forward_method(model, "backwards")  # not wrapped yet: nothing happens
    assert "backwards" not in vars(model)
    fully_shard(model, reshard_after_forward=True)
    with pytest.raises(ValueError, match="has no method sideways"):
        register_fsdp_forward_method(model, "sideways")
    register_fsdp_forward_method(model, "backwards")
    y = torch.ones(2, 3, device=device(), requires_grad=True)
    out = model.backwards(y)
    assert torch.equal(out, twin.backwards(y)) and not whole(model)
    out.sum().backward()
    twin.backwards(y).sum().backward()
    assert model.weight.grad is not None and torch.equal(model.weight.grad, twin.weight.grad)


def test_a_number_of_ranks_to_reshard_to() -> None:
    for given, kept in ((1, True), (True, False), (False, True)):
        model = wrapped(reshard_after_forward=given)
        model(batch(0)[:, :-1])
        assert all(whole(module) == kept for module in [model, *model.layers])
    with pytest.raises(LayoutError, match=r"reshard_after_forward=2: .* shard over 2 ranks and replicate"):
        wrapped(reshard_after_forward=2)


def gradients_of(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    """What this rank has of each parameter's gradient, and from which element on."""
    return {
        entry.name: (entry.piece.start, entry.parameter.grad)
        for entry in sharded_parameters(model)
        if entry.piece is not None and entry.parameter.grad is not None
    }


def compare(answers: list[dict[str, tuple[int, Tensor]]], copies: int = 1) -> None:
    """They are, all together, the gradients of a plain model after three batches."""
    plain = build(Case())
    for number in range(3):
        step(plain, number)
    plain.cpu()
    found: dict[str, int] = {}
    for answer in answers:
        for name, (start, gradient) in answer.items():
            wanted = plain.get_parameter(name).grad
            assert wanted is not None
            part = wanted.flatten()[start : start + gradient.numel()]
            assert (gradient.flatten() - part).abs().max().item() <= 1e-12, name
            found[name] = found.get(name, 0) + gradient.numel()
    assert found == {name: copies * parameter.numel() for name, parameter in plain.named_parameters()}


# ---- several modules in one unit


def together(mesh: Any = None, policy: CommPolicy | None = None) -> Any:
    model: Any = build(Case())
    options: dict[str, Any] = {"mesh": mesh, "comm_policy": policy}
    modules = [model.embed, model.norm, model.head]
    assert fully_shard(modules, **options) is modules
    fully_shard([model.layers[0], model.layers[1]], **options)
    fully_shard(model.layers[2], **options)
    fully_shard(model, **options)
    return model


def gradients_together(member: Member) -> dict[str, tuple[int, Tensor]]:
    model = together(member.mesh, CommPolicy(check_signatures=True))
    for number in range(3):
        loss_of(model, batch(number).chunk(member.ranks)[member.rank], DTYPE).backward()
    assert not any(group.buffer.full_bytes for _, unit in units_of(model) for group in unit.groups)
    return gradients_of(model)


def test_modules_that_are_one_unit() -> None:
    compare(pool().run(gradients_together, 3))


def test_a_unit_of_several_modules_is_released_after_the_last() -> None:
    model = together()
    assert [name for name, _ in units_of(model)] == ["", "embed", "layers.0", "layers.2"]
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: seen.append((whole(model.embed), whole(model.layers[0]))))
    model(batch(0)[:, :-1])
    assert seen == [(True, True), (True, False), (True, False)] and not whole(model.embed)


def test_conversion_of_a_unit_of_several_modules() -> None:
    model = together()
    before = {name: tensor.float() for name, tensor in model.state_dict().items()}
    model.float()
    loss_of(model, batch(0), torch.float32).backward()
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    model.layers[0].double()
    with pytest.raises(LayoutError, match="only some of the modules that were wrapped together"):
        model(batch(0)[:, :-1])


def test_lists_that_are_refused() -> None:
    with pytest.raises(LayoutError, match="an empty list"):
        fully_shard([])
    model = build(Case())
    with pytest.raises(LayoutError, match="Linear is within another module of the list"):
        fully_shard([model.layers[0], model.layers[0].q])


# ---- gradients on several ranks


def accumulated(member: Member, how: str) -> tuple[bool, dict[str, tuple[int, Tensor]]]:
    """Whether the first of three micro-batches left no gradient, and what there is after the last."""
    model: Llama = build(Case())
    mesh = member.grid if how == "all_reduce" else member.mesh
    fully_shard(model, units=model.layers, mesh=mesh, comm_policy=CommPolicy(check_signatures=True))
    early = False
    for number in range(3):
        if how == "all_reduce":
            model.set_requires_all_reduce(number == 2)  # type: ignore[operator]
        else:
            model.set_is_last_backward(number == 2)  # type: ignore[operator]
        loss_of(model, batch(number).chunk(member.ranks)[member.rank], DTYPE).backward()
        if number == 0:
            early = all(entry.parameter.grad is None for entry in sharded_parameters(model))
    return early, gradients_of(model)


def test_gradients_that_wait_for_the_replicas() -> None:
    answers = pool().run(accumulated, 4, "all_reduce")
    assert all(early for early, _ in answers)
    compare([gradients for _, gradients in answers], copies=2)


def test_reduces_that_go_on_beside_the_next_backward() -> None:
    compare([gradients for _, gradients in pool().run(accumulated, 2, "last")])
