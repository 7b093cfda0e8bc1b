"""Hub exchanges and whole nodes against the real coordinator, all on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from node.events import Event, Joined, Notice, Replayed, RoundDone, StateLoaded, Stopped
from node.exchange.base import ExchangeError, RoundOrder
from node.exchange.hub import HubExchange
from node.exchange.session import Claim
from node.launch import Options, join, train
from node.model import model_on_meta
from node.worker import Summary, Worker
from optim.methods import build_method
from protos.address import Address
from protos.buckets import TableSchedule
from protos.digests import state_digest
from protos.invite import Invite
from protos.ring import RING_ROUNDS
from protos.runfile import RunFile
from tests.node.fleet import DEADLINE, LIMITS, TIMING, TOKEN, Fleet, Log, tiny_node, tiny_tables
from tests.node.relay import Relay
from tests.node.tiny import TinyData, TinyModel, alone, run_file


@pytest.mark.parametrize(("nodes", "method"), [(3, "sign-muon"), (4, "sign-muon"), (3, "ddp-adamw")])
def test_nodes_agree_on_every_bit_in_every_round(fleet: Fleet, nodes: int, method: str) -> None:
    rounds = 20
    run = run_file(rounds, method, nodes=nodes, evaluate_every=5)
    coordinator = fleet.coordinator(run, tiny_tables(run))
    log = Log()
    names = [f"n{index}" for index in range(nodes)]
    futures = [
        fleet.pool.submit(tiny_node, run, coordinator.invite, name, log.listener(name)) for name in names
    ]
    summaries = [future.result(DEADLINE) for future in futures]

    done = [log.of(name, RoundDone) for name in names]
    for events in zip(*done, strict=True):
        assert len({event.digest for event in events}) == 1
        assert len({event.voters for event in events}) == 1 and len(events[0].voters) == nodes
        assert all(event.counted for event in events)
        assert sum(event.validation_loss is not None for event in events) == (
            1 if events[0].round % 5 == 4 else 0
        )
    assert len(done[0]) == rounds and len({event.digest for event in done[0]}) == rounds
    assert (
        len({event.loss for event in (events[0] for events in done)}) == nodes
    )  # everybody read other samples
    assert all(summary.done and summary.trained == rounds for summary in summaries)
    assert len({summary.digest for summary in summaries}) == 1
    outcome = coordinator.outcome.result(DEADLINE)
    assert (outcome.phase, outcome.round) == ("done", rounds)


class SameData(TinyData):
    """The n-th batch is the same on every node, whatever was leased to it."""

    def batch(self, start: int, count: int, seed: int) -> torch.Tensor:
        return super().batch(len(self.read) * count, count, seed)


@pytest.mark.parametrize("nodes", [1, 3, 4])
def test_nodes_with_identical_batches_equal_one_without_a_network(fleet: Fleet, nodes: int) -> None:
    rounds = 8
    run = run_file(rounds, nodes=nodes)
    coordinator = fleet.coordinator(run, tiny_tables(run))
    log = Log()
    names = [f"n{index}" for index in range(nodes)]
    futures = [
        fleet.pool.submit(tiny_node, run, coordinator.invite, name, log.listener(name), SameData())
        for name in names
    ]
    for future in futures:
        future.result(DEADLINE)

    model = TinyModel()
    optimizer = build_method(run.method, model)
    Worker(run, model, SameData(), optimizer, alone(run, optimizer), on_event=log.listener("local")).run()
    expected = [event.digest for event in log.of("local", RoundDone)]
    assert len(set(expected)) == rounds
    for name in names:
        assert [event.digest for event in log.of(name, RoundDone)] == expected


def test_newcomer_catches_up_in_mid_run_and_stays_identical(fleet: Fleet) -> None:
    run = run_file(80, nodes=2)
    coordinator = fleet.coordinator(run, tiny_tables(run))
    log = Log()
    listen = log.listener("a")

    def hold(event: Event) -> None:
        listen(event)
        if isinstance(event, RoundDone) and event.round == 10:
            log.wait("late", Joined)

    futures = [
        fleet.pool.submit(tiny_node, run, coordinator.invite, name, listener)
        for name, listener in (("a", hold), ("b", log.listener("b")))
    ]
    log.wait("a", RoundDone, 5)
    futures.append(fleet.pool.submit(tiny_node, run, coordinator.invite, "late", log.listener("late")))
    summaries = [future.result(DEADLINE) for future in futures]
    assert log.of("late", Replayed)[0].first == 0, "its own initial state is that before round 0"
    assert not log.of("late", StateLoaded) and log.applied("late") == [*range(80)]
    digests = {event.round: event.digest for event in log.of("a", RoundDone)}
    theirs = log.of("late", RoundDone)
    assert all(event.digest == digests[event.round] for event in theirs)
    name = log.of("late", Joined)[0].node
    counted = [event.counted for event in theirs]
    assert counted == [name in event.voters for event in theirs] and any(counted)
    assert len({summary.digest for summary in summaries}) == 1


def test_node_that_was_cut_off_replays_results_or_loads_the_state(fleet: Fleet) -> None:
    run = run_file(120, nodes=2)
    coordinator = fleet.coordinator(run, tiny_tables(run))
    log = Log()
    relay = Relay(coordinator.invite.port)
    listen, listen_steady = log.listener("cut"), log.listener("steady")

    def rejoins() -> int:
        return sum("again, as node-" in event.text for event in log.of("cut", Notice))

    def cut(event: Event) -> None:
        listen(event)
        if isinstance(event, RoundDone) and event.round in (10, 40):
            relay.cut()

    def steady(event: Event) -> None:
        listen_steady(event)
        if isinstance(event, RoundDone) and event.round == 20:  # fewer rounds later than results are kept
            relay.restore()
            log.wait_for(lambda: rejoins() == 1)
        if isinstance(event, RoundDone) and event.round == 30:  # no replay is to step over round 40
            log.wait_for(lambda: log.applied("cut")[-1] >= 28)
        if isinstance(event, RoundDone) and event.round == 40 + 2 * RING_ROUNDS:
            relay.restore()
            log.wait_for(lambda: rejoins() == 2)

    try:
        futures = [
            fleet.pool.submit(tiny_node, run, coordinator.invite, "steady", steady),
            fleet.pool.submit(tiny_node, run, Invite(TOKEN, "127.0.0.1", relay.port), "cut", cut),
        ]
        summaries = [future.result(DEADLINE) for future in futures]
    finally:
        relay.close()
    (loaded,) = log.of("cut", StateLoaded)
    assert loaded.round > 40 + 2 * RING_ROUNDS
    assert log.applied("cut") == [*range(41), *range(loaded.round, 120)]
    digests = {event.round: event.digest for event in log.of("steady", RoundDone)}
    assert all(event.digest == digests[event.round] for event in log.of("cut", RoundDone))
    assert all(summary.done for summary in summaries)
    counted = {event.round for event in log.of("cut", RoundDone) if event.counted}
    for event in log.of("steady", RoundDone):
        assert (len(event.voters) == 2) == (event.round in counted), event.round


def test_node_that_leaves_does_not_stop_the_others(fleet: Fleet) -> None:
    run = run_file(30, nodes=3)
    coordinator = fleet.coordinator(run, tiny_tables(run))
    log = Log()

    def leaver() -> Summary:
        worker: list[Worker] = []
        model = TinyModel()
        optimizer = build_method(run.method, model)
        exchange = HubExchange(coordinator.invite, limits=LIMITS, timing=TIMING)

        def listen(event: Event) -> None:
            log.listener("leaver")(event)
            if isinstance(event, RoundDone) and event.round == 9:
                worker[0].interrupt()

        claim = Claim(
            "leaver",
            run.digest,
            optimizer.tables.digest,
            "tiny",
            "float32",
            state_digest(optimizer.shared_tensors()),
            0,
            1,
            state_bytes=sum(tensor.nbytes for tensor in optimizer.shared_tensors().values()),
        )
        exchange.join(claim, optimizer.tables)
        worker.append(Worker(run, model, TinyData(), optimizer, exchange, on_event=listen))
        try:
            return worker[0].run()
        finally:
            exchange.close("interrupted by its user")

    futures = [
        fleet.pool.submit(tiny_node, run, coordinator.invite, name, log.listener(name)) for name in ("a", "b")
    ]
    leaving = fleet.pool.submit(leaver)
    assert not leaving.result(DEADLINE).done
    assert all(future.result(DEADLINE).done for future in futures)
    voters = [len(event.voters) for event in log.of("a", RoundDone)]
    assert voters[:10] == [3] * 10 and voters[11:] == [2] * 19
    assert [e.digest for e in log.of("a", RoundDone)] == [e.digest for e in log.of("b", RoundDone)]


# --------------------------------------------------------------------------------- whole nodes


def small_run(**sections: Any) -> RunFile:
    run = {"rounds": 4, "nodes": 2, "evaluate_every": 2, "validation_windows": 4, **sections.get("run", {})}
    return RunFile.model_validate(
        {
            "run": run,
            "model": {"d_model": 16, "layers": 1, "heads": 1, "context": 16, **sections.get("model", {})},
            "data": {"batch": 2},
            "method": sections.get("method", {}),
        }
    )


def small_tables(run: RunFile) -> TableSchedule:
    return build_method(run.method, model_on_meta(run.model)).tables


def test_join_builds_the_node_from_the_run_file_and_trains(fleet: Fleet, tmp_path: Path) -> None:
    run = small_run()
    coordinator = fleet.coordinator(run, small_tables(run))
    log = Log()
    futures = [
        fleet.pool.submit(
            join,
            coordinator.invite,
            Options(name=name, save=tmp_path / name, metrics=Address("127.0.0.1", 0), wait=DEADLINE),
            log.listener(name),
        )
        for name in ("a", "b")
    ]
    summaries = [future.result(DEADLINE) for future in futures]
    assert len({summary.digest for summary in summaries}) == 1
    assert all(summary.done and summary.round == 4 for summary in summaries)
    nbytes = small_tables(run).nbytes
    assert all(nbytes * 4 < summary.bytes_up < nbytes * 4 + 4000 for summary in summaries)
    assert sorted(log.of(name, Joined)[0].node for name in ("a", "b")) == ["node-0", "node-1"]
    assert "metrics are served at http://127.0.0.1:" in log.of("a", Notice)[0].text
    assert log.of("a", Stopped)[0].done
    assert (tmp_path / "a" / "round-00000004" / "model.safetensors").is_file()


def test_node_that_lays_the_model_out_differently_is_told_both_digests(fleet: Fleet) -> None:
    run = small_run()
    other = small_tables(small_run(model={"layers": 2}))
    coordinator = fleet.coordinator(run, other)
    with pytest.raises(ExchangeError) as caught:
        join(coordinator.invite, Options(wait=DEADLINE))
    assert other.digest in str(caught.value) and small_tables(run).digest in str(caught.value)


def test_node_with_other_data_is_refused_with_both_digests(fleet: Fleet, tmp_path: Path) -> None:
    run = small_run()
    coordinator = fleet.coordinator(run, small_tables(run))
    text = tmp_path / "other.txt"
    text.write_text("another text " * 500)
    log = Log()
    first = fleet.pool.submit(join, coordinator.invite, Options(name="a", wait=DEADLINE), log.listener("a"))
    log.wait("a", Joined)
    with pytest.raises(
        ExchangeError, match=r"the data of this node is [0-9a-f]{64}, this run's is [0-9a-f]{64}"
    ):
        join(coordinator.invite, Options(name="b", data=str(text), wait=DEADLINE))
    coordinator.close()
    assert not first.result(DEADLINE).done


@pytest.mark.parametrize(
    "method",
    [
        {},
        {"name": "lordo", "local_steps": 2, "rank": 2},
        {"name": "muloco", "local_steps": 4, "fragments": 2, "overlap": 1},
    ],
    ids=["sign-muon", "lordo", "streaming"],
)
def test_train_alone_saves_and_resumes_to_the_same_bits(method: dict[str, Any], tmp_path: Path) -> None:
    run = small_run(run={"rounds": 6}, method=method)
    log = Log()
    whole = train(run, Options(save=tmp_path, save_every=2, device="cpu"), log.listener("whole"))
    digests = {event.round: event.digest for event in log.of("whole", RoundDone)}
    assert (whole.done, whole.trained, whole.bytes_up) == (True, 6, 0)
    again = train(run, Options(resume=tmp_path / "round-00000004"), log.listener("again"))
    resumed = log.of("again", RoundDone)
    assert [event.round for event in resumed] == [4, 5]
    assert all(event.digest == digests[event.round] for event in resumed)
    assert again.digest == whole.digest


def test_hub_result_buffer_is_used_again(fleet: Fleet) -> None:
    run = run_file(3, nodes=1)
    tables = tiny_tables(run)
    coordinator = fleet.coordinator(run, tables)
    exchange = HubExchange(coordinator.invite, limits=LIMITS, timing=TIMING)
    try:
        claim = Claim("n", run.digest, tables.digest, "tiny", "float32", "state", 0, 1, state_bytes=1000)
        exchange.join(claim, tables)
        addresses = set()
        for _ in range(3):
            order = exchange.next_order()
            assert isinstance(order, RoundOrder)
            result = exchange.reduce(order, torch.zeros(tables.nbytes, dtype=torch.uint8))
            assert result.payload is not None
            addresses.add(result.payload.data_ptr())
        assert len(addresses) == 1
    finally:
        exchange.close("done")
