"""What the dashboard's tests share: a run of made-up nodes on a loop of its own, with a dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from coordinator.access import Access, Fixed
from coordinator.dashboard.recorder import Recorder
from coordinator.dashboard.server import DashboardServer
from coordinator.dashboard.snapshot import NodeView, Snapshot
from coordinator.events import ignore
from coordinator.hub import Hub
from coordinator.run import Run
from coordinator.timer import LoopTimer
from coordinator.tokens import TokenBook
from deploy.event_words import sentence
from optim.bits import tally
from protos.address import Address
from tests.coordinator.contribution_rig import random_payload, schedule, voted_table
from tests.coordinator.coordinator_rig import DEADLINE, FakeNode, InlinePool, make_plan

TOKEN = "a-token-of-the-administrator"
ACCESS = Access(Fixed(TokenBook().added("admin", "admin", TOKEN, now=0.0)))
STRANGER = '<img src=x onerror="window.__pwned=1">'
T = TypeVar("T")


def node_view(index: int = 0, **changes: Any) -> NodeView:
    """A node that is well."""
    view = NodeView(
        node=f"node-{index}",
        name=f"host-{index}",
        host="192.0.2.7:5000",
        state="active",
        seat="complete",
        ranks=1,
        weight=1,
        trained=7,
        lag=0,
        loss=2.5,
        agreement=0.75,
        missed=0,
        abstained=0,
        compute_share=0.5,
        bytes_up=1000,
        bytes_down=2000,
        rate_up=100.0,
        rate_down=200.0,
        reduces=0.0,
        way="coordinator",
        seen=0.5,
        reason="",
    )
    return replace(view, **changes)


def snapshot(**changes: Any) -> Snapshot:
    """A run in training."""
    view = Snapshot(
        at=1_700_000_000.0,
        seconds=60.0,
        run="reef",
        method="sign-muon",
        phase="training",
        reason="round 8: waiting for node-1",
        paused="",
        round=7,
        rounds=20,
        epoch=1,
        transport="hub",
        ways="",
        parameters=1000,
        payload_bytes=125,
        result_bytes=125,
        loss=2.5,
        validation_loss=math.nan,
        bits_per_byte=math.nan,
        agreement=0.75,
        pace=2.0,
        bytes_in=10_000,
        bytes_out=20_000,
        rate_in=300.0,
        rate_out=600.0,
        members=2,
        nodes=(node_view(0), node_view(1)),
        links=(),
        timeline=(),
        curve=(),
        events=(),
        counters=(),
        expelled=(),
    )
    return replace(view, **changes)


class Stage:
    """A run on an event loop in a thread, played by nodes without a network, and its dashboard."""

    def __init__(self, names: list[str], *, rounds: int = 1000, listen: Address | None = None) -> None:
        self.names = names
        self._rounds = rounds
        self._listen = listen or Address("127.0.0.1", 0)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="stage", daemon=True)
        self.nodes: list[FakeNode] = []

    def __enter__(self) -> Stage:
        self._thread.start()
        self.call(self._begin())
        return self

    def __exit__(self, *exception: object) -> None:
        self.dashboard.close()
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(DEADLINE)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http://{self.dashboard.address}"

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(DEADLINE)

    def ask(self, question: Callable[[], T]) -> T:
        """What a function returns on the loop."""

        async def answer() -> T:
            return question()

        return self.call(answer())

    def play(self, rounds: int, *, pause: float = 0.0) -> None:
        """So many rounds in which everybody votes."""
        for _ in range(rounds):
            self.call(self._play(pause))

    async def _begin(self) -> None:
        self.recorder = recorder = Recorder(sentence, ignore, now=time.monotonic, wall=time.time)
        plan = make_plan(name="reef", nodes=len(self.names), rounds=self._rounds, stall=3600.0)
        self.table = voted_table()
        run = Run(
            plan,
            schedule(self.table),
            timer=LoopTimer(),
            pool=InlinePool(),
            tally=tally,
            wall=time.time,
            tell=recorder,
        )
        self.hub = Hub(run)
        self.dashboard = DashboardServer(self.hub, recorder, self._loop, self._listen, ACCESS)
        self.nodes = [FakeNode(self.hub, name=name) for name in self.names]

    async def _end(self) -> None:
        self.hub.close()
        for task in asyncio.all_tasks(self._loop) - {asyncio.current_task()}:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _play(self, pause: float) -> None:
        orders = [await node.opened() for node in self.nodes]
        for index, (node, order) in enumerate(zip(self.nodes, orders, strict=True)):
            payload = random_payload(index, self.table)
            exchange = node.send(order, payload)
            exchange_bytes = 1_000_000 + 30_000 * (index % 7)
            node.node.bytes_in += exchange_bytes
            node.node.bytes_out += exchange_bytes // 2
            self.hub.bytes_in += exchange_bytes
            self.hub.bytes_out += exchange_bytes // 2
            if index == len(self.nodes) - 1:
                await node.receive(exchange)
            if pause:
                await asyncio.sleep(pause / len(self.nodes))
        for index, node in enumerate(self.nodes):
            loss = 4.0 * math.exp(-orders[0].round / 60) + 1.6 + 0.02 * (index % 5)
            measured = orders[0].round % 10 == 9 and index == 0
            more: dict[str, Any] = {"bytes_up": node.node.bytes_in, "bytes_down": node.node.bytes_out}
            if measured:
                more |= {"evaluated": True, "validation_loss": loss + 0.05, "bits_per_byte": loss / 2}
            node.report(orders[0].round, f"state-{orders[0].round + 1}", loss=loss, **more)
            node.heartbeat()
