"""What the coordinator's tests share: a virtual clock, pools, and nodes without a network."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from bench.fuzzing.streams import InlinePool
from coordinator.chunk_store import MemoryChunkStore
from coordinator.events import Event
from coordinator.exchange import Exchange
from coordinator.hub import Hub
from coordinator.journal import Done, MemoryJournal, RoundRecord
from coordinator.nodes import Node
from coordinator.plan import RunPlan
from coordinator.retally import Effort
from coordinator.rounds import Policy
from coordinator.run import Run
from optim.bits import tally
from optim.mean import F32
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import BucketTable, TableSchedule
from tests.coordinator.contribution_rig import (
    Download,
    abstain_frames,
    contribution_frames,
    random_payload,
    schedule,
    voted_table,
)

DEADLINE = 100.0  # seconds of real time; of every wait in these tests, which a loaded machine may need
STATE_BYTES = 3_600_078  # of the made-up shared state: no snapshot is due within many rounds
T = TypeVar("T")
EventT = TypeVar("EventT", bound=Event)


async def soon(awaitable: Awaitable[T]) -> T:
    """Wait, but not for ever."""
    return await asyncio.wait_for(awaitable, DEADLINE)


class VirtualTimer:
    """Time that passes only by :meth:`advance`; alarms ring at exactly their time."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._alarms: list[tuple[float, int, _Alarm]] = []
        self._numbers = itertools.count()

    def now(self) -> float:
        return self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> _Alarm:
        alarm = _Alarm(callback)
        heapq.heappush(self._alarms, (when, next(self._numbers), alarm))
        return alarm

    def advance(self, seconds: float) -> None:
        end = self.time + seconds
        while self._alarms and self._alarms[0][0] <= end:
            when, _, alarm = heapq.heappop(self._alarms)
            if alarm.callback is not None:
                self.time = max(self.time, when)
                alarm.callback()
        self.time = end

    def clear(self) -> None:
        """Whoever waited for an alarm is gone."""
        self._alarms.clear()

    def oversleep(self, seconds: float) -> None:
        """The process does not run for a while: what was due rings late."""
        self.time += seconds
        self.advance(0.0)


class _Alarm:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class HeldPool:
    """Keeps jobs until :meth:`run`."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Callable[[], list[bytes]], Callable[..., None]]] = []

    def submit(self, work: Callable[[], list[bytes]], done: Callable[..., None]) -> Future[list[bytes]]:
        self.jobs.append((work, done))
        return Future()

    def run(self) -> None:
        while self.jobs:
            work, done = self.jobs.pop(0)
            done(work(), None)


def make_plan(**changes: Any) -> RunPlan:
    values: dict[str, Any] = {
        "name": "test",
        "run_file": "[run]\n",
        "run_digest": "run-digest",
        "method": "sign-muon",
        "rounds": 4,
        "nodes": 3,
        "evaluate_every": 0,
        "batch": 4,
        "policy": Policy(deadline=10.0, start_timeout=60.0, quorum=0.6),
        "effort": Effort(lines=0),  # what a test does not ask for is not drawn by lot
    }
    return RunPlan(**{**values, **changes})


def join_request(table: BucketTable | TableSchedule, **changes: Any) -> pb.JoinRequest:
    tables = schedule(table) if isinstance(table, BucketTable) else table
    values: dict[str, Any] = {
        "protocol": wire.PROTOCOL,
        "name": "host",
        "run_digest": "run-digest",
        "table_digest": tables.digest,
        "data_digest": "data",
        "dtype": "float32",
        "state_digest": "s0",
        "round": 0,
        "weight": 1,
        "state_bytes": STATE_BYTES,
    }
    return pb.JoinRequest(**{**values, **changes})


async def drain(exchange: Exchange) -> None:
    """Read an exchange to its end."""
    while await soon(exchange.next_frame()) is not None:
        pass


class HeldJournal(MemoryJournal):
    """A journal whose disk takes its time: rounds are kept at :meth:`write`, or fail with ``error``."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[Callable[[BaseException | None], None]] = []
        self.held = True

    def commit(
        self, record: RoundRecord, payload: Sequence[memoryview], memory: Mapping[str, F32] | None, done: Done
    ) -> None:
        def write(error: BaseException | None) -> None:
            if error is not None:
                done(error)
            else:
                MemoryJournal.commit(self, record, payload, memory, done)

        if self.held:
            self.pending.append(write)
        else:
            write(None)

    def write(self, error: BaseException | None = None) -> None:
        pending, self.pending = self.pending, []
        for write in pending:
            write(error)


class FakeNode:
    """A node that calls the hub directly."""

    def __init__(self, hub: Hub, **changes: Any) -> None:
        self.hub = hub
        self.weight = changes.get("weight", 1)
        self.reply = hub.join(join_request(hub.tables, **changes), "ipv4:127.0.0.1:1")
        self.node: Node = hub.node_of(self.reply.session)
        self.outbox = hub.open_session(self.node)
        self.id = self.node.node

    def again(self, hub: Hub | None = None, **changes: Any) -> FakeNode:
        """The same node in a new session; ``changes`` say what it holds by now."""
        values = {"weight": self.weight, "former": self.reply.session, **changes}
        return FakeNode(hub or self.hub, **values)

    async def order(self) -> pb.CoordinatorMessage | None:
        return await soon(self.outbox.get())

    def idle(self) -> bool:
        """Whether no order waits for it."""
        return not self.outbox._messages

    async def opened(self, round_index: int | None = None) -> pb.RoundOpen:
        message = await self.order()
        assert message is not None and message.WhichOneof("kind") == "round_open", message
        assert round_index is None or message.round_open.round == round_index
        return message.round_open

    async def stopped(self) -> pb.Stop:
        message = await self.order()
        assert message is not None and message.WhichOneof("kind") == "stop", message
        return message.stop

    async def replay(self) -> tuple[pb.Replay, list[Download]]:
        """Carry out a Replay order, but for the Ready."""
        message = await self.order()
        assert message is not None and message.WhichOneof("kind") == "replay", message
        order = message.replay
        request = pb.ResultsRequest(first=order.first, count=order.count)
        downloads = [Download(self.hub.tables.result_nbytes)]
        async for frame in self.hub.results(self.node, request):
            if downloads[-1].commit is not None:
                downloads.append(Download(self.hub.tables.result_nbytes))
            downloads[-1].add(frame)
        return order, downloads

    async def fetch(self, order: pb.RoundOpen) -> Download:
        """Receive the result that a ``result_ready`` order speaks of."""
        assert order.result_ready and not order.lease_count
        return await self.receive(self.feed(*abstain_frames(order, "catching up")))

    def send(self, order: pb.RoundOpen, payload: bytes, **changes: Any) -> Exchange:
        """Deliver a whole contribution."""
        table = self.hub.tables.of(order.round)
        frames = contribution_frames(order, table, payload, **{"weight": self.weight, **changes})
        return self.feed(*frames)

    def abstain(self, order: pb.RoundOpen, reason: str = "loss is nan") -> Exchange:
        return self.feed(*abstain_frames(order, reason))

    def feed(self, *frames: bytes) -> Exchange:
        exchange = self.hub.open_exchange(self.node)
        for frame in frames:
            exchange.feed(frame)
        return exchange

    async def receive(self, exchange: Exchange) -> Download:
        download = Download(self.hub.tables.result_nbytes)
        while (frame := await soon(exchange.next_frame())) is not None:
            download.add(frame)
        exchange.broke()
        assert download.commit is not None
        return download

    def report(self, round_index: int, digest: str, **fields: Any) -> None:
        values: dict[str, Any] = {"round": round_index, "state_digest": digest, "loss": 2.0, "tokens": 8}
        self.hub.message(
            self.node, pb.NodeMessage(report=pb.Report(**{**values, **fields})).SerializeToString()
        )

    def ready(self, round_index: int, digest: str) -> None:
        message = pb.NodeMessage(ready=pb.Ready(round=round_index, state_digest=digest))
        self.hub.message(self.node, message.SerializeToString())

    def heartbeat(self) -> None:
        self.hub.message(self.node, pb.NodeMessage(heartbeat=pb.Heartbeat()).SerializeToString())

    def leave(self, reason: str = "done") -> None:
        self.hub.message(self.node, pb.NodeMessage(leave=pb.Leave(reason=reason)).SerializeToString())

    def die(self) -> None:
        """The process is gone: its streams break."""
        for exchange in list(self.node.exchanges):
            exchange.broke()
        self.hub.close_session(self.node, "its session broke off")


class Site:
    """A hub on a virtual clock, and its nodes."""

    def __init__(
        self,
        nodes: int = 3,
        *,
        present: int | None = None,
        table: BucketTable | None = None,
        journal: MemoryJournal | None = None,
        **plan: Any,
    ) -> None:
        self.timer = VirtualTimer()
        self.table = table or voted_table()
        self.journal = journal or MemoryJournal()
        self.events: list[Event] = []
        self._plan = make_plan(nodes=nodes, **plan)
        self._chunks = MemoryChunkStore()
        self.hub = self._begin()
        self.run = self.hub.run
        self.nodes = [FakeNode(self.hub) for _ in range(nodes if present is None else present)]

    def _begin(self) -> Hub:
        return Hub(
            Run(
                self._plan,
                schedule(self.table),
                timer=self.timer,
                pool=InlinePool(),
                tally=tally,
                journal=self.journal,
                chunks=self._chunks,
                tell=self.events.append,
            )
        )

    def restart(self) -> list[FakeNode]:
        """The coordinator is gone in this moment, and another one goes on with its journal.

        Returns the nodes, none of which is back yet.
        """
        lost, self.nodes = self.nodes, []
        self.timer.clear()
        self.hub = self._begin()
        self.run = self.hub.run
        return lost

    def told(self, kind: type[EventT]) -> list[EventT]:
        """The events of a kind so far."""
        return [event for event in self.events if isinstance(event, kind)]

    def add(self, **changes: Any) -> FakeNode:
        self.nodes.append(FakeNode(self.hub, **changes))
        return self.nodes[-1]

    async def opened(self, nodes: Sequence[FakeNode] | None = None) -> list[pb.RoundOpen]:
        return [await node.opened() for node in (self.nodes if nodes is None else nodes)]

    async def play(self, nodes: Sequence[FakeNode] | None = None, seed: int = 0) -> list[pb.Commit]:
        """One ordinary round of ``nodes``; they agree on a digest."""
        chosen = self.nodes if nodes is None else nodes
        orders = await self.opened(chosen)
        exchanges = [
            node.send(order, random_payload(seed + i, self.table))
            for i, (node, order) in enumerate(zip(chosen, orders, strict=True))
        ]
        commits = []
        for node, order, exchange in zip(chosen, orders, exchanges, strict=True):
            commit = (await node.receive(exchange)).commit
            assert commit is not None
            commits.append(commit)
            node.report(order.round, f"state-{order.round + 1}")
        return commits

    def idle(self, seconds: float, *, silent: Sequence[FakeNode] = ()) -> None:
        """Time passes; everybody but ``silent`` sends heartbeats."""
        while seconds > 0:
            step = min(seconds, 1.0)
            for node in self.nodes:
                if node not in silent and node.node.outbox is not None:
                    node.heartbeat()
            self.timer.advance(step)
            seconds -= step


async def eventually(condition: Callable[[], bool], what: str) -> None:
    """Let the loop run until something has become true."""

    async def watch() -> None:
        while not condition():
            await asyncio.sleep(0.002)

    try:
        await soon(watch())
    except asyncio.TimeoutError:
        raise AssertionError(f"{what} did not happen within {DEADLINE:g} s") from None
