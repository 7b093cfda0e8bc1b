"""Coordinators and nodes of one process, all on loopback, for tests."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from coordinator.service import Outcome, Started, run_coordinator
from node.events import Event, Joined, Notice, Replayed, RoundDone
from node.exchange.hub import HubExchange
from node.exchange.link import Limits
from node.exchange.peers.setting import PeerSetting
from node.exchange.retry import Backoff, Timing
from node.exchange.session import Claim
from node.worker import Summary, Worker
from optim.methods import build_method
from protos.address import Address
from protos.buckets import TableSchedule
from protos.digests import state_digest
from protos.invite import Invite
from protos.runfile import RunFile
from tests.node.tiny import TinyData, TinyModel

TOKEN = "test-token"
DEADLINE = 60.0
LIMITS = Limits(
    wait=DEADLINE, reconnect=DEADLINE, order=DEADLINE, round=DEADLINE, transfer=DEADLINE, leave=2.0
)
TIMING = Timing(backoff=Backoff(first=0.01, cap=0.1))


class Coordinator:
    """The real service in a thread."""

    def __init__(self, run: RunFile, tables: TableSchedule, nodes: int | None = None, **more: Any) -> None:
        self._started: Future[Started] = Future()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.outcome: Future[Outcome] = self._pool.submit(
            run_coordinator,
            run,
            tables,
            TOKEN,
            listen=Address("127.0.0.1", 0),
            on_started=self._started.set_result,
            stop_event=self._stop,
            nodes=nodes,
            **more,
        )
        self.outcome.add_done_callback(self._failed)
        self.invite = Invite(TOKEN, "127.0.0.1", self._started.result(DEADLINE).address.port)

    def _failed(self, outcome: Future[Outcome]) -> None:
        if not self._started.done():
            self._started.set_exception(outcome.exception() or RuntimeError("the coordinator ended at once"))

    def close(self) -> None:
        self._stop.set()
        self.outcome.exception(DEADLINE)
        self._pool.shutdown()


class Fleet:
    """Starts coordinators and nodes, and ends them all."""

    def __init__(self) -> None:
        self._coordinators: list[Coordinator] = []
        self.pool = ThreadPoolExecutor(8)

    def coordinator(
        self, run: RunFile, tables: TableSchedule, nodes: int | None = None, **more: Any
    ) -> Coordinator:
        """``more`` is for :func:`coordinator.service.run_coordinator`."""
        self._coordinators.append(Coordinator(run, tables, nodes, **more))
        return self._coordinators[-1]

    def close(self) -> None:
        for coordinator in self._coordinators:
            coordinator.close()
        self.pool.shutdown()


def tiny_node(
    run: RunFile,
    invite: Invite,
    name: str,
    on_event: Any = lambda event: None,
    data: TinyData | None = None,
    peers: PeerSetting | None = None,
) -> Summary:
    """One tiny node from join to stop, with a model and data that are not the run file's."""
    model, data = TinyModel(), data or TinyData()
    optimizer = build_method(run.method, model)
    exchange = HubExchange(invite, limits=LIMITS, timing=TIMING, say=lambda text: on_event(Notice(text)))
    try:
        exchange.describe()
        claim = Claim(
            name=name,
            run_digest=run.digest,
            table_digest=optimizer.tables.digest,
            data_digest="tiny",
            dtype="float32",
            state_digest=state_digest(optimizer.shared_tensors()),
            round=0,
            weight=1,
            state_bytes=sum(tensor.nbytes for tensor in optimizer.shared_tensors().values()),
        )
        admission = exchange.join(claim, optimizer.tables, None, peers)
        on_event(Joined(admission.node, exchange.address, admission.needs_state))
        return Worker(run, model, data, optimizer, exchange, on_event=on_event).run()
    finally:
        exchange.close(f"{name} is done")


def tiny_tables(run: RunFile) -> TableSchedule:
    return build_method(run.method, TinyModel()).tables


class Log:
    """Events of many nodes; a condition tells when one has come."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = defaultdict(list)
        self._news = threading.Condition()

    def listener(self, name: str) -> Any:
        def listen(event: Event) -> None:
            with self._news:
                self.events[name].append(event)
                self._news.notify_all()

        return listen

    def of(self, name: str, kind: type[Any]) -> list[Any]:
        return [event for event in self.events[name] if isinstance(event, kind)]

    def applied(self, name: str) -> list[int]:
        """The rounds over which a node has stepped, one by one or in replays, in its own order."""
        rounds: list[int] = []
        for event in self.events[name]:
            if isinstance(event, RoundDone):
                rounds.append(event.round)
            elif isinstance(event, Replayed):
                rounds += range(event.first, event.first + event.count)
        return rounds

    def wait(self, name: str, kind: type[Any], count: int = 1) -> None:
        self.wait_for(lambda: len(self.of(name, kind)) >= count)

    def wait_for(self, holds: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(holds, DEADLINE)
