"""Error feedback from round to round, and what is not finite."""

from __future__ import annotations

import pytest
import torch

from optim.aggregate import ReducerMemory
from optim.local.adamw import AdamWInner
from optim.local.local_steps import LocalSteps
from optim.methods import MethodConfig, build_method
from optim.packs import PayloadError
from tests.optim.local_rig import (
    Node,
    backward,
    batch,
    delta,
    error,
    local_steps,
    model,
    parameters,
    reduce,
    run_round,
    same,
)

# ---------------------------------------------------------------------- error feedback


FEEDBACK = MethodConfig(name="muloco", codec="ternary", local_steps=2)


def own(node: Node, payload: torch.Tensor, name: str = "1.weight") -> torch.Tensor:
    """What a contribution decodes to."""
    optimizer = node.optimizer
    assert isinstance(optimizer, LocalSteps)
    fragment = optimizer._fragments[0]
    unit = next(unit for unit in fragment.units if unit.name == name)
    return optimizer._wire.read(fragment, unit, payload.numpy(), result=False)


@pytest.mark.parametrize("counted", [True, False])
def test_error_feedback_of_a_proposal(counted) -> None:
    nodes = [Node(FEEDBACK, index) for index in range(2)]
    memory = ReducerMemory()
    run_round(nodes, 0, memory)
    node, before = nodes[0], error(nodes[0])
    assert before.any()
    for one in nodes:
        one.train(1)
    sent = delta(node) + before
    payloads = [one.propose(1) for one in nodes]
    result = reduce(nodes, payloads if counted else payloads[1:], 1, memory)
    for one in nodes:
        one.optimizer.apply(1, result, counted=counted or one is not node)
    expected = sent - own(node, payloads[0]) if counted else sent
    assert torch.equal(error(node), expected)
    assert nodes[0].digest() == nodes[1].digest()
    assert same(parameters(node.net), {k: node.optimizer.shared_tensors()[k] for k in parameters(node.net)})


def test_error_feedback_without_a_proposal_stays() -> None:
    nodes = [Node(FEEDBACK, index) for index in range(2)]
    memory = ReducerMemory()
    run_round(nodes, 0, memory)
    before = error(nodes[0])
    nodes[1].train(1)
    result = reduce(nodes, [nodes[1].propose(1)], 1, memory)
    nodes[0].optimizer.apply(1, result, counted=False)
    nodes[1].optimizer.apply(1, result)
    assert torch.equal(error(nodes[0]), before)
    assert nodes[0].digest() == nodes[1].digest()


def test_error_feedback_of_a_round_that_is_offered_again() -> None:
    node = Node(FEEDBACK)
    run_round([node], 0, ReducerMemory())
    before = error(node)
    node.train(1)
    node.propose(1)
    backward(node.net, batch(4))
    node.optimizer.local_step(1, 2)
    sent = delta(node) + before
    payload = node.propose(1)
    node.optimizer.apply(1, reduce([node], [payload], 1, ReducerMemory()))
    assert torch.equal(error(node), sent - own(node, payload))


def test_a_stale_proposal_is_not_settled() -> None:
    """The proposal of a round that came to nothing, then another round is applied without one."""
    node = Node(FEEDBACK)
    run_round([node], 0, ReducerMemory())
    before = error(node)
    node.train(1)
    payload = node.propose(1)
    node.optimizer.apply(2, reduce([node], [payload], 2, ReducerMemory()), counted=True)
    assert torch.equal(error(node), before)


def test_a_round_nobody_contributed_to() -> None:
    node = Node(FEEDBACK)
    run_round([node], 0, ReducerMemory())
    digest, before = node.digest(), error(node)
    node.train(1)
    sent = delta(node) + before
    node.propose(1)
    node.optimizer.apply(1, None, counted=False)
    assert node.digest() == digest
    assert torch.equal(error(node), sent), "unsent work stays"
    assert not delta(node).any()
    assert node.optimizer.round_index == 2


def test_unsent_work_is_sent_later() -> None:
    """With feedback on an exact codec nothing is ever lost, but for rounding."""
    node = Node(MethodConfig(name="local-adamw", local_steps=2, error_feedback=True))
    node.train(0)
    sent = delta(node)
    node.propose(0)
    node.optimizer.apply(0, None, counted=False)
    before = parameters(node.net)["1.weight"].view(-1)
    payload = node.propose(1)  # nothing new
    node.optimizer.apply(1, payload)
    assert torch.equal(parameters(node.net)["1.weight"].view(-1), before - sent)
    assert not error(node).any()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, {"[vectors]": False, "0.weight": True, "1.weight": True}),
        ({"codec": "vote"}, {"[vectors]": False, "0.weight": True, "1.weight": False}),
        ({"codec": "vote", "error_feedback": True}, {"[vectors]": True, "0.weight": True, "1.weight": True}),
        ({"error_feedback": False}, {"[vectors]": False, "0.weight": False, "1.weight": False}),
    ],
)
def test_where_errors_are_kept(options, kept) -> None:
    local = build_method(MethodConfig(name="muloco", **options), model()).local_tensors()
    assert {name: f"optimizer/{name}/error" in local for name in kept} == kept


# ---------------------------------------------------------------------- what is not finite


def test_a_gradient_that_is_not_finite_costs_its_step() -> None:
    ours, theirs = model(), model()
    optimizers = [local_steps(net, AdamWInner, local_steps=3) for net in (ours, theirs)]
    for step in range(3):
        backward(ours, batch(step))
        if step == 1:
            ours[1].weight.grad[0, 0] = torch.nan
        assert optimizers[0].local_step(0, step) == (step != 1)
        if step != 1:
            backward(theirs, batch(step))
            optimizers[1].local_step(0, step)
        assert same(parameters(ours), parameters(theirs))
    payloads = [torch.zeros(optimizers[0].tables.nbytes, dtype=torch.uint8) for _ in range(2)]
    assert all(optimizer.propose(0, payload) for optimizer, payload in zip(optimizers, payloads, strict=True))
    assert torch.equal(*payloads)


def test_a_node_without_a_usable_gradient_abstains() -> None:
    net = model()
    optimizer = local_steps(net, AdamWInner, local_steps=2)
    before = parameters(net)
    for _ in range(2):
        backward(net, batch(0))
        net[1].weight.grad.fill_(torch.inf)
        optimizer.step()
    assert same(parameters(net), before)
    assert optimizer.round_index == 1
    for index in range(2):
        backward(net, batch(index))
        optimizer.step()
    assert not same(parameters(net), before)


@pytest.mark.parametrize("name", ["muloco", "lordo", "local-adamw"])
def test_a_parameter_that_is_not_finite_is_reset(name) -> None:
    nodes = [Node(MethodConfig(name=name, local_steps=2), index) for index in range(2)]
    memory = ReducerMemory()
    run_round(nodes, 0, memory)
    broken, whole = nodes
    before = {key: t.clone() for key, t in broken.optimizer.local_tensors().items() if key.endswith("error")}
    for node in nodes:
        node.train(1)
    with torch.no_grad():
        broken.net[3].weight[0, 0] = torch.inf
    for key, tensor in broken.optimizer.local_tensors().items():
        if key.endswith(("3.weight/exp_avg", "3.weight/momentum_buffer")):
            tensor.fill_(torch.nan)
    payload = torch.empty(broken.optimizer.tables.of(1).nbytes, dtype=torch.uint8)
    assert not broken.optimizer.propose(1, payload)
    result = reduce(nodes, [whole.propose(1)], 1, memory)
    broken.optimizer.apply(1, result, counted=False)
    whole.optimizer.apply(1, result)
    assert broken.digest() == whole.digest()
    assert all(bool(tensor.isfinite().all()) for tensor in broken.optimizer.local_tensors().values())
    assert all(bool(parameter.isfinite().all()) for parameter in broken.net.parameters())
    after = broken.optimizer.local_tensors()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    run_round(nodes, 2, memory)
    assert broken.digest() == whole.digest()


@pytest.mark.parametrize("codec", ["fp32", "int8", "ternary", "vote", "lowrank:2+1bit"])
def test_a_result_that_must_not_be_decoded_changes_nothing(codec) -> None:
    node = Node(MethodConfig(name="muloco", codec=codec, local_steps=2))
    run_round([node], 0, ReducerMemory())
    node.train(1)
    result = reduce([node], [node.propose(1)], 1, ReducerMemory())
    digest, live = node.digest(), parameters(node.net)
    local = {key: tensor.clone() for key, tensor in node.optimizer.local_tensors().items()}
    table = node.optimizer.tables.of(1)
    last = [bucket.name for bucket in table.buckets].index("[vectors]" if codec == "vote" else "6.weight")
    bad = result.clone()
    start = table.result_offsets[last]
    bad[start : start + 4] = torch.tensor([0, 0, 192, 127], dtype=torch.uint8)  # NaN
    with pytest.raises(PayloadError, match="the result of round 1 was not applied"):
        node.optimizer.apply(1, bad)
    assert node.digest() == digest and same(parameters(node.net), live)
    assert same(dict(node.optimizer.local_tensors()), local)
    for wrong in (result[:-1], result.float(), torch.stack([result, result])):
        with pytest.raises(PayloadError):
            node.optimizer.apply(1, wrong)
    with pytest.raises(PayloadError, match="the output of propose"):
        node.optimizer.propose(1, torch.empty(3, dtype=torch.uint8))
    node.optimizer.apply(1, result)
    assert node.digest() != digest
