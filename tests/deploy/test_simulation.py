"""The simulation against real nodes and a real coordinator, and what it promises about its records."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from coordinator.service import Started, run_coordinator
from deploy.simulation import RoundRecord, Simulation
from node.data import open_data
from node.events import Event, RoundDone
from node.launch import Options, join
from node.model import model_on_meta
from optim.methods import build_method
from protos.address import Address
from protos.invite import Invite
from protos.runfile import RunFile

DEADLINE = 120.0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run_file(method: dict[str, Any], *, rounds: int, nodes: int, batch: int = 1) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"rounds": rounds, "nodes": nodes, "evaluate_every": 2, "validation_windows": 4},
            "model": {"d_model": 16, "layers": 1, "heads": 2, "context": 16},
            "data": {"batch": batch},
            "round": {"adaptive": False},  # every vote counts on a busy machine too
            "method": method,
        }
    )


def simulated(run: RunFile, **options: Any) -> tuple[list[RoundRecord], list[str]]:
    """Records and digests of all rounds."""
    simulation = Simulation(run, **options)
    records, digests = [], []
    for record in simulation.rounds():
        records.append(record)
        digests.append(simulation.digest())
    return records, digests


def real(run: RunFile) -> dict[int, list[RoundDone]]:
    """The same run by a coordinator and nodes that talk to it over loopback, each in a thread; by round."""
    tables = build_method(run.method, model_on_meta(run.model)).tables
    started: Future[Started] = Future()
    stop = threading.Event()
    rounds: dict[int, list[RoundDone]] = defaultdict(list)

    def listen(event: Event) -> None:
        if isinstance(event, RoundDone):
            rounds[event.round].append(event)

    with ThreadPoolExecutor(1 + run.run.nodes) as pool:
        outcome = pool.submit(
            run_coordinator,
            run,
            tables,
            "token",
            listen=Address("127.0.0.1", 0),
            on_started=started.set_result,
            stop_event=stop,
        )
        try:
            invite = Invite("token", "127.0.0.1", started.result(DEADLINE).address.port)
            nodes = [
                pool.submit(join, invite, Options(name=f"n{index}", threads=1), listen)
                for index in range(run.run.nodes)
            ]
            for node in nodes:
                assert node.result(DEADLINE).done
            assert outcome.result(DEADLINE).phase == "done"
        finally:
            stop.set()
    return rounds


METHODS: dict[str, tuple[dict[str, Any], int, int]] = {  # method, rounds, nodes
    "sign-muon": ({"name": "sign-muon"}, 10, 4),
    "ddp-adamw": ({"name": "ddp-adamw"}, 6, 3),
    "muloco-1bit": ({"name": "muloco-1bit", "local_steps": 3}, 5, 3),
    "lordo": ({"name": "lordo", "local_steps": 3, "rank": 4}, 4, 3),
    "lowrank-ddp": ({"name": "lowrank-ddp", "rank": 4, "basis_every": 3, "omega": 1.0}, 5, 2),
    "late votes": ({"name": "sign-muon", "delay": 1}, 5, 3),
    "late means": ({"name": "lowrank-ddp", "rank": 4, "basis_every": 2, "delay": 1}, 5, 2),
    "streaming": (
        {"name": "muloco", "local_steps": 6, "fragments": 2, "overlap": 1, "codec": "lowrank:2+1bit"},
        4,
        2,
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_losses_and_digests_are_those_of_real_nodes(name: str) -> None:
    method, rounds, nodes = METHODS[name]
    run = run_file(method, rounds=rounds, nodes=nodes)
    records, digests = simulated(run)
    told = real(run)
    assert sorted(told) == list(range(rounds)) and len(set(digests)) == rounds
    for index, (record, digest) in enumerate(zip(records, digests, strict=True)):
        events = told[index]
        assert [event.digest for event in events] == [digest] * nodes, f"round {index}"
        assert record.loss == pytest.approx(sum(event.loss for event in events) / nodes, rel=1e-14)
        (validation,) = {e.validation_loss for e in events if e.validation_loss is not None} or {None}
        assert (record.validation.loss if record.validation else None) == validation
        assert record.counted == (nodes if index or "delay" not in method else 0)
    assert records[-1].tokens == sum(event.tokens for events in told.values() for event in events)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("name", ["sign-muon", "signum", "ddp-muon", "ddp-adamw", "lowrank-ddp"])
def test_one_model_for_all_nodes_changes_nothing(name: str, delay: int) -> None:
    run = run_file({"name": name, "delay": delay}, rounds=4, nodes=3)
    assert simulated(run, share=True) == simulated(run, share=False)


LATE = (5.5416, 5.5263, 5.5428, 5.5064, 5.4928, 5.4886)


def test_losses_of_late_votes_fall_as_they_did() -> None:
    """The first contribution is made of the gradient of round 0, whose samples are leased once more."""
    records, digests = simulated(run_file({"name": "sign-muon", "delay": 1}, rounds=8, nodes=2, batch=4))
    assert [record.counted for record in records] == [0] + [2] * 7
    assert [record.bytes_up for record in records] == [index * records[1].bytes_up for index in range(8)]
    assert digests[0] != digests[1] and records[0].bytes_down == 0
    assert records[0].loss == records[1].loss, "nothing was applied between them"
    assert [record.loss for record in records[2:]] == pytest.approx(LATE, rel=1e-3)


def test_records_add_up() -> None:
    run = run_file({"name": "sign-muon"}, rounds=5, nodes=2, batch=3)
    simulation = Simulation(run)
    table = build_method(run.method, model_on_meta(run.model)).tables.of(0)
    records = list(simulation.rounds())
    assert [record.steps for record in records] == [1, 2, 3, 4, 5]
    assert [record.tokens for record in records] == [2 * 3 * 16 * count for count in (1, 2, 3, 4, 5)]
    assert records[-1].bytes_up == 5 * table.nbytes and records[-1].bytes_down == 5 * table.result_nbytes
    assert [record.validation is not None for record in records] == [False, True, False, True, True]
    assert all(math.isfinite(record.loss) for record in records)
    assert simulation.state_bytes == 4 * simulation.parameters, "sign-muon keeps one momentum"


def test_progress_is_told_of_every_batch_and_can_end_the_run() -> None:
    run = run_file({"name": "sign-muon"}, rounds=4, nodes=2)
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Simulation(run, on_step=count).rounds())
    assert steps == 5


class Reading:
    """The run's data, with a list of what was read."""

    bytes_per_token = 1.0

    def __init__(self, run: RunFile) -> None:
        self._data = open_data(run.data, run.model.context)
        self.read: list[tuple[int, int]] = []

    def batch(self, start: int, count: int, seed: int) -> torch.Tensor:
        self.read.append((start, count))
        return self._data.batch(start, count, seed)

    def validation(self, count: int) -> torch.Tensor:
        return self._data.validation(count)


def test_samples_of_a_node_that_abstains_are_read_again_by_another() -> None:
    run = run_file({"name": "sign-muon"}, rounds=3, nodes=2)
    data = Reading(run)
    simulation = Simulation(run, data=data)
    first = simulation.optimizers[0]
    propose, calls = first.propose, []

    def refuse_once(round_index: int, out: torch.Tensor) -> bool:
        calls.append(round_index)
        return len(calls) > 1 and propose(round_index, out)

    first.propose = refuse_once  # type: ignore[method-assign]
    records = list(simulation.rounds())
    assert [record.counted for record in records] == [1, 2, 2]
    assert data.read == [(0, 1), (1, 1), (0, 1), (2, 1), (3, 1), (4, 1)]
    assert records[-1].tokens == 16 * 5
