"""Contributions that are written while gradients still come: the same bytes, whatever the order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from optim.local.local_steps import LocalSteps
from optim.methods import MethodConfig, build_method
from optim.round_optimizer import RoundOptimizer
from optim.streaming import Ready
from protos.buckets import Bucket, BucketTable
from tests.optim.lane_rig import backward, model, owners, part_of

METHODS = {
    "sign-muon": {},
    "sign-muon, means": {"name": "sign-muon", "embeddings": "mean", "vectors": "mean"},
    "signum": {"name": "signum"},
    "ddp-muon": {"name": "ddp-muon"},
    "ddp-adamw": {"name": "ddp-adamw"},
}
LOCAL = ("muloco", "muloco-1bit", "lordo", "diloco")


class Witness:
    """What ``on_ready`` tells: the prefix grows, and stays as it was."""

    def __init__(self, out: torch.Tensor) -> None:
        self.out = out
        self.told: list[int] = []
        self._seen: list[torch.Tensor] = []

    def __call__(self, nbytes: int) -> None:
        assert nbytes > (self.told[-1] if self.told else 0)
        self.told.append(nbytes)
        self._seen.append(self.out[:nbytes].clone())

    def check(self) -> None:
        """What was final then is so now, and at last it was everything."""
        assert self.told[-1] == self.out.numel()
        assert all(torch.equal(seen, self.out[: seen.numel()]) for seen in self._seen)


def pair(options: dict, *, rank: bool = False) -> tuple[list[nn.Module], list[RoundOptimizer]]:
    nets = [model(), model()]
    if rank:
        nets = [part_of(net, owners(net, 2), 0) for net in nets]
    return nets, [build_method(MethodConfig(**options), net) for net in nets]


def give(nets: list[nn.Module], seed: int) -> None:
    """The same gradients for all."""
    source = model()
    backward(source, seed)
    for net in nets:
        for name, parameter in net.named_parameters():
            parameter.grad = None if parameter.is_meta else source.get_parameter(name).grad.clone()


def empty(optimizer: RoundOptimizer, index: int) -> torch.Tensor:
    return torch.full((optimizer.lane.of(index).nbytes,), 0xA5, dtype=torch.uint8)


def tensors(optimizer: RoundOptimizer) -> dict[str, torch.Tensor]:
    found = {**optimizer.shared_tensors(), **optimizer.local_tensors()}
    return {name: tensor.clone() for name, tensor in found.items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from(list(METHODS)), st.booleans(), st.randoms(use_true_random=False), st.data())
def test_any_order_of_arrival_gives_the_same_bytes(method, rank, random, data) -> None:
    nets, (plain, streamed) = pair(METHODS[method], rank=rank)
    held = [parameter for parameter in nets[1].parameters() if not parameter.is_meta]
    for index in range(2):
        give(nets, index)
        left, right = empty(plain, index), empty(streamed, index)
        assert plain.propose(index, left)
        witness = Witness(right)
        streamed.start(index, right, witness)
        random.shuffle(held)
        for parameter in held[: data.draw(st.integers(0, len(held)))]:  # the others are not announced
            streamed.arrived(parameter)
        assert streamed.propose(index, right)
        assert torch.equal(left, right)
        witness.check()
        plain.apply(index, left)
        streamed.apply(index, right)
    assert same(tensors(plain), tensors(streamed))


@pytest.mark.parametrize("method", METHODS)
def test_what_completes_something_is_what_has_it_written(method: str) -> None:
    nets, (_, optimizer) = pair(METHODS[method])
    held = list(nets[1].parameters())
    assert not any(map(optimizer.completes, held)), "nothing has been started"
    give(nets, 0)
    out = empty(optimizer, 0)
    optimizer.start(0, out, lambda nbytes: None)
    found = []
    for parameter in reversed(held):
        before, completes = out.clone(), optimizer.completes(parameter)
        optimizer.arrived(parameter)
        assert completes is not torch.equal(out, before)
        found.append(completes)
        assert not optimizer.completes(parameter), "it has come"
    assert {True, False} == set(found)


def test_the_end_of_the_model_is_written_before_its_beginning_has_come() -> None:
    net = model()
    optimizer = build_method(MethodConfig(), net)
    give([net], 0)
    witness = Witness(empty(optimizer, 0))
    optimizer.start(0, witness.out, witness)
    parameters = list(net.parameters())
    for parameter in reversed(parameters[5:]):
        optimizer.arrived(parameter)
    half = witness.told[-1]
    assert 0 < half < witness.out.numel()
    for parameter in reversed(parameters[:5]):
        optimizer.arrived(parameter)
    assert witness.told[-1] == witness.out.numel(), "all has been written before propose"
    assert optimizer.propose(0, witness.out)
    witness.check()


@pytest.mark.parametrize("announced", [True, False])
def test_a_gradient_that_is_not_finite_stops_what_follows(announced: bool) -> None:
    nets, (plain, streamed) = pair({})
    give(nets, 0)
    parameters = list(nets[1].parameters())
    parameters[0].grad[0, 0] = math.nan  # of the embedding, the last to come
    before = tensors(streamed)
    out = empty(streamed, 0)
    streamed.start(0, out, Witness(out))
    for parameter in reversed(parameters if announced else parameters[1:]):
        streamed.arrived(parameter)
    assert not streamed.propose(0, out)
    after = tensors(streamed)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("0.weight" in name for name in moved)
    assert all(name.endswith("momentum_buffer") for name in moved)
    streamed.apply(0, None)
    give(nets, 1)
    assert streamed.propose(1, out) and plain.propose(1, out)


def test_a_start_that_came_to_nothing_leaves_no_trace() -> None:
    nets, (plain, streamed) = pair({})
    give(nets, 0)
    left, right = empty(plain, 0), empty(streamed, 0)
    streamed.start(7, right, Witness(right))
    streamed.start(0, torch.empty_like(right), Witness(right))
    streamed.arrived(nn.Parameter(torch.zeros(3)))  # of somebody else
    assert plain.propose(0, left) and streamed.propose(0, right)
    assert torch.equal(left, right)
    streamed.arrived(next(nets[1].parameters()))  # after the proposal
    assert same(tensors(plain), tensors(streamed))


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("rank", [False, True])
def test_local_steps_tell_as_they_encode(name: str, rank: bool) -> None:
    nets, optimizers = pair({"name": name, "local_steps": 2}, rank=rank)
    assert all(isinstance(optimizer, LocalSteps) for optimizer in optimizers)
    for index in range(2):
        outs = [empty(optimizer, index) for optimizer in optimizers]
        witness = Witness(outs[1])
        for step in range(optimizers[0].micro_steps(index)):
            give(nets, 10 * index + step)
            if step + 1 == optimizers[0].send_after(index):
                optimizers[1].start(index, outs[1], witness)
            for optimizer in optimizers:
                assert optimizer.local_step(index, step)
        assert all(optimizer.propose(index, out) for optimizer, out in zip(optimizers, outs, strict=True))
        assert torch.equal(*outs)
        witness.check()
        assert len(witness.told) > 2
        for optimizer in optimizers:
            optimizer.apply(index, None)


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_ready_counts_a_contiguous_beginning(order, empty_ones) -> None:
    buckets = []
    for index in range(6):
        mean = Bucket.of(f"m{index}", "mean", [(f"m{index}", (4, 4 + index))])
        buckets.append(mean)
        if index in empty_ones:
            basis = Bucket.of(f"b{index}", "basis", [(f"b{index}", (4, 2))], source=mean.name)
            buckets.append(basis)
    table = BucketTable(tuple(buckets))
    told: list[int] = []
    ready, written = Ready(table, told.append), set()
    for index in order:
        ready.add([f"m{index}"])
        written.add(index)
        first = next((number for number in range(6) if number not in written), 6)
        expected = sum(table.buckets[i].nbytes for i, b in enumerate(buckets) if int(b.name[1]) < first)
        assert (told[-1] if told else 0) == expected
    assert told == sorted(set(told)) and told[-1] == table.nbytes
