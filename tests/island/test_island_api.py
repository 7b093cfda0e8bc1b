"""fully_shard and its companions on modules of all kinds; mostly in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.island import (
    BoundPlan,
    IslandError,
    IslandModule,
    LayoutError,
    MixedPrecisionPolicy,
    Plan,
    TensorMeta,
    full_state_dict,
    fully_shard,
    init_parameters,
    load_full_state_dict,
    sharded_parameters,
)
from node.island.layout import owned
from node.island.param_group import ParamGroup
from node.island.runtime import units_of
from tests.island.rig import Member, device, pool
from tests.island.tiny_llama import Case, Llama, batch, build, loss_of


def whole_step(model: nn.Module, dtype: torch.dtype = torch.float64) -> float:
    loss = loss_of(model, batch(0), dtype)
    loss.backward()
    return loss.item()


def test_one_process_without_a_process_group_is_plain_training() -> None:
    plain, alone = build(Case(tied=True)), build(Case(tied=True))
    fully_shard(alone, units=alone.layers)
    assert isinstance(alone, Llama) and isinstance(alone, IslandModule)
    assert type(alone).__name__ == "IslandLlama"
    for model in (plain, alone):
        for _ in range(3):
            stepper = torch.optim.SGD(model.parameters(), 0.1)
            whole_step(model)
            stepper.step()
            stepper.zero_grad()
    state = full_state_dict(alone)
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


def test_parameters_of_several_units_go_to_the_root() -> None:
    model = build(Case(tied_blocks=True))
    fully_shard(model, units=model.layers)
    units = dict(units_of(model))
    shapes = {name: sum(len(group.sites) for group in unit.groups) for name, unit in units.items()}
    assert shapes == {"": 4, "layers.0": 9, "layers.1": 10, "layers.2": 9}
    names = [entry.name for entry in sharded_parameters(model)]
    assert "layers.0.q.weight" in names and "layers.2.q.weight" not in names


def test_refusals() -> None:
    model = build(Case(tied_blocks=True))
    for block in model.layers[:2]:
        fully_shard(block)
    with pytest.raises(LayoutError, match=r"layers\.0: q\.weight is shared with a module outside"):
        fully_shard(model)
    with pytest.raises(LayoutError, match="IslandBlock is wrapped already"):
        fully_shard(model.layers[0])
    with pytest.raises(LayoutError, match="must be submodules"):
        fully_shard(nn.Linear(2, 2), units=[nn.Linear(2, 2)])
    with pytest.raises(LayoutError, match="recurrent layers"):
        fully_shard(nn.Sequential(nn.LSTM(2, 2)))
    with pytest.raises(LayoutError, match="placement 'rows' is unknown"):
        fully_shard(nn.Linear(2, 2), placement="rows")
    with pytest.raises(LayoutError, match="assign=True"):
        fully_shard(nn.Linear(2, 2)).load_state_dict({}, assign=True)
    with pytest.raises(IslandError, match="still on the meta device"):
        with torch.device("meta"):
            lazy = nn.Linear(2, 2)
        fully_shard(lazy)(torch.zeros(1, 2))


def test_ignored_parameters_stay() -> None:
    model = build(Case())
    kept = model.norm.weight
    fully_shard(model, units=model.layers, ignored_params={kept})
    assert model.norm.weight is kept
    whole_step(model)
    assert kept.grad is not None and kept.grad.any()


def test_a_weight_used_outside_of_its_unit_is_reported() -> None:
    class Leak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.block = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            self.block.unshard()  # type: ignore[operator]
            return self.block(x + x.detach() @ self.block.weight)  # type: ignore[no-any-return]

    model = Leak()
    fully_shard(model, units=[model.block])
    with pytest.raises(IslandError, match=r"block \(group 0\): a gradient came after the unit's backward"):
        model(torch.ones(2, 4)).sum().backward()


@dataclass
class Output:
    """What models of other libraries return."""

    hidden: Tensor
    extra: dict[str, list[Tensor]]
    note: str = "n"


class Rich(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, *, x: Tensor, pair: tuple[Tensor, int]) -> Output:
        return Output(self.a(x), {"y": [self.b(pair[0])]})


def test_keyword_inputs_and_nested_outputs() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rich = nn.Linear(4, 4), Rich()

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            out = self.rich(x=y, pair=(y * 2, 3))
            return out.hidden + out.extra["y"][0]

    torch.manual_seed(0)
    plain = Outer()
    model = Outer()
    model.load_state_dict(plain.state_dict())
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    fully_shard(model.first)
    fully_shard(model.rich, mp_policy=policy)
    fully_shard(model)
    x = torch.randn(3, 4)
    out = model(x)
    assert out.dtype == torch.float32
    out.sum().backward()
    plain(x).sum().backward()
    for entry in sharded_parameters(model):
        wanted = plain.get_parameter(entry.name).grad
        assert wanted is not None and entry.parameter.grad is not None
        assert entry.parameter.grad.dtype == torch.float32
        torch.testing.assert_close(entry.parameter.grad, wanted, atol=0.05, rtol=0.05)


@pytest.mark.parametrize(("reduce_dtype", "total"), [(torch.float32, 264.0), (None, 256.0)])
def test_micro_batches_add_up_in_the_reduce_dtype(reduce_dtype: torch.dtype | None, total: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
    with model.no_sync():  # type: ignore[operator]
        for size in [256.0] + [1.0] * 7:
            model(torch.full((1, 1), size)).sum().backward()
            assert model.weight.grad is None
    model(torch.ones(1, 1)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.dtype == torch.float32
    assert model.weight.grad.item() == total  # 256 + 1 is 256 in bf16


def test_conversion_keeps_values_and_buffers_together() -> None:
    model = build(Case(tied=True, dtype=torch.float32))
    before = {name: tensor.double() for name, tensor in model.state_dict().items()}
    fully_shard(model, units=model.layers)
    whole_step(model, torch.float32)
    parameters = list(model.parameters())
    model.double()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    state = full_state_dict(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert whole_step(model) == whole_step(build(Case(tied=True, dtype=torch.float32)).double())
    assert all(e.parameter.grad is not None for e in sharded_parameters(model))


def draw(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    if tensor.ndim == 1:
        tensor.fill_(1.0)
    else:
        tensor.normal_(0.0, 0.02, generator=generator)


def meta_model(member: Member | None, placement: str) -> tuple[dict[str, Tensor], float]:
    with torch.device("meta"):
        model = Llama().to(torch.float64)
        model.head.weight = model.embed.weight
    options: dict[str, Any] = {"mesh": member.mesh} if member else {}
    fully_shard(model, units=model.layers, placement=placement, granularity="element", **options)
    assert all(entry.parameter.is_meta for entry in sharded_parameters(model))
    init_parameters(model, draw, seed=5, device=device())
    assert model.head.weight is model.embed.weight
    state = full_state_dict(model)
    part = batch(0).chunk(member.ranks if member else 1)[member.rank if member else 0]
    loss = loss_of(model, part, torch.float64)
    loss.backward()
    return {name: tensor.cpu() for name, tensor in state.items()}, loss.item()


@pytest.mark.parametrize("placement", ["owner", "ragged"])
def test_initialisation_on_meta_does_not_depend_on_the_ranks(placement: str) -> None:
    alone, loss = meta_model(None, placement)
    answers = pool().run(meta_model, 3, placement)
    for state, _ in answers:
        assert all(torch.equal(state[name], tensor) for name, tensor in alone.items())
    assert sum(part for _, part in answers) / 3 == pytest.approx(loss)
    assert alone["layers.0.q.weight"].std() > 0.01
    assert not torch.equal(alone["layers.0.q.weight"], alone["layers.1.q.weight"])


def loaded(member: Member) -> bool:
    state = {name: tensor * 2 for name, tensor in build(Case(tied=True)).state_dict().items()}
    model = build(Case(tied=True))
    fully_shard(model, units=model.layers, mesh=member.mesh, placement="ragged")
    load_full_state_dict(model, state)
    only = full_state_dict(model, rank=1)
    assert bool(only) == (member.rank == 1)
    back = full_state_dict(model)
    return all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_whole_states_are_taken_and_given() -> None:
    assert pool().run(loaded, 3) == [True] * 3
    model = build(Case())
    state = model.state_dict()
    fully_shard(model)
    with pytest.raises(LayoutError, match="lacks"):
        load_full_state_dict(model, {name: t for name, t in state.items() if "norm" not in name})
    with pytest.raises(LayoutError, match="has shape"):
        load_full_state_dict(model, {**state, "norm.weight": torch.zeros(3)})


# ---- plans


def plan_of(model: nn.Module, ranks: int, prefixes: list[str]) -> Plan:
    """A group for each prefix and one for the rest; everything on the last rank but the vectors."""
    left = dict(model.named_parameters())
    groups = []
    for prefix in [*prefixes, ""]:
        own = {n: left.pop(n) for n in list(left) if n.startswith(prefix)}
        metas = [TensorMeta(n, tuple(p.shape), group=prefix) for n, p in own.items()]
        owners = [ranks - 1 if len(meta.shape) > 1 else 0 for meta in metas]
        groups.append(owned(metas, owners, ranks))
    return Plan(tuple(groups))


def planned(member: Member, by_block: bool) -> tuple[bool, float]:
    model, plain = build(Case()), build(Case())
    plan = plan_of(model, member.ranks, [f"layers.{n}." for n in range(3)])
    if by_block:
        bound = BoundPlan(plan, model)
        for block in model.layers:
            fully_shard(block, mesh=member.mesh, placement=bound)
        fully_shard(model, mesh=member.mesh, placement=bound)
    else:
        fully_shard(model, mesh=member.mesh, placement=plan, units=model.layers)
    holders = {True: member.ranks - 1, False: 0}  # of matrices, and of vectors
    placed = all(
        entry.whole == (member.rank == holders[len(entry.meta.shape) > 1])
        for entry in sharded_parameters(model)
    )
    part = batch(0).chunk(member.ranks)[member.rank]
    return placed, abs(
        loss_of(model, part, torch.float64).item() - loss_of(plain, part, torch.float64).item()
    )


@pytest.mark.parametrize("by_block", [False, True])
def test_plans_are_followed(by_block: bool) -> None:
    assert pool().run(planned, 3, by_block) == [(True, 0.0)] * 3


def test_plans_that_do_not_fit_are_refused() -> None:
    model = build(Case())
    plan = plan_of(model, 1, [])
    with pytest.raises(LayoutError, match="not in the same unit"):
        fully_shard(model, placement=plan, units=model.layers)
    model = build(Case())
    with pytest.raises(LayoutError, match="made for 2 ranks, the mesh shards over 1"):
        fully_shard(model, placement=plan_of(model, 2, []))
    with pytest.raises(LayoutError, match="no place for 0"):
        fully_shard(nn.Sequential(nn.Linear(2, 2)), placement=plan)
    small = Plan((owned([TensorMeta("weight", (2, 3)), TensorMeta("bias", (2,))], [0, 0], 1),))
    with pytest.raises(LayoutError, match=r"weight has shape \(2, 2\), in the plan \(2, 3\)"):
        fully_shard(nn.Linear(2, 2), placement=small)
    with pytest.raises(LayoutError, match="without this parameter"):
        fully_shard(nn.Linear(2, 2), placement=BoundPlan(small, nn.Linear(3, 2)))
    frozen = nn.Linear(3, 2)
    frozen.bias.requires_grad_(False)
    with pytest.raises(LayoutError, match="mixes trainable and frozen"):
        fully_shard(frozen, placement=small)


def test_default_placement_knows_matrices_stacks_and_embeddings() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lm_head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.experts = nn.Parameter(torch.zeros(3, 4, 5))
            self.block = nn.Linear(4, 4)
            self.frozen = nn.Linear(4, 6, bias=False)
            self.frozen.weight.requires_grad_(False)

    model = fully_shard(Mixed(), units=[])
    kinds = {e.name: e.meta.granularity for e in sharded_parameters(model)}
    assert kinds["experts"] == 20 and kinds["block.weight"] == 0 and kinds["block.bias"] == 0
    assert kinds["embed.weight"] == 4 and kinds["frozen.weight"] == 4
    groups: list[ParamGroup] = [group for _, unit in units_of(model) for group in unit.groups]
    assert sorted(group.trainable for group in groups) == [False, True, True]
