"""Launching and ending whole nodes: devices, signals, metrics."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from node.checkpoint import CheckpointError, find
from node.events import (
    Abstained,
    Event,
    Joined,
    Notice,
    Replayed,
    Resumed,
    RoundDone,
    RoundMissed,
    Saved,
    Started,
    StateSent,
    Stopped,
)
from node.exchange.base import ExchangeError, Order
from node.exchange.connections import Connections
from node.exchange.hub import HubExchange
from node.launch import LaunchError, Options, choose_device, join, train
from node.metrics import NodeMetrics
from node.ranks import Alone
from node.setting import build
from protos.address import Address
from protos.allreduce import ring_bytes
from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.exporting import MetricsServer
from protos.invite import Invite
from protos.runfile import RunFile
from protos.traffic import Traffic
from tests.node.fake_hub import DEADLINE, TOKEN, ExchangeStream, FakeHub
from tests.node.hub_rig import next_message


def small_run(rounds: int) -> RunFile:
    return RunFile.model_validate(
        {
            "run": {"rounds": rounds, "nodes": 1, "evaluate_every": 2, "validation_windows": 3},
            "model": {"d_model": 16, "layers": 1, "heads": 1, "context": 16},
            "data": {"batch": 2},
        }
    )


def tables_of(run: RunFile) -> str:
    """The digest of the tables that the coordinator of ``run`` would announce."""
    return build(run, Options(device="cpu"), lambda event: None, Alone()).optimizer.tables.digest


def test_devices() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(LaunchError, match="'tpu9' is none of auto, cpu, cuda"):
        choose_device("tpu9")
    with pytest.raises(LaunchError, match=r"'cuda:99' is not there: torch .* sees \d+ CUDA devices"):
        choose_device("cuda:99")


# ----------------------------------------------------------------------------------- signals


SIGNALS = pytest.mark.parametrize(
    ("number", "raised", "reason"),
    [
        (signal.SIGINT, KeyboardInterrupt, "interrupted by its user"),
        (signal.SIGTERM, SystemExit, "terminated by SIGTERM"),
    ],
    ids=["ctrl-c", "sigterm"],
)
NUMBERS = (signal.SIGINT, signal.SIGTERM)


@SIGNALS
def test_first_signal_ends_a_local_run_with_a_checkpoint(
    number: int, raised: type[BaseException], reason: str, tmp_path: Path
) -> None:
    events: list[Event] = []

    def listen(event: Event) -> None:
        events.append(event)
        if isinstance(event, RoundDone) and event.round == 1:
            os.kill(os.getpid(), number)

    before = [signal.getsignal(each) for each in NUMBERS]
    with pytest.raises(raised) as caught:
        train(small_run(50), Options(save=tmp_path, device="cpu"), listen)
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 143
    assert [signal.getsignal(each) for each in NUMBERS] == before
    assert [event.round for event in events if isinstance(event, Saved)] == [2]
    assert [event for event in events if isinstance(event, Stopped)] == [Stopped(False, reason)]
    assert find(tmp_path).name == "round-00000002"


@SIGNALS
def test_second_signal_ends_it_at_once_and_saves_nothing(
    number: int, raised: type[BaseException], reason: str, tmp_path: Path
) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, RoundDone):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)

    with pytest.raises(raised):
        train(small_run(50), Options(save=tmp_path, device="cpu"), listen)
    assert not list(tmp_path.iterdir())


@SIGNALS
@pytest.mark.parametrize("at", ["order", "commit"])
def test_signal_in_a_wait_for_the_coordinator_hands_the_lease_back_and_saves(
    number: int,
    raised: type[BaseException],
    reason: str,
    at: str,
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, next_order = threading.Event(), HubExchange.next_order

    def wait(exchange: HubExchange) -> Order:
        waiting.set()
        return next_order(exchange)

    async def hold(stream: ExchangeStream) -> None:
        await stream.upload()
        os.kill(os.getpid(), number)
        await stream.context.read()
        await stream.context.read()

    def act() -> None:
        hub.sessions.get(timeout=DEADLINE)
        if at == "order":
            waiting.wait(DEADLINE)
            os.kill(os.getpid(), number)
        else:
            hub.open_round(0, lease_count=2)

    run = small_run(3)
    hub.run.run_file, hub.run.run_digest = run.to_toml(), run.digest
    hub.run.table_digest = tables_of(run)
    hub.exchange, hub.heartbeat_seconds = hold, 0.1
    monkeypatch.setattr(HubExchange, "next_order", wait)
    thread = threading.Thread(target=act)
    thread.start()
    with pytest.raises(raised):
        join(hub.invite, Options(save=tmp_path, device="cpu"))
    thread.join(DEADLINE)
    assert next_message(hub, "leave").leave.reason == reason
    assert find(tmp_path).name == "round-00000000"
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-network"]


@SIGNALS
def test_signal_before_the_first_wait_takes_leave_with_its_reason(
    number: int, raised: type[BaseException], reason: str, hub: FakeHub
) -> None:
    run = small_run(3)
    hub.run.run_file, hub.run.run_digest = run.to_toml(), run.digest
    hub.run.table_digest = tables_of(run)

    def listen(event: Event) -> None:
        if isinstance(event, Joined):
            os.kill(os.getpid(), number)

    with pytest.raises(raised):
        join(hub.invite, Options(device="cpu"), listen)
    assert next_message(hub, "leave").leave.reason == reason


def test_ctrl_c_while_waiting_for_a_coordinator_leaves_no_thread() -> None:
    said: list[str] = []

    def listen(event: Event) -> None:  # in the network thread, while the main thread waits
        if isinstance(event, Notice):
            said.append(event.text)
            os.kill(os.getpid(), signal.SIGINT)

    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        with pytest.raises(KeyboardInterrupt):
            join(Invite(TOKEN, "127.0.0.1", port), Options(), listen)
    assert said[0].startswith(f"waiting for the coordinator at 127.0.0.1:{port}: nothing listens")
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-network"]


# ------------------------------------------------------------------------------- checkpoints


def test_one_command_line_starts_afresh_and_then_resumes(tmp_path: Path) -> None:
    folder, events = tmp_path / "saves", list[Event]()
    options = Options(save=folder, resume=tmp_path / "x" / ".." / "saves", device="cpu")

    def stop_after_3(event: Event) -> None:
        events.append(event)
        if isinstance(event, RoundDone) and event.round == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(small_run(7), options, stop_after_3)
    assert [event.text for event in events if isinstance(event, Notice)] == [
        f"there is no checkpoint in {folder} yet: this node starts afresh"
    ]
    assert not [event for event in events if isinstance(event, Resumed)]
    assert [event.round for event in events if isinstance(event, Saved)] == [2, 3], "as often as it measures"

    events.clear()
    assert train(small_run(7), options, events.append).done
    (resumed,) = (event for event in events if isinstance(event, Resumed))
    assert (resumed.round, resumed.path.name) == (3, "round-00000003")
    assert next(event.round for event in events if isinstance(event, RoundDone)) == 3


def test_another_folder_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    for missing in (tmp_path / "missing", tmp_path):
        options = Options(save=tmp_path / "saves", resume=missing, device="cpu")
        with pytest.raises(CheckpointError, match="there is no checkpoint in"):
            train(small_run(1), options)
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        train(small_run(1), Options(resume=tmp_path / "missing", device="cpu"))


@pytest.mark.parametrize(
    ("every", "measured", "saved"), [(None, 0, [50, 51]), (0, 2, [51]), (20, 2, [20, 40, 51])]
)
def test_how_often_a_node_saves(every: int | None, measured: int, saved: list[int], tmp_path: Path) -> None:
    events: list[Event] = []
    run = small_run(51)
    run = run.model_copy(update={"run": run.run.model_copy(update={"evaluate_every": measured})})
    train(run, Options(save=tmp_path, save_every=every, device="cpu"), events.append)
    assert [event.round for event in events if isinstance(event, Saved)] == saved


def test_run_file_whose_digest_is_not_the_announced_one_is_refused(hub: FakeHub) -> None:
    run = small_run(3)
    hub.run.run_file, hub.run.run_digest = run.to_toml(), "0" * 64
    with pytest.raises(ExchangeError, match=f"digest {'0' * 64}, read here it is {run.digest}"):
        join(hub.invite, Options())


# ----------------------------------------------------------------------------------- metrics


def done(**changes: Any) -> RoundDone:
    values: dict[str, Any] = {
        "round": 4,
        "rounds": 8,
        "loss": 2.5,
        "tokens": 64,
        "counted": True,
        "voters": ("node-0", "node-1"),
        "agreement": 0.75,
        "reason": "",
        "digest": "d",
        "bytes_up": 1,
        "bytes_down": 2,
        "compute_seconds": 0.5,
        "busy_seconds": 0.75,
        "seconds": {"compute": 0.25, "exchange": 0.125},
    }
    return RoundDone(**{**values, **changes})


def sample(metrics: NodeMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"atoll_node_{name}", labels)


def test_metrics_follow_the_events() -> None:
    metrics = NodeMetrics()
    metrics.observe(done(validation_loss=2.25, bits_per_byte=3.25))
    metrics.observe(Abstained(5, "not finite"))
    metrics.observe(done(round=5, counted=False, tokens=0, loss=float("nan"), agreement=float("nan")))
    metrics.observe(RoundMissed(6, "cut off"))
    metrics.observe(StateSent(6, 100, 1.0))
    metrics.observe(Replayed(6, 3, 100, 1.0))
    assert sample(metrics, "round") == 5
    assert sample(metrics, "loss_nats") == 2.5
    assert sample(metrics, "validation_loss_nats") == 2.25
    assert sample(metrics, "validation_bits_per_byte") == 3.25
    assert sample(metrics, "vote_agreement_ratio") == 0.75
    assert sample(metrics, "voters") == 2
    assert sample(metrics, "tokens_total") == 64
    assert sample(metrics, "phase_seconds_sum", phase="compute") == 0.5
    assert sample(metrics, "phase_seconds_sum", phase="exchange") == 0.25
    assert sample(metrics, "phase_seconds_count", phase="exchange") == 2
    assert sample(metrics, "compute_cpu_seconds_total") == 1.0
    assert sample(metrics, "cpu_seconds_total") == 1.5
    assert sample(metrics, "abstentions_total") == 1
    assert sample(metrics, "uncounted_rounds_total") == 1
    assert sample(metrics, "missed_rounds_total") == 1
    assert sample(metrics, "state_transfers_total", kind="sent") == 1
    assert sample(metrics, "state_transfers_total", kind="replayed") == 1
    assert sample(metrics, "waiting_ratio") == pytest.approx(1 / 3)


def test_metrics_tell_what_is_read_at_each_scrape() -> None:
    metrics, traffic = NodeMetrics(), Traffic()
    connections = Connections("node-3", {"direct": 2, "tunnel": 1}, uplink=125e6)
    metrics.watch(traffic, lambda: connections, lambda: {"gather": (4, 4096)})
    metrics.observe(started := Started("r", "sign-muon", 1000, 128, "cpu", 1, 0, ranks=2))
    traffic.add("coordinator", "sent", "control", 95)
    votes = Bucket.of("w", "majority", [("w", (512,))])
    metrics.lanes_of_others(TableSchedule((BucketTable((votes,)),)))
    metrics.observe(done(bytes_up=400, bytes_down=100, others_up=300, others_down=50, update_norm=0.5))
    metrics.observe(done(bytes_up=900, bytes_down=100, others_up=700, others_down=50))
    link = {"node": "node-3", "peer": "coordinator"}

    def read(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert read("atoll_link_bytes_total", **link, direction="sent", kind="control") == 100
    assert read("atoll_link_bytes_total", **link, direction="sent", kind="vote") == 700
    assert read("atoll_link_bytes_total", **link, direction="received", kind="vote") == 50
    assert sample(metrics, "peers", way="direct") == 2
    assert sample(metrics, "link_capacity_bytes_per_second", direction="sent") == 125e6
    assert sample(metrics, "link_capacity_bytes_per_second", direction="received") is None
    assert read("atoll_island_bytes_total", collective="gather") == 4096
    assert read("atoll_island_transfers_total", collective="gather") == 4
    assert sample(metrics, "ranks") == 2 and sample(metrics, "parameters") == 1000
    assert sample(metrics, "update_norm") == 0.5
    rings = 2 * 2 * ring_bytes(started.parameters, 2)  # two rounds, there and back
    assert sample(metrics, "fp32_allreduce_bytes_total") == rings
    assert sample(metrics, "compression_ratio") == rings / 1000


def test_what_was_never_measured_is_not_zero() -> None:
    metrics = NodeMetrics()
    for name in ("loss_nats", "validation_loss_nats", "validation_bits_per_byte", "vote_agreement_ratio"):
        value = sample(metrics, name)
        assert value is not None and math.isnan(value)


def test_options_that_cannot_work_are_refused_before_the_training(tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(CheckpointError, match=r"checkpoints cannot be saved in .*file"):
        train(small_run(1), Options(save=occupied))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(LaunchError, match=rf"metrics cannot be served on {address}: .*in use; give"):
            train(small_run(1), Options(metrics=address))


def test_metrics_are_served_on_a_free_port_and_the_port_is_free_again() -> None:
    metrics = NodeMetrics()
    metrics.observe(done())
    server = MetricsServer(metrics.registry, Address("127.0.0.1", 0))
    try:
        assert server.address.port > 0
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        assert (
            "atoll_node_loss_nats 2.5" in text
            and 'atoll_node_phase_seconds_sum{phase="compute"} 0.25' in text
        )
    finally:
        server.close()
    socket.create_server(("127.0.0.1", server.address.port)).close()


def test_busy_metrics_port_is_an_error_of_the_system() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        MetricsServer(NodeMetrics().registry, Address("127.0.0.1", taken.getsockname()[1]))
