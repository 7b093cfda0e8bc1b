"""Every method in a node: resumed runs, replicas, evaluation, and error feedback that is kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import Saving, find, load, load_reducer
from node.events import Event, Joined, RoundDone, Saved, StateLoaded
from node.worker import Summary
from optim.methods import build_method
from protos.digests import state_digest
from protos.ring import RING_ROUNDS
from protos.runfile import RunFile
from tests.node.fleet import DEADLINE, Fleet, Log, tiny_node, tiny_tables
from tests.node.member import Member, errors_of
from tests.node.tiny import BATCH, CONTEXT, Node, TinyData, TinyModel, alone, equal, run_file

# name of the case: method, its settings
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "sign-muon": ("sign-muon", {}),
    "signum": ("signum", {}),
    "ddp-muon": ("ddp-muon", {}),
    "ddp-adamw": ("ddp-adamw", {}),
    "lowrank-ddp": ("lowrank-ddp", {"rank": 2, "basis_every": 3}),
    "sign-muon-4": ("sign-muon", {"local_steps": 4}),
    "lordo": ("lordo", {"local_steps": 3, "rank": 2}),
    "lordo-local": ("lordo", {"local_steps": 3, "rank": 2, "basis": "local"}),
    "lordo-coded-moments": (
        "lordo",
        {"local_steps": 2, "rank": 3, "moments_codec": "int8", "direction": "muon"},
    ),
    "local-adamw": ("local-adamw", {"local_steps": 3, "weight_decay": 0.1}),
    "diloco": ("diloco", {"local_steps": 3}),
    "muloco": ("muloco", {"local_steps": 3}),
    "muloco-1bit": ("muloco-1bit", {"local_steps": 3}),
    "fed-back-votes": ("muloco-1bit", {"local_steps": 2, "error_feedback": True}),
    "low-rank-codec": ("diloco", {"local_steps": 2, "codec": "lowrank:2+int4", "outer": "sgd"}),
    "torch-rmsprop": ("local-adamw", {"local_steps": 2, "optimizer": "torch:RMSprop", "lr": 1e-3}),
    "overlap": ("local-adamw", {"local_steps": 4, "overlap": 2}),
    "streaming": ("muloco", {"local_steps": 6, "fragments": 2, "overlap": 1}),
}
LOCAL = [name for name, (_, own) in METHODS.items() if own.get("local_steps", 1) > 1]
ROUNDS = 7


def run_of(case: str, rounds: int = ROUNDS, **run: Any) -> RunFile:
    method, settings = METHODS[case]
    return run_file(rounds, method, settings, **run)


def state_of(node: Node) -> dict[str, torch.Tensor]:
    """Everything a node is made of: shared and local state, and the live parameters."""
    optimizer = node.optimizer
    state = {f"shared/{name}": tensor for name, tensor in optimizer.shared_tensors().items()}
    state |= {f"local/{name}": tensor for name, tensor in optimizer.local_tensors().items()}
    state |= {f"live/{name}": tensor for name, tensor in node.parameters().items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def resumed_node(run: RunFile, folder: Path, round_index: int) -> Node:
    """A node that starts anew, from a checkpoint."""
    node = Node(run, object(), start=round_index, model=TinyModel(seed=99))
    optimizer, path = node.optimizer, find(folder)
    optimizer.prepare_load()
    meta = load(
        path,
        run_digest=run.digest,
        shared=optimizer.shared_tensors(),
        local=optimizer.local_tensors(),
        loaded=optimizer.loaded,
    )
    assert meta.round == round_index
    exchange = alone(run, optimizer, start=round_index, reducer=load_reducer(path, meta))
    node.worker._exchange = node.worker._lane = exchange
    return node


# ------------------------------------------------------------------------------------------ world size 1


@pytest.mark.parametrize("case", METHODS)
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_run_equals_the_uninterrupted_one(case: str, stop: int, tmp_path: Path) -> None:
    run = run_of(case)
    whole = Node(run)
    whole.run()

    first = Node(run, saving=Saving(tmp_path), rounds=stop)
    assert first.run().round == stop
    assert [event.round for event in first.of(Saved)] == [stop]

    second = resumed_node(run, tmp_path, stop)
    assert equal(state_of(second), state_of(first))
    summary = second.run()
    assert equal(state_of(second), state_of(whole))
    assert summary.digest == whole.of(RoundDone)[-1].digest
    assert [event.loss for event in second.of(RoundDone)] == [event.loss for event in whole.of(RoundDone)][
        stop:
    ]
    assert second.data.read == whole.data.read[-len(second.data.read) :]


@pytest.mark.parametrize("case", [case for case, (_, own) in METHODS.items() if "overlap" not in own])
def test_world_size_1_is_the_plain_torch_loop_with_the_same_optimizer(case: str) -> None:
    run = run_file(ROUNDS, METHODS[case][0], {**METHODS[case][1], "schedule": "constant", "warmup": 0})
    node = Node(run)
    summary = node.run()

    model, data = TinyModel(), TinyData()
    optimizer = build_method(run.method, model)
    for batch in range(sum(map(optimizer.micro_steps, range(ROUNDS)))):
        optimizer.zero_grad()
        model.loss(data.batch(batch * BATCH, BATCH, run.run.seed)).backward()
        optimizer.step()
    assert optimizer.round_index == ROUNDS
    assert equal(node.optimizer.shared_tensors(), optimizer.shared_tensors())
    assert equal(node.optimizer.local_tensors(), optimizer.local_tensors())
    assert summary.digest == state_digest(optimizer.shared_tensors())
    assert node.data.read == data.read


@pytest.mark.parametrize("case", METHODS)
def test_node_splits_its_lease_as_the_run_file_says(case: str) -> None:
    """The coordinator leases by the run file, the node trains by its optimizer."""
    run = run_of(case)
    optimizer = build_method(run.method, TinyModel())
    for round_index in range(4):
        assert optimizer.micro_steps(round_index) == run.method.micro_steps(round_index)
        assert 1 <= optimizer.send_after(round_index) <= optimizer.micro_steps(round_index)


@pytest.mark.parametrize("case", ["streaming", "overlap", "muloco"])
def test_validation_loss_is_that_of_the_shared_state_and_the_own_one_goes_on(case: str) -> None:
    quiet, measured = run_of(case), run_of(case, evaluate_every=1, validation_windows=9)
    node, other = Node(measured), Node(quiet)
    summary = node.run()
    other.run()
    assert equal(state_of(node), state_of(other)), "measuring changes nothing"
    shared = TinyModel()
    with torch.no_grad():
        for name, parameter in shared.named_parameters():
            parameter.copy_(node.optimizer.shared_tensors()[name])
        assert summary.validation_loss == pytest.approx(
            float(shared.loss(TinyData().validation(9))), rel=1e-6
        )
    live = equal(node.parameters(), {name: p.detach() for name, p in shared.named_parameters()})
    assert live == (case == "muloco"), "with fragments or a mix the live parameters are the node's own"


# ------------------------------------------------------------------------------------- several replicas


@pytest.mark.parametrize("case", [*LOCAL, "lowrank-ddp"])
def test_replicas_hold_the_same_bits_after_every_round(fleet: Fleet, case: str) -> None:
    nodes, rounds = 3, 6
    run = run_of(case, rounds, nodes=nodes, evaluate_every=2)
    coordinator = fleet.coordinator(run, tiny_tables(run))
    log = Log()
    names = [f"n{index}" for index in range(nodes)]
    futures = [
        fleet.pool.submit(tiny_node, run, coordinator.invite, name, log.listener(name)) for name in names
    ]
    summaries = [future.result(DEADLINE) for future in futures]
    done = [log.of(name, RoundDone) for name in names]
    for events in zip(*done, strict=True):
        assert len({event.digest for event in events}) == 1, events[0].round
        assert all(event.counted and len(event.voters) == nodes for event in events)
        assert len({event.loss for event in events}) == nodes, "everybody read other samples"
        steps = run.method.micro_steps(events[0].round)
        assert all((e.micro_steps, e.tokens) == (steps, steps * BATCH * CONTEXT) for e in events)
    assert len({event.digest for event in done[0]}) == rounds, "the state changes in every round"
    assert all(summary.done and summary.trained == rounds for summary in summaries)
    assert len({event.validation_loss for event in done[0] + done[1] + done[2]}) > rounds // 2


@pytest.mark.parametrize(("away", "loads"), [(4, False), (RING_ROUNDS + 4, True)])
@pytest.mark.parametrize("case", ["muloco", "lordo", "streaming"])
def test_node_that_comes_back_from_its_checkpoint_keeps_its_error_feedback(
    fleet: Fleet, tmp_path: Path, case: str, away: int, loads: bool
) -> None:
    last = 8
    rounds = last + away + 200
    run = run_of(case, rounds, nodes=2)
    invite = fleet.coordinator(run, tiny_tables(run)).invite
    log = Log()
    steady = log.listener("steady")

    def hold(event: Event) -> None:
        steady(event)
        if isinstance(event, RoundDone) and event.round == last + away:
            log.wait("back", Joined)

    def others() -> Summary:
        return Member(run, invite, "steady", tmp_path / "steady").train(hold)

    staying = fleet.pool.submit(others)
    leaver = Member(run, invite, "leaver", tmp_path / "leaver")
    assert leaver.train(log.listener("leaver"), last=last).round == last + 1
    errors = errors_of(leaver.optimizer.local_tensors())
    assert any(tensor.any() for tensor in errors.values())

    log.wait_for(lambda: len(log.of("steady", RoundDone)) > last + away)
    back = Member(run, invite, "back", tmp_path / "leaver", resume=True)
    assert equal(errors, errors_of(back.optimizer.local_tensors()))
    assert back.train(log.listener("back")).done and staying.result(DEADLINE).done
    assert equal(errors, back.exchange.errors), "the shared state has moved on, the errors are the node's own"
    loaded = log.of("back", StateLoaded)
    assert loaded or not loads
    # a steady node that is faster than expected makes a snapshot the cheaper way
    assert log.applied("back")[0] == (loaded[-1].round if loaded else last + 1)
    digests = {event.round: event.digest for event in log.of("steady", RoundDone)}
    theirs = log.of("back", RoundDone)
    assert theirs[-1].round == rounds - 1 and all(event.digest == digests[event.round] for event in theirs)
    counted = [event.round for event in theirs if event.counted]
    assert len(counted) > 3 and math.isfinite(theirs[-1].loss)
