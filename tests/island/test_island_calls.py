"""Forwards and backwards that do not alternate, and models that change after they were wrapped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from node.island import CommPolicy, MixedPrecisionPolicy, full_state_dict, fully_shard, sharded_parameters
from node.island.param_group import Phase
from node.island.runtime import units_of
from tests.island.rig import Member, device, pool
from tests.island.tiny_llama import Case, Llama, batch, build, loss_of

DTYPE = torch.float64
Gradients = dict[str, tuple[int, Tensor]]  # from which element of the whole one on


def tokens_of(step: int, rank: int, ranks: int) -> Tensor:
    return batch(step).chunk(ranks)[rank]


def one_backward_for_two_forwards(model: Llama, rank: int, ranks: int) -> None:
    losses = [loss_of(model, tokens_of(step, rank, ranks), DTYPE) for step in range(2)]
    (losses[0] + losses[1]).backward()


def kept_losses(model: Llama, rank: int, ranks: int) -> None:
    kept = []
    for step in range(3):
        kept.append(loss_of(model, tokens_of(step, rank, ranks), DTYPE))
        kept[-1].backward()
    assert len(kept) == 3


def the_same_graph_twice(model: Llama, rank: int, ranks: int) -> None:
    loss = loss_of(model, tokens_of(0, rank, ranks), DTYPE)
    loss.backward(retain_graph=True)
    loss.backward()


def a_block_beside_the_model(model: Llama, rank: int, ranks: int) -> None:
    loss = loss_of(model, tokens_of(0, rank, ranks), DTYPE)
    aside = model.layers[1](torch.full((1, 2, 16), 1.0 + rank, dtype=DTYPE, device=device())).sum()
    (loss + aside).backward()


class Branches(nn.Module):
    """A stem, and layers of which a forward runs some."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        x = self.stem(x)
        for number in chosen:
            x = torch.tanh(self.layers[number](x))
        return self.head(x).sum()  # type: ignore[no-any-return]


def branches() -> Branches:
    torch.manual_seed(1)
    return Branches().to(device(), DTYPE)


def other_units_in_the_second_forward(model: nn.Module, rank: int, ranks: int) -> None:
    first = model(torch.full((2, 4), 1.0 + rank, dtype=DTYPE, device=device()), (0, 1))
    second = model(torch.full((2, 4), 2.0 + rank, dtype=DTYPE, device=device()), (2, 1))
    first.backward()
    second.backward()


def other_units_in_one_backward(model: nn.Module, rank: int, ranks: int) -> None:
    first = model(torch.full((2, 4), 1.0 + rank, dtype=DTYPE, device=device()), (0, 1))
    second = model(torch.full((2, 4), 2.0 + rank, dtype=DTYPE, device=device()), (2,))
    (first + second).backward()


def other_units_every_step(model: nn.Module, rank: int, ranks: int) -> None:
    for chosen in ((0, 1, 2), (2, 0), (1,), (0, 1, 2, 0)):
        model(torch.full((2, 4), 1.0 + rank, dtype=DTYPE, device=device()), chosen).backward()


class Sometimes(nn.Module):
    """A layer that always works, and one that does only when told."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.extra = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, use: bool) -> Tensor:
        y: Tensor = torch.tanh(self.always(x))
        return y + self.extra(x) if use else y


class Recomputed(nn.Module):
    """One layer runs twice under checkpoints; what it uses in which run is each rank's own affair."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.ModuleList([Sometimes(), nn.Linear(4, 4)])

    def forward(self, x: Tensor, uses: tuple[bool, bool]) -> Tensor:
        shared, middle = self.layers
        x = checkpoint(shared, self.stem(x), uses[0], use_reentrant=False)
        x = checkpoint(middle, x, use_reentrant=False)
        return self.head(checkpoint(shared, x, uses[1], use_reentrant=False)).sum()  # type: ignore[no-any-return]


class Beside(nn.Module):
    """Branches whose inputs need no gradient, so that they do not tell when their backward is over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Sometimes(), nn.Linear(4, 4)])

    def forward(self, x: Tensor, uses: tuple[bool, bool]) -> Tensor:
        one, other, last = self.layers
        return last(one(x) + other(x, uses[0]) + other(x, uses[1])).sum()  # type: ignore[no-any-return]


def seeded(kind: type[nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(2)
        return kind().to(device(), DTYPE)

    return make


USES = ((False, True), (True, False), (False, False), (True, True))


def other_uses_on_every_rank(model: nn.Module, rank: int, ranks: int) -> None:
    for step in range(4):
        x = torch.full((2, 4), 1.0 + rank, dtype=DTYPE, device=device())
        model(x, USES[(step + rank) % 4]).backward()


def of(case: Case) -> Callable[[], nn.Module]:
    return lambda: build(case)


CALLS: dict[str, tuple[Callable[[Any, int, int], None], Callable[[], Any]]] = {
    "two forwards": (one_backward_for_two_forwards, of(Case())),
    "two forwards, recomputed": (one_backward_for_two_forwards, of(Case(outer_checkpoint=True))),
    "two forwards, frozen": (one_backward_for_two_forwards, of(Case(frozen=True, tied=True))),
    "kept losses": (kept_losses, of(Case(conditional=True, twice=True))),
    "same graph": (the_same_graph_twice, of(Case(conditional=True, twice=True))),
    "block beside": (a_block_beside_the_model, of(Case())),
    "other units": (other_units_in_the_second_forward, branches),
    "other units, one backward": (other_units_in_one_backward, branches),
    "other units every step": (other_units_every_step, branches),
    "other uses, recomputed": (other_uses_on_every_rank, seeded(Recomputed)),
    "other uses, beside": (other_uses_on_every_rank, seeded(Beside)),
}


def extra_apart(name: str, parameter: nn.Parameter) -> str:
    """A group of its own for what not all ranks use, so that its gradients are complete at its own time."""
    return "ragged" if "extra" in name or "embed" in name or "head" in name else "owner"


def gradients(member: Member, name: str) -> Gradients:
    work, make = CALLS[name]
    model = make()
    # the ranks compare each collective before it is issued: their order must be the same
    policy = CommPolicy(check_signatures=True)
    fully_shard(model, units=model.layers, mesh=member.mesh, placement=extra_apart, comm_policy=policy)
    work(model, member.rank, member.ranks)
    groups = [group for _, unit in units_of(model) for group in unit.groups]
    assert all(group.phase is Phase.SHARDED and not group.buffer.full_bytes for group in groups)
    assert not any(group.has_gradients for group in groups)  # nothing was left unreduced
    return {
        entry.name: (entry.piece.start, entry.parameter.grad)
        for entry in sharded_parameters(model)
        if entry.piece is not None and entry.parameter.grad is not None
    }


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_gradients_are_those_of_a_plain_model(name: str, ranks: int) -> None:
    work, make = CALLS[name]
    plain = make()
    for rank in range(ranks):
        work(plain, rank, ranks)
    plain.cpu()  # as the answers are
    compared: Counter[str] = Counter()
    for answer in pool().run(gradients, ranks, name):
        for parameter, (start, gradient) in answer.items():
            whole = plain.get_parameter(parameter).grad
            part = slice(start, start + gradient.numel())
            wanted = torch.zeros(gradient.numel()) if whole is None else whole.flatten()[part] / ranks
            assert (gradient.flatten() - wanted).abs().max().item() <= 1e-12, parameter
            compared[parameter] += gradient.numel()
    trainable = {n: p.numel() for n, p in plain.named_parameters() if p.requires_grad}
    assert compared == trainable


def test_a_block_that_ran_alone_is_released_after_forward_later_on() -> None:
    model = build(Case())
    fully_shard(model, units=model.layers)
    model.layers[0](torch.zeros(1, 2, 16, dtype=DTYPE, device=device()))
    model(batch(0)[:, :-1])
    whole = [name for name, unit in units_of(model) if any(g.buffer.full_bytes for g in unit.groups)]
    assert whole == [""]


@pytest.mark.parametrize("freeze", [True, False])
def test_parameters_frozen_or_unfrozen_after_wrapping(freeze: bool) -> None:
    plain, model = build(Case()), build(Case())
    names = ["layers.0.q.weight", "layers.0.norm1.weight", "embed.weight"]
    for each in (plain, model):
        for name in names:
            each.get_parameter(name).requires_grad_(freeze)
    fully_shard(model, units=model.layers)
    for step in range(2):
        for each in (plain, model):
            if step:
                for name in names:
                    each.get_parameter(name).requires_grad_(not freeze)
            for parameter in each.parameters():
                parameter.grad = None
            loss_of(each, batch(step), DTYPE).backward()
        for name, parameter in plain.named_parameters():
            grad = model.get_parameter(name).grad
            assert (grad is None) == (parameter.grad is None) == (name in names and freeze == bool(step)), (
                name
            )
            assert grad is None or parameter.grad is None or torch.equal(grad, parameter.grad)


def test_states_while_the_weights_are_gathered() -> None:
    model = build(Case())
    fully_shard(model, units=model.layers)
    loss = loss_of(model, batch(0), DTYPE)  # the root keeps its weights for backward
    weight = model.head.weight
    state = model.state_dict()
    entries = {entry.name: entry.parameter for entry in sharded_parameters(model)}
    assert all(state[name].data_ptr() == parameter.data_ptr() for name, parameter in entries.items())
    model.load_state_dict({name: torch.full_like(tensor, 2.0) for name, tensor in state.items()})
    assert model.head.weight is weight
    loss.backward()
    assert all((tensor == 2.0).all() for tensor in full_state_dict(model).values())


def test_quantised_weights_keep_their_dtype() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(torch.arange(16).view(4, 4) + 300, requires_grad=False)
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), self.codes.clone()

    model = Quantised()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    y, codes = model(torch.ones(1, 4))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and torch.equal(codes, torch.arange(16).view(4, 4) + 300)


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled_with_the_hooks_inside(how: str) -> None:
    torch._dynamo.reset()
    plain, model = build(Case()), build(Case())
    fully_shard(model, units=model.layers)
    called: nn.Module = model
    if how == "whole":
        called = torch.compile(model, backend="aot_eager")
    else:
        for block in model.layers:
            block.compile(backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for step in range(3):
        loss_of(plain, batch(step), DTYPE).backward()
        loss_of(called, batch(step), DTYPE).backward()
        if step == 0:
            compiled = dict(torch._dynamo.utils.counters["frames"])
    assert compiled["ok"] > 0 and dict(torch._dynamo.utils.counters["frames"]) == compiled  # not again
    for entry in sharded_parameters(model):
        wanted, grad = plain.get_parameter(entry.name).grad, entry.parameter.grad
        assert wanted is not None and grad is not None and (grad - wanted).abs().max().item() <= 1e-12
