"""Votes and means of the gradient of the round before."""

from __future__ import annotations

import math

import pytest
import torch

from optim.lordo.low_rank_ddp import LowRankDDP
from optim.methods import MethodConfig, build_method
from optim.round_optimizer import RoundOptimizer
from tests.optim.lane_rig import backward, model

NAMES = ("sign-muon", "signum", "ddp-muon", "ddp-adamw", "lowrank-ddp")


def build(name: str, **options) -> tuple[torch.nn.Module, RoundOptimizer]:
    net = model()
    return net, build_method(MethodConfig(name=name, delay=1, **options), net)


def empty(optimizer: RoundOptimizer, index: int) -> torch.Tensor:
    return torch.zeros(optimizer.lane.of(index).nbytes, dtype=torch.uint8)


@pytest.mark.parametrize("name", NAMES)
def test_a_contribution_is_that_of_the_round_before(name: str) -> None:
    """A node with a delay sends in round r + 1 what one without, at the same weights, sends in round r."""
    net, late = build(name, **({"basis_every": 1} if name == "lowrank-ddp" else {}))
    assert late.micro_steps(3) == 1 and late.send_after(3) == 0
    out = empty(late, 0)
    assert not late.propose(0, out), "there is no gradient yet"
    for index in range(1, 4):
        fresh = model()
        plain = build_method(MethodConfig(name=name, **({"basis_every": 1} if "low" in name else {})), fresh)
        fresh.load_state_dict(net.state_dict())
        for tensors in (RoundOptimizer.shared_tensors, RoundOptimizer.local_tensors):
            for key, tensor in getattr(plain, tensors.__name__)().items():
                tensor.data.copy_(getattr(late, tensors.__name__)()[key])
        backward(net, index)
        backward(fresh, index)
        assert late.local_step(index - 1, 0)
        late.apply(index - 1, None)
        net.zero_grad(set_to_none=True)
        expected = empty(plain, index)
        assert plain.propose(index, expected) and late.propose(index, out)
        assert torch.equal(out, expected)
        assert not late.propose(index, out), "a gradient goes into one contribution"


def test_a_round_without_a_gradient_is_followed_by_one_without_a_contribution() -> None:
    net, optimizer = build("sign-muon")
    out = empty(optimizer, 0)
    backward(net, 0)
    optimizer.local_step(0, 0)
    optimizer.apply(0, None)
    optimizer.apply(1, None)  # the node caught up here
    assert not optimizer.propose(2, out)
    optimizer.local_step(2, 0)
    assert optimizer.propose(3, out)
    optimizer.local_step(3, 0)
    optimizer.loaded()
    assert not optimizer.propose(4, out)


@pytest.mark.parametrize("name", ["sign-muon", "lowrank-ddp"])
def test_a_late_gradient_that_is_not_finite(name: str) -> None:
    net, optimizer = build(name)
    backward(net, 0)
    net[1].weight.grad[0, 0] = math.inf
    assert optimizer.local_step(0, 0)
    before = {key: tensor.clone() for key, tensor in optimizer.local_tensors().items()}
    assert not optimizer.propose(1, empty(optimizer, 1))
    assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.local_tensors().items())


def test_streaming_tells_as_the_kept_gradients_are_encoded() -> None:
    net, optimizer = build("sign-muon")
    backward(net, 0)
    optimizer.local_step(0, 0)
    out, told = empty(optimizer, 1), []
    optimizer.start(1, out, told.append)
    for parameter in net.parameters():
        optimizer.arrived(parameter)
    assert not told, "what comes now belongs to the next round"
    assert optimizer.propose(1, out)
    assert told == sorted(told) and told[-1] == out.numel()


@pytest.mark.parametrize("name", NAMES)
def test_as_an_ordinary_optimizer_every_update_is_a_step_late(name: str) -> None:
    net, optimizer = build(name)
    losses = []
    for index in range(60):
        backward(net, index)
        before = net[1].weight.detach().clone()
        optimizer.step()
        assert torch.equal(before, net[1].weight) == (index == 0)
        with torch.no_grad():
            words = torch.arange(16)
            losses.append(float(torch.nn.functional.cross_entropy(net(words), (3 * words + 1) % 16)))
    assert losses[-1] < 0.8 * losses[0]


def test_what_cannot_be_late() -> None:
    for name in ("muloco", "lordo", "local-adamw"):
        with pytest.raises(ValueError, match="use overlap, not delay"):
            build(name)
    with pytest.raises(ValueError, match="delay must be 0 or 1"):
        build_method(MethodConfig(delay=2), model())
    assert LowRankDDP(model()).delay == 0
