"""Memory of the ranks of an island: equal to that of the optimizers that the ranks will have."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from deploy.memory import RankBytes, lanes_of, rank_bytes, state_bytes
from node.island.inventory import inventory_of
from node.island.ownership import owners_of
from node.model import build_model, model_on_meta
from optim.methods import build_method
from optim.round_optimizer import RoundOptimizer
from protos.methods import PRESETS
from protos.runfile import RunFile

MODEL = {"d_model": 32, "layers": 3, "heads": 2, "context": 16, "tied": False}
METHODS = [
    *({"name": name} for name in PRESETS),
    {"name": "muloco", "fragments": 4},
    {"name": "muloco-1bit", "embedding_codec": "vote-row", "error_feedback": True},
    {"name": "local-adamw", "codec": "lowrank:2+1bit"},
]
# Keeps what its moments start from, which no checkpoint names.
LOCAL_BASIS = {"name": "lordo", "basis": "local"}
RANKS = (1, 2, 4)
WIDE = 64  # ranks, more than there are buckets: some hold nothing


def _run(method: dict[str, object]) -> RunFile:
    return RunFile.model_validate({"model": MODEL, "method": method})


def _name(method: dict[str, object]) -> str:
    return " ".join(map(str, method.values()))


def _rank(run: RunFile, owners: dict[str, int], rank: int) -> RoundOptimizer:
    """The optimizer of a rank: parameters of the others are on the meta device."""
    model = build_model(run.model, 0)
    for name, parameter in list(model.named_parameters()):
        if owners[name] != rank:
            path, _, attribute = name.rpartition(".")
            elsewhere = nn.Parameter(torch.empty(parameter.shape, device="meta"))
            model.get_submodule(path)._parameters[attribute] = elsewhere
    return build_method(run.method, model)


def _state(optimizer: RoundOptimizer) -> int:
    """Bytes of all tensors but counters and the parameters themselves."""
    optimizer.prepare_load()
    tensors = [*optimizer.shared_tensors().values(), *optimizer.local_tensors().values()]
    found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.ndim}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.pop(parameter.data_ptr(), None)
    return sum(found.values())


@pytest.mark.parametrize("method", METHODS, ids=_name)
def test_lanes_and_state_are_those_of_the_ranks_optimizers(method: dict[str, object]) -> None:
    run = _run(method)
    model = model_on_meta(run.model)
    weights, tables = inventory_of(model), build_method(run.method, model).tables
    owners = owners_of(weights, tables.tables, 4)
    expected = rank_bytes(run.method, model, 4, one_memory=True)
    for rank, (lane, one) in enumerate(zip(lanes_of(tables, owners, 4), expected, strict=True)):
        optimizer = _rank(run, owners, rank)
        assert lane.digest == optimizer.lane.digest
        assert one.contribution == optimizer.lane.nbytes
        assert one.state.device + one.state.host == _state(optimizer)
        held = sum(prod(weight.shape) for weight in weights if owners[weight.name] == rank)
        assert one.weights == one.gradients == 4 * held


def test_the_leader_has_the_whole_of_what_travels_between_nodes() -> None:
    run = _run({"name": "sign-muon"})
    model = model_on_meta(run.model)
    tables = build_method(run.method, model).tables
    by_hub, between = (rank_bytes(run.method, model, 4, between=way) for way in (False, True))
    assert between[1:] == by_hub[1:]
    assert between[0].contribution - by_hub[0].contribution == tables.nbytes
    assert between[0].exchange - by_hub[0].exchange == tables.result_nbytes
    assert rank_bytes(run.method, model, 1, between=True) == rank_bytes(run.method, model, 1)


@pytest.mark.parametrize("method", [*METHODS, LOCAL_BASIS], ids=_name)
def test_ranks_hold_together_what_one_node_holds(method: dict[str, object]) -> None:
    run = _run(method)
    model = model_on_meta(run.model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    roles = [(weight.role, weight.shape) for weight in inventory_of(model)]
    alone = state_bytes(run.method, roles)
    for ranks in (*RANKS, WIDE):
        found = rank_bytes(run.method, model, ranks)
        assert len(found) == ranks
        assert sum(one.weights for one in found) == 4 * parameters
        assert sum(one.state.device for one in found) == alone.device
        assert sum(one.state.host for one in found) == alone.host


def test_a_rank_that_holds_nothing_still_gathers() -> None:
    found = rank_bytes(_run({"name": "muloco"}).method, model_on_meta(_run({"name": "muloco"}).model), WIDE)
    empty = [one for one in found if not one.weights]
    assert empty
    assert all((one.resting, one.step, one.exchange) == (0, 0, 0) for one in empty)
    assert {one.passes for one in found} == {empty[0].peak} and empty[0].peak > 0


def test_what_is_whole_at_a_time_does_not_grow_with_the_depth() -> None:
    def passes(layers: int, ranks: int) -> int:
        run = RunFile.model_validate({"model": {**MODEL, "layers": layers}, "method": {"name": "signum"}})
        return rank_bytes(run.method, model_on_meta(run.model), ranks)[0].passes

    assert passes(8, 4) == passes(3, 4) > 0
    assert passes(3, 1) == 0, "alone, everything is whole anyway"


def test_error_feedback_keeps_a_proposal_until_its_result() -> None:
    def exchange(**method: object) -> RankBytes:
        run = _run({"name": "muloco", **method})
        (alone,) = rank_bytes(run.method, model_on_meta(run.model), 1)
        return alone

    fed, lossy = exchange(), exchange(error_feedback=False)
    kept = fed.weights + fed.contribution
    assert fed.exchange - lossy.exchange == pytest.approx(kept, rel=0.05)  # vectors travel exactly
    assert fed.state.host - lossy.state.host == pytest.approx(fed.weights, rel=0.05)
    assert exchange(fragments=4).exchange < lossy.exchange + kept / 2
