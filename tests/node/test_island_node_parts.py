"""What makes several ranks one node, piece by piece: owners, parts of batches, agreement on a round."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.batches import parts_of
from node.clocks import Stopwatch
from node.evaluation import Evaluator
from node.exchange.base import ExchangeError, RoundResult
from node.exchange.tensor_bytes import LayoutError
from node.exchange.trouble import RoundLost
from node.island.held import held
from node.island.inventory import inventory_of
from node.island.ownership import owners_of, plan_of
from node.island.rounds import shard, tell_arrivals
from node.joint import Figures, LaneEnd, add_up, settle, settled
from node.model import LlamaShape, build_model, model_on_meta
from node.ranks import Alone, Ranks
from node.state import SharedState
from node.whole_state import WholeState
from optim.methods import MethodConfig, build_method
from protos.digests import state_digest
from tests.node.tiny import TinyData, TinyModel
from tests.node.virtual_ranks import on_all

SHAPE = LlamaShape(d_model=32, layers=4, heads=2, context=8)
METHODS: dict[str, dict[str, Any]] = {
    "sign-muon": {},
    "ddp-adamw": {},
    "muloco": {"local_steps": 4, "fragments": 2},
    "muloco-1bit": {"local_steps": 4},
    "lordo": {"local_steps": 4},
    "lowrank-ddp": {},
}


# -------------------------------------------------------------------------------------------------- owners


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("method", METHODS)
def test_every_bucket_has_one_owner_and_the_ranks_are_level(method: str, ranks: int) -> None:
    model = model_on_meta(SHAPE)
    tables = build_method(MethodConfig(name=method, **METHODS[method]), model).tables.tables
    weights = inventory_of(model)
    owners = owners_of(weights, tables, ranks)
    assert owners.keys() == {name for name, _ in model.named_parameters()}
    for table in tables:
        for bucket in table.buckets:
            assert len({owners[member.name] for member in bucket.members if member.name in owners}) <= 1
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    loads = [sum(sizes[name] for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    largest = max(sizes.values())
    assert max(loads) <= sum(loads) / ranks + largest
    assert owners == owners_of(weights, tables, ranks)
    plan = plan_of(weights, owners, ranks)
    for name, owner in owners.items():
        _, layout, index = plan.find(name)
        assert layout.owner(index) == owner


def test_frozen_parameters_have_an_owner_too() -> None:
    model = model_on_meta(SHAPE)
    frozen = dict(model.named_parameters())["layers.1.attention.q.weight"]
    frozen.requires_grad_(False)
    tables = build_method(MethodConfig(name="sign-muon"), model).tables.tables
    weights = inventory_of(model)
    plan = plan_of(weights, owners_of(weights, tables, 3), 3)
    group, layout, _ = plan.find("layers.1.attention.q.weight")
    assert len(layout.tensors) == 1 and group != plan.find("layers.1.attention.k.weight")[0]


def test_a_method_built_on_a_sharded_model_is_that_of_the_whole_one() -> None:
    whole = build_model(SHAPE, 5)
    expected = build_method(MethodConfig(name="sign-muon"), whole)
    model = build_model(SHAPE, 5)
    loss = shard(model, expected.tables.tables, 1)
    with held(loss):
        optimizer = build_method(MethodConfig(name="sign-muon"), model)
    assert optimizer.tables.digest == optimizer.lane.digest == expected.tables.digest
    assert state_digest(optimizer.shared_tensors()) == state_digest(expected.shared_tensors())
    arrived: list[torch.Tensor] = []
    tell_arrivals(loss, arrived.append)
    tokens = torch.arange(18).view(2, 9)
    loss.loss(tokens).backward()
    whole.loss(tokens).backward()
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert {id(parameter) for parameter in arrived} == {id(parameter) for parameter in trained}
    gradients = dict(whole.named_parameters())
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert torch.equal(parameter.grad, gradients[name].grad)


# ------------------------------------------------------------------------------------------------- batches


@given(
    start=st.integers(0, 99), count=st.integers(1, 40), ranks=st.integers(1, 6), accumulate=st.integers(1, 6)
)
def test_ranks_read_disjoint_parts_in_equally_many_passes(
    start: int, count: int, ranks: int, accumulate: int
) -> None:
    parts = [parts_of(start, count, rank=rank, ranks=ranks, accumulate=accumulate) for rank in range(ranks)]
    assert len({len(own) for own in parts}) == 1 and 1 <= len(parts[0]) <= accumulate
    read = [
        index
        for own in parts
        for part in own
        if part.share
        for index in range(part.start, part.start + part.samples)
    ]
    assert read == list(range(start, start + count))
    assert sum(part.share for own in parts for part in own) == pytest.approx(1.0)
    for part in (part for own in parts for part in own):
        assert part.share == pytest.approx(part.samples / count) or (part.samples, part.share) == (1, 0.0)


# ----------------------------------------------------------------------------------------- the end of a round


def ended(**changes: Any) -> LaneEnd:
    return LaneEnd(**{"counted": True, "voters": ("a", "b"), **changes})


def test_a_round_ends_in_the_same_way_on_all_lanes() -> None:
    assert settle(3, [ended(), ended()])
    assert not settle(3, [ended(counted=False), ended(counted=False)])
    with pytest.raises(RoundLost, match="the lane of rank 1: cut off"):
        settle(3, [ended(), LaneEnd(lost="cut off")])
    with pytest.raises(ExchangeError, match="the lane of rank 2: gone") as failure:
        settle(3, [ended(), LaneEnd(lost="cut off"), LaneEnd(failed="gone")])
    assert not isinstance(failure.value, RoundLost)
    with pytest.raises(ExchangeError, match=r"round 4 has other voters .*rank 0: a, b; rank 1: nobody"):
        settle(3, [ended(), ended(voters=())])


def test_a_lost_lane_is_lost_on_every_rank() -> None:
    result = RoundResult(3, None, ("a",), (1,), True, 1.0, "")

    def end(ranks: Ranks) -> bool:
        return settled(ranks, 3, RoundLost("cut off") if ranks.rank == 1 else result)

    outcomes = on_all(3, end)
    assert all(isinstance(outcome, RoundLost) for outcome in outcomes)
    assert on_all(2, lambda ranks: settled(ranks, 3, result)) == [True, True]
    with pytest.raises(RoundLost, match=r"^cut off$"):
        settled(Alone(), 3, RoundLost("cut off"))


def test_figures_add_up_and_losses_are_weighted_by_tokens() -> None:
    parts = [
        Figures({"a": "1"}, 2.0, 30, 0.5, 1.0, 10, 20, 0.25),
        Figures({"b": "2"}, 4.0, 10, 0.25, 0.5, 1, 2, 0.5),
        Figures({}, math.nan, 0, 0.125, 0.25, 0, 0, 0.0),
    ]
    whole = add_up(parts)
    assert whole == Figures({"a": "1", "b": "2"}, 2.5, 40, 0.875, 1.75, 11, 22, 0.75, 1, 2)
    assert add_up([*parts[:2], replace(parts[2], change=None)]).change is None
    assert math.isnan(add_up(parts[2:]).loss)
    with pytest.raises(ExchangeError, match="two ranks of this node hold 'a'"):
        add_up([parts[0], parts[0]])


def test_the_digest_of_a_node_does_not_depend_on_who_holds_what() -> None:
    tensors = {f"t{index}": torch.full((index + 1,), float(index)) for index in range(6)}

    def described(ranks: Ranks) -> tuple[str, int, str]:
        held = {name: tensors[name] for name in sorted(tensors)[ranks.rank :: 3]} if ranks.rank < 3 else {}
        whole = WholeState(SharedState(held), ranks)
        return whole.digest(), whole.nbytes, whole.dtype

    expected = state_digest(tensors), 4 * 21, "float32"
    assert on_all(4, described) == [expected] * 4
    with pytest.raises(LayoutError, match="two ranks of this node hold 't0'"):
        on_all(2, lambda ranks: WholeState(SharedState(tensors), ranks).digest())


@pytest.mark.parametrize("windows", [1, 33, 100])
def test_the_validation_loss_does_not_depend_on_the_number_of_ranks(windows: int) -> None:
    def measure(ranks: Ranks) -> float:
        return Evaluator(TinyModel(), TinyData(), windows, torch.device("cpu"), ranks).measure().loss

    assert {*on_all(3, measure), *on_all(2, measure)} == {measure(Alone())}


def test_a_phase_within_another_counts_there_alone() -> None:
    ticks = iter([0.0, 1.0, 4.0, 10.0, 20.0, 21.0])
    watch = Stopwatch(lambda: next(ticks))
    with watch.phase("compute"), watch.phase("propose"):
        pass
    with watch.phase("compute"):
        pass
    assert watch.seconds == {"propose": 3.0, "compute": 10.0 - 3.0 + 1.0}
