"""Rounds of local steps: against a plain loop, votes, shapes, and state."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch

from optim import bits
from optim.aggregate import ReducerMemory
from optim.local.adamw import AdamWInner
from optim.local.layout import LocalGroup
from optim.local.local_steps import LocalSteps
from optim.local.torch_class import TorchInner
from optim.methods import MethodConfig, build_method
from optim.reduce import reduce_payloads
from optim.roles import classify
from optim.schedules import set_learning_rates
from tests.optim.local_rig import (
    Node,
    backward,
    batch,
    delta,
    local_steps,
    model,
    parameters,
    reduce,
    run_round,
    same,
)

# ---------------------------------------------------------------------- one node


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_one_node_is_the_plain_loop(name) -> None:
    """Exactly within a round; at its end ``anchor - (anchor - W)`` is rounded twice."""
    ours, theirs = model(), model()
    options: dict[str, Any] = {"betas": (0.9, 0.95)} if name == "AdamW" else {"momentum": 0.9}
    if name == "AdamW":
        optimizer = local_steps(ours, AdamWInner, local_steps=4)
    else:
        optimizer = local_steps(ours, lambda roles: TorchInner(roles, name, options), local_steps=4)
    plain = getattr(torch.optim, name)(theirs.parameters(), lr=0.01, weight_decay=0.0, **options)
    anchor = parameters(theirs)
    for step in range(12):
        for net in (ours, theirs):
            backward(net, batch(step))
        optimizer.step()
        plain.step()
        if step % 4 == 3:
            with torch.no_grad():
                for key, parameter in theirs.named_parameters():
                    assert torch.allclose(parameter, anchor[key] - (anchor[key] - parameter), atol=1e-7)
                    parameter.copy_(anchor[key] - (anchor[key] - parameter))
            anchor = parameters(theirs)
            assert same({k: v for k, v in optimizer.shared_tensors().items() if k in anchor}, anchor)
        assert same(parameters(ours), parameters(theirs))
    assert optimizer.round_index == 3


def test_decay_acts_once_a_round_on_the_anchor() -> None:
    net = model()
    optimizer = local_steps(net, AdamWInner, lr=0.01, weight_decay=0.5)
    before = parameters(net)
    for index in range(4):
        net.zero_grad()  # a missing gradient is zero: AdamW does not move
        optimizer.local_step(0, index)
    assert same(parameters(net), before)
    payload = torch.zeros(optimizer.tables.nbytes, dtype=torch.uint8)
    assert optimizer.propose(0, payload)
    assert not payload.any(), "a pseudo-gradient is free of decay"
    set_learning_rates(optimizer, 0.5)
    optimizer.apply(0, payload)
    factor = (1 - 0.005 * 0.5) * (1 - 0.005 * 0.5) * (1 - 0.005 * 0.5) * (1 - 0.005 * 0.5)
    assert same(parameters(net), {name: value * factor for name, value in before.items()})


def test_learning_rates_are_those_of_the_groups() -> None:
    net = model()
    optimizer = build_method(MethodConfig(name="muloco", local_steps=2), net)
    assert [group["name"] for group in optimizer.param_groups] == ["matrices", "embeddings", "vectors"]
    set_learning_rates(optimizer, 0.0)
    before = parameters(net)
    backward(net, batch(0))
    optimizer.step()
    assert same(parameters(net), before)
    set_learning_rates(optimizer, 1.0)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 6e-3, 6e-3]


def test_nothing_to_train_and_wrong_parameters() -> None:
    frozen = model().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        local_steps(frozen, AdamWInner)
    with pytest.raises(ValueError, match="contiguous float32"):
        local_steps(model().double(), AdamWInner)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_steps": 0}, "at least 1"),
        ({"local_steps": 6, "fragments": 4}, "local_steps = 6 cannot be shared out to 4 fragments"),
        ({"local_steps": 4, "overlap": 4}, "overlap must be from 0 to 3"),
        ({"local_steps": 4, "fragments": 2, "overlap": 2}, "less than the 2 steps of a round"),
        ({"mix": 0.0}, "mix must be above 0"),
        ({"outer": "adam"}, "unknown outer step"),
        ({"codec": "int7"}, "unknown codec"),
        ({"codec": "lowrank:2"}, "a vector has no low rank"),
        ({"fragments": 16, "local_steps": 16}, "cannot be cut in 16 fragments"),
        ({"lr": -1.0}, "all: lr"),
        ({"weight_decay": float("inf")}, "all: weight_decay"),
    ],
)
def test_options_that_make_no_sense(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        local_steps(model(), AdamWInner, **options)


def test_the_table() -> None:
    net = model()
    table = build_method(MethodConfig(name="muloco-1bit", embedding_codec="vote-row"), net).tables.of(0)
    rows = [
        (number, bucket.name, bucket.reduce, bucket.codec, bucket.elements)
        for number, bucket in zip(table.numbers, table.buckets, strict=True)
    ]
    assert rows == [
        (4, "6.weight", "majority", "fp32", 192),
        (3, "5.weight", "majority", "fp32", 216),
        (2, "3.weight", "majority", "fp32", 360),
        (1, "1.weight", "majority", "fp32", 240),
        (0, "0.weight", "majority", "fp32", 192),
        (5, "[vectors]", "mean", "fp32", 20 + 20 + 20 + 12),
        (10, "6.weight/scale", "mean", "fp32", 16),
        (9, "5.weight/scale", "mean", "fp32", 1),
        (8, "3.weight/scale", "mean", "fp32", 1),
        (7, "1.weight/scale", "mean", "fp32", 1),
        (6, "0.weight/scale", "mean", "fp32", 16),
    ]
    assert table.nbytes == 64 * 5 + 320 + 4 * (16 + 1 + 1 + 1 + 16)


# ---------------------------------------------------------------------- votes


def test_votes_and_their_scales() -> None:
    nodes = [
        Node(MethodConfig(name="muloco-1bit", outer="average", local_steps=2), index) for index in (0, 1, 2)
    ]
    before = parameters(nodes[0].net)
    payloads, deltas = [], []
    for node in nodes:
        node.train(0)
        deltas.append(before["1.weight"] - node.net.get_parameter("1.weight").detach())
        payloads.append(node.propose(0))
    run = reduce(nodes, payloads, 0, ReducerMemory())
    for node in nodes:
        node.optimizer.apply(0, run)
    sign = torch.stack([delta.sign() for delta in deltas]).sum(0).sign()
    scale = np.float32(
        np.mean([np.float32(delta.abs().double().mean()) for delta in deltas], dtype=np.float64)
    )
    moved = before["1.weight"] - nodes[0].optimizer.shared_tensors()["1.weight"]
    expected = before["1.weight"] - (before["1.weight"] - sign * torch.tensor(scale))
    decided = torch.stack([delta != 0 for delta in deltas]).all(0)
    assert decided.all()
    assert torch.equal(moved, expected)


def test_rows_have_scales_of_their_own() -> None:
    node = Node(MethodConfig(name="muloco-1bit", codec="vote-row", outer="average"))
    before = parameters(node.net)
    node.train(0)
    delta = before["1.weight"] - node.net.get_parameter("1.weight").detach()
    node.optimizer.apply(0, node.propose(0))
    after = node.optimizer.shared_tensors()["1.weight"]
    scales = delta.abs().double().mean(dim=1, keepdim=True).float()
    assert torch.equal(after, before["1.weight"] - delta.sign() * scales)


def test_a_frozen_layer_votes_by_a_hash_with_scale_zero() -> None:
    """Pseudo-gradients of zeros: the votes of all nodes are the same hash, and move nothing."""
    node = Node(MethodConfig(name="muloco-1bit", outer="average"))
    before = parameters(node.net)
    table = node.optimizer.tables.of(0)
    payload = node.propose(0)
    part = payload[table.offsets[0] : table.offsets[0] + 64]
    assert 16 < bits.unpack(part, 240).gt(0).sum() < 224
    node.optimizer.apply(0, payload)
    assert same(parameters(node.net), before)


def test_a_negative_scale_turns_no_vote_round() -> None:
    node = Node(MethodConfig(name="muloco-1bit", outer="average"))
    before = parameters(node.net)
    payload = node.propose(0)
    table = node.optimizer.tables.of(0)
    index = [bucket.name for bucket in table.buckets].index("3.weight/scale")
    payload[table.offsets[index] : table.offsets[index] + 4].view(torch.float32).fill_(-1.0)
    node.optimizer.apply(0, payload)
    assert same(parameters(node.net), before)


# ---------------------------------------------------------------------- shapes and memory


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("muloco", "vote-row"),
        *((name, codec) for name in ("muloco", "lordo") for codec in ("2bit", "lowrank:3+1bit")),
    ],
)
def test_convolutions_stacks_and_odd_shapes(name, codec) -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = torch.nn.Conv2d(2, 5, 3)
            self.attention = torch.nn.MultiheadAttention(7, 1)
            self.experts = torch.nn.Parameter(torch.randn(3, 2, 11) * 0.1)
            self.one = torch.nn.Parameter(torch.ones(()))
            self.thin = torch.nn.Linear(1, 1)
            self.head = torch.nn.Linear(13, 1)

    nets = []
    torch.manual_seed(0)
    first = Odd()
    for index in range(2):
        net = copy.deepcopy(first)
        optimizer = build_method(MethodConfig(name=name, codec=codec, local_steps=1, rank=2), net)
        nets.append((net, optimizer))
        generator = torch.Generator().manual_seed(index)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    for round_index in range(2):
        memory, payloads = ReducerMemory(), []
        for _, optimizer in nets:
            optimizer.local_step(round_index, 0)
            payloads.append(torch.empty(optimizer.tables.of(round_index).nbytes, dtype=torch.uint8))
            assert optimizer.propose(round_index, payloads[-1])
        result = reduce_payloads(
            nets[0][1].tables.of(round_index), payloads, round_index=round_index, memory=memory
        )
        for _, optimizer in nets:
            optimizer.apply(round_index, result)
    assert same(*(parameters(net) for net, _ in nets))
    assert not same(parameters(nets[0][0]), parameters(first))


@pytest.mark.parametrize(
    ("options", "shared", "local"),
    [
        ({"name": "local-adamw"}, 4, 8),
        ({"name": "diloco"}, 8, 12),  # + momentum, + error
        ({"name": "muloco"}, 8, 8),
        ({"name": "muloco-1bit"}, 8, 4),
        ({"name": "muloco-1bit", "fragments": 2, "local_steps": 2}, 8, 8),  # + live parameters
        ({"name": "sign-muon", "local_steps": 2}, 4, 4),
    ],
    ids=str,
)
def test_bytes_of_state_a_parameter(options, shared, local) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)), torch.nn.ReLU())
    optimizer = build_method(MethodConfig(**options), net)
    matrices = {name for name, _ in net.named_parameters() if name != "3.weight"}  # that is the head

    def of_matrices(tensors: dict[str, torch.Tensor]) -> float:
        mine = (
            t
            for key, t in tensors.items()
            if key.removeprefix("optimizer/").rpartition("/")[0] in matrices or key in matrices
        )
        return sum(t.numel() * t.element_size() for t in mine) / (len(matrices) * 64 * 64)

    assert of_matrices(optimizer.shared_tensors()) == pytest.approx(shared, rel=0.01)
    assert of_matrices(optimizer.local_tensors()) == pytest.approx(local, rel=0.01)


# ---------------------------------------------------------------------- state


def test_loading_shared_tensors_moves_the_model() -> None:
    nodes = [Node(MethodConfig(name="lordo", local_steps=2), index) for index in range(2)]
    memory = ReducerMemory()
    run_round(nodes, 0, memory)
    run_round(nodes, 1, memory)
    late = Node(MethodConfig(name="lordo", local_steps=2), seed=7)
    late.train(0)
    for name, tensor in late.optimizer.shared_tensors().items():
        tensor.copy_(nodes[0].optimizer.shared_tensors()[name])
    late.optimizer.loaded()
    assert same(parameters(late.net), parameters(nodes[0].net))
    run_round([*nodes, late], 2, memory)
    assert len({node.digest() for node in (*nodes, late)}) == 1


def test_evaluating_sees_the_anchor() -> None:
    node = Node(MethodConfig(name="diloco", local_steps=4, fragments=2))
    with node.optimizer.evaluating():
        assert not delta(node).any()
    node.train(0)
    live = parameters(node.net)
    with pytest.raises(ZeroDivisionError), node.optimizer.evaluating():
        assert not delta(node).any() and not same(parameters(node.net), live)
        1 / 0  # noqa: B018
    assert same(parameters(node.net), live)


RESUMED = [
    {"name": "muloco", "codec": "lowrank:2+2bit"},
    {"name": "muloco-1bit", "error_feedback": True},
    {"name": "diloco", "fragments": 2},
    {"name": "diloco", "overlap": 2, "codec": "1bit"},
    {"name": "lordo"},
    {"name": "lordo", "basis": "local"},
    {"name": "local-adamw", "optimizer": "torch:Adagrad", "lr": 0.01},
]


@pytest.mark.parametrize("options", RESUMED, ids=str)
@pytest.mark.parametrize("steps", [3, 8, 10])
def test_state_dict_in_the_middle_of_a_round(options, steps) -> None:
    config = MethodConfig(local_steps=4, **options)
    ours = model()
    optimizer = build_method(config, ours)
    for step in range(steps):
        backward(ours, batch(step))
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": ours.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    theirs = model(seed=5)
    other = build_method(config, theirs)
    for step in range(2):  # a state to be overwritten
        backward(theirs, batch(100 + step))
        other.step()
    theirs.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    for step in range(steps, steps + 9):
        for net, one in ((ours, optimizer), (theirs, other)):
            backward(net, batch(step))
            one.step()
        assert same(parameters(ours), parameters(theirs))
    assert same(optimizer.shared_tensors(), other.shared_tensors())
    assert same(optimizer.local_tensors(), other.local_tensors())
    assert optimizer.round_index == other.round_index


def test_states_of_others_are_refused_before_anything_changes() -> None:
    net = model()
    optimizer = build_method(MethodConfig(name="muloco"), net)
    before = {key: tensor.clone() for key, tensor in optimizer.shared_tensors().items()}
    others = {
        "another method": MethodConfig(name="local-adamw"),
        "only one of them": MethodConfig(name="muloco", outer="average"),
    }
    for config in others.values():
        state = build_method(config, model(3)).state_dict()
        with pytest.raises(ValueError, match="another method: only one of them"):
            optimizer.load_state_dict(state)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["param_names"] = ["x"]
    with pytest.raises(ValueError, match="other groups or parameter names"):
        optimizer.load_state_dict(state)
    state = copy.deepcopy(optimizer.state_dict())
    state["state"]["1.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"the saved 1.weight is torch.float32 \(3,\)"):
        optimizer.load_state_dict(state)
    assert same(optimizer.shared_tensors(), before)


def test_two_optimizers_of_one_model_may_not_share_a_parameter() -> None:
    net = model()
    roles = classify(net)
    groups = [LocalGroup(name, AdamWInner(roles), 0.1) for name in ("a", "b")]
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        LocalSteps(groups, local_steps=2)
