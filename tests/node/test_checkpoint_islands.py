"""Runs that are saved by islands of some sizes and go on with islands of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import CheckpointError, Meta, load, save
from node.ranks import Ranks
from optim.aggregate import ReducerMemory
from optim.methods import MethodConfig
from optim.reduce import reduce_payloads
from optim.round_optimizer import RoundOptimizer
from protos.digests import state_digest
from tests.node.virtual_ranks import on_all
from tests.optim.lane_rig import Island, Whole, backward

SAVED, END = 2, 4  # rounds before the checkpoint, and of the run
CONFIGS = {
    "sign-muon": MethodConfig(name="sign-muon"),
    "muloco-1bit": MethodConfig(name="muloco-1bit", local_steps=3),
    "muloco, fragments": MethodConfig(name="muloco", local_steps=4, fragments=2, overlap=1),
    "lordo": MethodConfig(name="lordo", local_steps=3),
}
Node = Whole | Island


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ranks_of(node: Node) -> Sequence[RoundOptimizer]:
    return node.ranks if isinstance(node, Island) else [node.optimizer]


def node_of(config: MethodConfig, size: int) -> Node:
    return Whole(config) if size == 1 else Island(config, size)


def train(nodes: Sequence[Node], rounds: range, memory: ReducerMemory) -> list[torch.Tensor]:
    """Rounds of the nodes, each with batches of its own; returns what they sent."""
    sent = []
    for index in rounds:
        first = ranks_of(nodes[0])[0]
        after, steps = first.send_after(index), first.micro_steps(index)
        payloads = []
        for step in range(steps):
            for place, node in enumerate(nodes):
                backward(node.net, 100 * index + 10 * step + place)
                if isinstance(node, Island):
                    node.hand_out()
                node.local_step(index, step)
                if step + 1 == after:
                    payload = node.propose(index)
                    assert payload is not None
                    payloads.append(payload)
        sent += payloads
        result = reduce_payloads(nodes[0].tables.of(index), payloads, round_index=index, memory=memory)
        for node in nodes:
            node.apply(index, None if result is None else result.clone(), True)
    return sent


def shared_of(node: Node) -> dict[str, torch.Tensor]:
    return {
        name: tensor for optimizer in ranks_of(node) for name, tensor in optimizer.shared_tensors().items()
    }


def save_node(node: Node, folder: Path) -> Path:
    optimizers = ranks_of(node)

    def action(ranks: Ranks) -> Path:
        return save(
            folder,
            round_index=SAVED,
            run_name="test",
            run_toml="",
            run_digest="abc",
            shared=optimizers[ranks.rank].shared_tensors(),
            shared_digest=state_digest(shared_of(node)),
            local=optimizers[ranks.rank].local_tensors(),
            ranks=ranks,
        )

    (path,) = set(on_all(len(optimizers), action))
    assert isinstance(path, Path), path
    return path


def load_node(node: Node, path: Path) -> Node:
    optimizers = ranks_of(node)

    def action(ranks: Ranks) -> Meta:
        optimizer = optimizers[ranks.rank]
        optimizer.prepare_load()
        return load(
            path,
            run_digest="abc",
            shared=optimizer.shared_tensors(),
            local=optimizer.local_tensors(),
            loaded=optimizer.loaded,
            ranks=ranks,
        )

    for answer in on_all(len(optimizers), action):
        assert isinstance(answer, Meta), answer
    if isinstance(node, Island):
        node.hand_in()
    return node


@pytest.mark.parametrize("case", CONFIGS)
def test_islands_of_other_sizes_go_on_bit_for_bit(tmp_path: Path, case: str) -> None:
    """Saved by nodes of (2, 2) ranks and resumed as (4, 1): what they send is what it would have been."""
    config, memory = CONFIGS[case], ReducerMemory()
    nodes: list[Node] = [node_of(config, 2), node_of(config, 2)]
    train(nodes, range(SAVED), memory)
    paths = [save_node(node, tmp_path / str(place)) for place, node in enumerate(nodes)]
    kept = memory.arrays()
    expected = train(nodes, range(SAVED, END), memory)

    others = [load_node(node_of(config, size), path) for size, path in zip((4, 1), paths, strict=True)]
    again = ReducerMemory()
    again.load(kept)
    found = train(others, range(SAVED, END), again)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    for one, other in zip(nodes, others, strict=True):
        assert state_digest(one.tensors()) == state_digest(other.tensors())


@pytest.mark.parametrize("case", ["sign-muon", "lordo"])
def test_more_nodes_than_before_stay_in_step(tmp_path: Path, case: str) -> None:
    """Saved by (2, 2), resumed as (4, 1, 1); the third takes a folder that another takes as well."""
    config = CONFIGS[case]
    nodes: list[Node] = [node_of(config, 2), node_of(config, 2)]
    train(nodes, range(SAVED), ReducerMemory())
    paths = [save_node(node, tmp_path / str(place)) for place, node in enumerate(nodes)]
    others: list[Any] = [
        load_node(node_of(config, size), path)
        for size, path in zip((4, 1, 1), (*paths, paths[0]), strict=True)
    ]
    before = state_digest(shared_of(nodes[0]))
    assert {state_digest(shared_of(node)) for node in others} == {before}
    train(others, range(SAVED, END), ReducerMemory())
    (after,) = {state_digest(shared_of(node)) for node in others}
    assert after != before


def test_checkpoint_of_another_method_is_refused_by_all_ranks(tmp_path: Path) -> None:
    path = save_node(node_of(CONFIGS["sign-muon"], 2), tmp_path)
    optimizers = ranks_of(node_of(CONFIGS["muloco-1bit"], 4))

    def action(ranks: Ranks) -> Meta:
        optimizer = optimizers[ranks.rank]
        optimizer.prepare_load()
        shared, local = optimizer.shared_tensors(), optimizer.local_tensors()
        return load(path, run_digest="abc", shared=shared, local=local, ranks=ranks)

    errors = on_all(4, action)
    assert {type(error) for error in errors} == {CheckpointError} and len({*map(str, errors)}) == 1
    assert "tensors of this model, first 'optimizer/" in str(errors[0])
