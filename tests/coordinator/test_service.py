"""The coordinator from start to a clean end: stop events, signals, ports."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from typing import Any

import pytest

from coordinator.metrics import MetricsError
from coordinator.plan import RunPlan
from coordinator.service import Outcome, Started, run_coordinator
from protos.address import Address
from protos.listening import ListenError
from protos.runfile import RunFile
from tests.coordinator.contribution_rig import random_payload, schedule, voted_table
from tests.coordinator.coordinator_rig import DEADLINE
from tests.coordinator.server_rig import TOKEN, Client
from tests.coordinator.state_rig import SharedState

LOOPBACK = Address("127.0.0.1", 0)
TABLE = voted_table()


def run_file(nodes: int = 1, rounds: int = 2) -> RunFile:
    return RunFile.parse(
        f"[run]\nnodes = {nodes}\nrounds = {rounds}\n[round]\ndeadline = 5\nstart_timeout = 9\n"
    )


class Running:
    """run_coordinator on a thread."""

    def __init__(self, **options: Any) -> None:
        self.stop = threading.Event()
        self.outcome: Outcome | None = None
        self.run_file = options.pop("run_file", run_file())
        started: queue.Queue[Started] = queue.Queue()
        self.thread = threading.Thread(target=self._run, args=(started, options), daemon=True)
        self.thread.start()
        self.started = started.get(timeout=DEADLINE)
        # What a Client needs of its site.
        self.server = self.started
        self.table = TABLE
        self.state = SharedState.of()

    def _run(self, started: queue.Queue[Started], options: dict[str, Any]) -> None:
        self.outcome = run_coordinator(
            self.run_file,
            schedule(TABLE),
            TOKEN,
            on_started=started.put,
            stop_event=self.stop,
            **{"listen": LOOPBACK, **options},
        )

    def join(self) -> Outcome:
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive() and self.outcome is not None
        return self.outcome


def refused(address: Address) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((address.host, address.port)) != 0


async def take_part(client: Client, running: Running) -> None:
    digest = running.run_file.digest
    await client.join(run_digest=digest)
    for _ in range(running.run_file.run.rounds):
        await client.contribute(await client.opened(), random_payload(0, TABLE))
    await client.ordered("stop")
    await client.leave()


async def test_it_ends_by_itself_when_the_run_is_done_and_the_nodes_have_left() -> None:
    running = Running(metrics_listen=LOOPBACK)
    assert running.started.metrics is not None
    url = f"http://{running.started.metrics}/metrics"
    assert b"atoll_rounds_committed_total 0.0" in await asyncio.to_thread(fetch, url)
    await take_part(Client(running), running)
    outcome = await asyncio.to_thread(running.join)
    assert outcome == Outcome("done", "all 2 rounds are committed", 2)
    assert refused(running.started.address) and refused(running.started.metrics)


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DEADLINE) as reply:
        return bytes(reply.read())


async def test_it_stays_if_asked_to() -> None:
    running = Running(stay=True)
    await take_part(Client(running), running)
    from protos.atoll_pb2 import StatusReply, StatusRequest

    client = Client(running)
    status = await client.unary("GetStatus", StatusRequest(), StatusReply)
    assert (status.phase, [node.state for node in status.nodes]) == ("done", ["left"])
    await client.close()
    assert running.thread.is_alive()
    running.stop.set()
    assert (await asyncio.to_thread(running.join)).phase == "done"


async def test_stopping_tells_the_nodes() -> None:
    running = Running(run_file=run_file(nodes=2))
    client = await Client(running).join(run_digest=running.run_file.digest)
    running.stop.set()
    stop = await client.ordered("stop")
    assert stop.reason == "the coordinator was stopped (it was asked to stop)" and not stop.done
    await client.leave()
    assert (await asyncio.to_thread(running.join)).phase == "failed"


def test_addresses_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ListenError, match="is in use"):
            run_coordinator(run_file(), schedule(TABLE), TOKEN, listen=busy)
        with pytest.raises(MetricsError, match="is in use"):
            run_coordinator(run_file(), schedule(TABLE), TOKEN, listen=LOOPBACK, metrics_listen=busy)


SCRIPT = """
from coordinator.service import run_coordinator
from protos.address import Address
from protos.runfile import RunFile
from tests.coordinator.coordinator_rig import schedule, voted_table
started = lambda where: print(where.address, flush=True)
listen = Address("127.0.0.1", 0)
print(run_coordinator(RunFile(), schedule(voted_table()), "t", listen=listen, on_started=started))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = Address.parse(process.stdout.readline().strip())
            process.send_signal(number)
            output = process.communicate(timeout=DEADLINE)[0]
        finally:
            process.kill()
    assert process.returncode == 0
    assert f"the coordinator was stopped ({number.name})" in output
    assert refused(address)


def test_the_plan_of_a_run_file() -> None:
    file = run_file(nodes=4, rounds=7)
    plan = RunPlan.of(file)
    assert (plan.name, plan.nodes, plan.rounds, plan.batch) == (file.run.name, 4, 7, file.data.batch)
    assert (plan.policy.deadline, plan.policy.start_timeout, plan.policy.quorum) == (5, 9, file.round.quorum)
    assert RunFile.parse(plan.run_file).digest == plan.run_digest == file.digest
