"""Fragments of a model that are exchanged in turn, and steps that overlap an exchange."""

from __future__ import annotations

import pytest
import torch

from optim.aggregate import ReducerMemory
from optim.methods import MethodConfig, build_method
from tests.optim.local_rig import (
    Node,
    backward,
    batch,
    delta,
    error,
    model,
    parameters,
    reduce,
    run_round,
    same,
)

# ---------------------------------------------------------------------- fragments and overlap


def test_only_the_fragment_of_a_round_moves() -> None:
    config = MethodConfig(name="muloco", local_steps=6, fragments=3)
    node = Node(config)
    optimizer = node.optimizer
    assert [optimizer.micro_steps(index) for index in range(4)] == [2, 2, 2, 2]
    names = [
        {member.name for bucket in optimizer.tables.of(index).buckets for member in bucket.members}
        for index in range(4)
    ]
    assert names[0] == names[3] and not names[0] & names[1] and not names[1] & names[2]
    assert names[0] | names[1] | names[2] == set(parameters(node.net))
    memory = ReducerMemory()
    for index in range(4):
        anchors = {k: v.clone() for k, v in optimizer.shared_tensors().items()}
        node.train(index)
        live = parameters(node.net)
        optimizer.apply(index, reduce([node], [node.propose(index)], index, memory))
        for name, value in parameters(node.net).items():
            anchor = optimizer.shared_tensors()[name]
            if name in names[index]:
                assert torch.equal(value, anchor) and not torch.equal(anchor, anchors[name])
            else:
                assert torch.equal(value, live[name]) and torch.equal(anchor, anchors[name])


def test_fragments_divide_the_peak() -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(9)))
    tables = {
        parts: build_method(
            MethodConfig(name="diloco", local_steps=8, fragments=parts, codec="fp32", embedding_codec="fp32"),
            net,
        ).tables
        for parts in (1, 2, 4, 8)
    }
    total = tables[1].nbytes
    for parts, schedule in tables.items():
        assert sum(table.nbytes for table in schedule.tables) == total
        assert schedule.nbytes <= total / parts + 4 * 32 * 32
        assert min(table.nbytes for table in schedule.tables) > 0


def test_decay_of_fragments_counts_the_steps_since_their_last_exchange() -> None:
    config = MethodConfig(name="local-adamw", local_steps=4, fragments=2, weight_decay=0.5, lr=0.01)
    node = Node(config)
    before = parameters(node.net)
    steps: dict[str, int] = dict.fromkeys(before, 0)
    for index, count in enumerate((2, 4, 4)):
        payload = node.propose(index)
        node.optimizer.apply(index, payload)
        for bucket in node.optimizer.tables.of(index).buckets:
            if len(bucket.members) == 1 and bucket.name not in ("0.weight", "6.weight"):
                steps[bucket.name] += count
    for name in ("1.weight", "3.weight", "5.weight"):
        assert steps[name] > 0
        ratio = node.optimizer.shared_tensors()[name] / before[name]
        torch.testing.assert_close(ratio, torch.full_like(ratio, 0.995 ** steps[name]))


@pytest.mark.parametrize("mix", [None, 0.25])
def test_overlap_merges(mix) -> None:
    config = MethodConfig(name="local-adamw", local_steps=4, overlap=1, mix=mix)
    node = Node(config)
    share = 0.5 if mix is None else mix
    assert (node.optimizer.send_after(0), node.optimizer.micro_steps(0)) == (3, 4)
    node.train(0)
    payload = node.propose(0)
    node.train(0, 3, 4)
    live = parameters(node.net)
    node.optimizer.apply(0, payload)
    for name, value in parameters(node.net).items():
        anchor = node.optimizer.shared_tensors()[name]
        assert torch.equal(value, live[name] * (1.0 - share) + anchor * share)


def test_work_is_not_kept_twice_after_an_overlap() -> None:
    """What was not counted is in the error feedback as a whole, so the parameters start from the anchor."""
    node = Node(MethodConfig(name="diloco", local_steps=4, overlap=1))
    node.train(0)
    node.propose(0)
    node.train(0, 3, 4)
    node.optimizer.apply(0, None, counted=False)
    assert error(node).any() and not delta(node).any()


def test_the_step_method_overlaps_as_rounds_do() -> None:
    config = MethodConfig(name="diloco", local_steps=4, overlap=2, codec="fp32", embedding_codec="fp32")
    node, net = Node(config), model()
    optimizer = build_method(config, net)
    for index in range(3):
        run_round([node], index, ReducerMemory())
        for step in range(4):
            backward(net, batch(1000 * index + 10 * step))
            optimizer.step()
    assert same(parameters(net), parameters(node.net))
    assert same(optimizer.shared_tensors(), node.optimizer.shared_tensors())


def test_overlap_recovers_from_parameters_that_are_not_finite() -> None:
    node = Node(MethodConfig(name="diloco", local_steps=4, overlap=1))
    node.train(0)
    payload = node.propose(0)
    with torch.no_grad():
        node.net[3].weight.fill_(torch.nan)
    node.optimizer.apply(0, reduce([node], [payload], 0, ReducerMemory()))
    assert torch.equal(node.net[3].weight, node.optimizer.shared_tensors()["3.weight"])
