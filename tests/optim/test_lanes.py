"""Ranks that share a model out: together they are, bit for bit, a node of one rank."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from optim.aggregate import ReducerMemory
from optim.local.local_steps import LocalSteps
from optim.methods import MethodConfig, build_method
from optim.reduce import SingleNode, reduce_payloads
from protos.methods import PRESETS
from tests.optim import lane_rig
from tests.optim.lane_rig import Island, Whole

ROUNDS = 3
CASES = {
    **{name: {"name": name} for name in PRESETS},
    "sign-muon, means": {"name": "sign-muon", "embeddings": "mean", "vectors": "mean"},
    "sign-muon, local": {"name": "sign-muon", "local_steps": 4},
    "muloco, fragments": {"name": "muloco", "local_steps": 4, "fragments": 2, "overlap": 1},
    "diloco, low rank": {"name": "diloco", "codec": "lowrank:2+1bit"},
    "local-adamw, torch": {"name": "local-adamw", "optimizer": "torch:Adagrad", "lr": 0.01},
    "lordo, local": {"name": "lordo", "basis": "local", "direction": "muon"},
    "ddp-adamw, clipped": {"name": "ddp-adamw", "clip": 1.5},
}


def config_of(case: str) -> MethodConfig:
    options = dict(CASES[case])
    if options["name"] in ("lordo", "local-adamw", "diloco", "muloco", "muloco-1bit"):
        options.setdefault("local_steps", 3)
    if options["name"] == "lowrank-ddp":
        options["basis_every"] = 2
    return MethodConfig(**options)


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(nodes: list, rounds: int, *, spoil: tuple[int, int, str] | None = None) -> list[torch.Tensor]:
    """Rounds of two nodes with everything that was sent; ``spoil``: round, micro-step and parameter of a
    gradient of the first node that is not finite."""
    memory, sent = ReducerMemory(), []
    for index in range(rounds):
        optimizer = nodes[0].ranks[0] if isinstance(nodes[0], Island) else nodes[0].optimizer
        after, steps = optimizer.send_after(index), optimizer.micro_steps(index)
        payloads: list[torch.Tensor | None] = []
        for step in range(steps):
            for place, node in enumerate(nodes):
                lane_rig.backward(node.net, 100 * index + 10 * step + place)
                if spoil and (index, step, place) == (*spoil[:2], 0):
                    node.net.get_parameter(spoil[2]).grad.fill_(math.inf)
                if isinstance(node, Island):
                    node.hand_out()
                node.local_step(index, step)
                if step + 1 == after:
                    payloads.append(node.propose(index))
        counted = [payload is not None for payload in payloads]
        whole = [payload for payload in payloads if payload is not None]
        sent += [payload if payload is not None else torch.empty(0) for payload in payloads]
        result = reduce_payloads(nodes[0].tables.of(index), whole, round_index=index, memory=memory)
        for node, own in zip(nodes, counted, strict=True):
            node.apply(index, None if result is None else result.clone(), own)
    return sent


def check_same(case: str, size: int, rounds: int = ROUNDS, **options) -> Island:
    config = config_of(case)
    plain, shared = ([kind(config, size) for _ in range(2)] for kind in (Whole, Island))
    expected, found = run(plain, rounds, **options), run(shared, rounds, **options)
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))
    for left, right in zip(plain, shared, strict=True):
        tensors, parts = left.tensors(), right.tensors()
        assert tensors.keys() == parts.keys()
        assert not [name for name in tensors if not torch.equal(tensors[name], parts[name])]
        right.close()
    return shared[0]


@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((case, size) for case in PRESETS for size in (2, 5)),  # the last of five ranks holds nothing
        *((case, 3) for case in CASES if case not in PRESETS),
        *((case, 1) for case in ("sign-muon", "muloco-1bit")),
    ],
)
def test_lanes_together_are_the_contribution_of_one_rank(case: str, size: int) -> None:
    island = check_same(case, size)
    optimizer = island.ranks[0]
    asked = ROUNDS
    if isinstance(optimizer, LocalSteps):
        asked += sum(map(optimizer.micro_steps, range(ROUNDS)))
    assert island.votes.asked == [asked] * size
    assert all(rank.tables == optimizer.tables for rank in island.ranks)


@pytest.mark.parametrize(
    ("case", "step"),
    [
        *((case, 0) for case in ("sign-muon", "ddp-adamw", "lowrank-ddp", "muloco")),
        *((case, 2) for case in ("muloco", "lordo", "muloco-1bit")),
    ],
)
def test_a_gradient_that_is_not_finite_stops_all_ranks(case: str, step: int) -> None:
    check_same(case, 3, spoil=(1, step, "3.weight"))


@pytest.mark.parametrize("case", ["muloco", "lordo", "diloco, low rank"])
def test_a_parameter_that_is_not_finite_costs_all_ranks_the_round(case: str) -> None:
    config = config_of(case)
    island = Island(config, 3)
    for index in range(3):
        for step in range(island.ranks[0].micro_steps(index)):
            lane_rig.backward(island.net, 10 * index + step)
            assert island.local_step(index, step)
        if index == 1:
            for part in island.parts:
                parameter = part.get_parameter("5.weight")
                if not parameter.is_meta:
                    parameter.data[0, 0] = math.nan
        payload = island.propose(index)
        assert (payload is None) == (index == 1)
        result = None
        if payload is not None:
            result = reduce_payloads(island.tables.of(index), [payload], round_index=index)
        island.apply(index, result, counted=payload is not None)
        assert all(bool(p.isfinite().all()) for p in island.net.parameters())
    island.close()


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_kept_of_what_others_hold(case: str) -> None:
    net = lane_rig.model()
    owner = lane_rig.owners(net, 2)
    part = lane_rig.part_of(net, owner, 0)
    optimizer = build_method(config_of(case), part)
    optimizer.prepare_load()
    held = {name for name, rank in owner.items() if rank == 0}
    elsewhere = set(owner) - held
    tensors = {**optimizer.shared_tensors(), **optimizer.local_tensors()}
    assert held <= tensors.keys()
    assert not [name for name in tensors if any(other in name for other in elsewhere)]
    assert not any(tensor.is_meta for tensor in tensors.values())
    assert not [parameter for parameter in optimizer.state if parameter.is_meta]


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_holds_nothing_takes_part(case: str) -> None:
    config = config_of(case)
    with torch.device("meta"):
        net = lane_rig.model()
    optimizer = build_method(config, net)
    assert optimizer.tables == build_method(config, lane_rig.model()).tables
    assert optimizer.lane.nbytes == optimizer.lane.result_nbytes == 0
    nothing = torch.empty(0, dtype=torch.uint8)
    for index in range(2):
        for step in range(optimizer.micro_steps(index)):
            assert optimizer.local_step(index, step)
        assert optimizer.propose(index, nothing)
        result = SingleNode()(nothing, round_index=index, table=optimizer.lane.of(index))
        optimizer.apply(index, result)
    with optimizer.evaluating():
        optimizer.loaded()
    assert not optimizer.shared_tensors() and not optimizer.local_tensors()


@pytest.mark.parametrize("name", ["sign-muon", "ddp-adamw", "lowrank-ddp", "muloco"])
def test_a_bucket_held_in_parts_is_named(name: str) -> None:
    net = copy.deepcopy(lane_rig.model())
    net[2].weight = nn.Parameter(net[2].weight.detach().to("meta"))
    with pytest.raises(ValueError, match=r"\[vectors\]' is held in parts: .* is here, 2.weight is not"):
        build_method(MethodConfig(name=name), net)


@pytest.mark.parametrize("case", CASES)
def test_lanes_reduce_to_the_parts_of_the_result(case: str) -> None:
    """Also where a seed or a residual belongs to a bucket."""
    config = config_of(case)
    nodes = [Island(config, 3), Island(config, 3)]
    whole, lanes = ReducerMemory(), [ReducerMemory() for _ in range(3)]
    for index in range(3):
        payloads = []
        for place, node in enumerate(nodes):
            for step in range(node.ranks[0].micro_steps(index)):
                lane_rig.backward(node.net, 100 * index + 10 * step + place)
                node.hand_out()
                node.local_step(index, step)
            payloads.append(node.propose(index))
        result = reduce_payloads(nodes[0].tables.of(index), payloads, round_index=index, memory=whole)
        expected = nodes[0].lanes(index, result, result=True)
        cut = [
            node.lanes(index, payload, result=False) for node, payload in zip(nodes, payloads, strict=True)
        ]
        for rank, optimizer in enumerate(nodes[0].ranks):
            contributions = [lane[rank] for lane in cut]
            table = optimizer.lane.of(index)
            own = reduce_payloads(table, contributions, round_index=index, memory=lanes[rank])
            assert torch.equal(own, expected[rank])
        for node in nodes:
            node.apply(index, result, counted=True)
    for node in nodes:
        node.close()
