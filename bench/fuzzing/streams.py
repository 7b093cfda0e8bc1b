"""Targets with a memory: the coordinator behind its transport, uploads and downloads of states, the swarm.

Inputs are several messages each. What one input leaves behind meets the next ones; now and then all begins
anew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from bench.fuzzing.inputs import split
from bench.fuzzing.tables import DIGEST, TABLES
from coordinator.chunk_store import MemoryChunkStore
from coordinator.exchange import Exchange
from coordinator.hub import Hub
from coordinator.nodes import Node
from coordinator.partial_snapshot import PartialSnapshot
from coordinator.plan import RunPlan
from coordinator.rounds import Policy
from coordinator.run import Run
from node.exchange.base import LoadOrder
from node.exchange.chunks_down import SnapshotAssembly
from node.exchange.spool import Spool
from node.exchange.swarm.stream import Heartbeat, SwarmStream
from node.exchange.tensor_bytes import Row
from node.exchange.trouble import TransferError, Trouble
from optim.bits import tally
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from protos.snapshots import chunks
from protos.wire import PROTOCOL

RENEWED: Final = 200  # inputs for which one coordinator lives
STATE_BYTES: Final = 24
MAX_NODES: Final = 512


class StillTimer:
    """A clock that moves a little with every look, and alarms that ring when somebody asks."""

    def __init__(self) -> None:
        self.time = 1000.0
        self._alarms: list[_Alarm] = []

    def now(self) -> float:
        """Seconds."""
        self.time += 1e-4
        return self.time

    def call_at(self, when: float, callback: Callable[[], None]) -> _Alarm:
        """See :class:`coordinator.timer.Timer`."""
        alarm = _Alarm(when, callback)
        self._alarms.append(alarm)
        return alarm

    def ring(self, seconds: float) -> None:
        """Let time pass."""
        self.time += seconds
        due = [alarm for alarm in self._alarms if alarm.callback is not None and alarm.when <= self.time]
        self._alarms = [a for a in self._alarms if a.callback is not None and a.when > self.time]
        for alarm in due:
            if alarm.callback is not None:
                alarm.callback()


@dataclass
class _Alarm:
    when: float
    callback: Callable[[], None] | None

    def cancel(self) -> None:
        """See :class:`coordinator.timer.Alarm`."""
        self.callback = None


class InlinePool:
    """Does work at once."""

    def submit(self, work: Callable[[], list[bytes]], done: Callable[..., None]) -> Future[list[bytes]]:
        """See :class:`coordinator.reducing.Pool`."""
        future: Future[list[bytes]] = Future()
        try:
            frames = work()
        except Exception as error:
            future.set_exception(error)
            done(None, error)
        else:
            future.set_result(frames)
            done(frames, None)
        return future


def join_request(**changes: Any) -> pb.JoinRequest:
    """Of a node that is let in."""
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "name": "host",
        "run_digest": DIGEST,
        "table_digest": TABLES.digest,
        "data_digest": "data",
        "dtype": "float32",
        "state_digest": "s0",
        "weight": 1,
        "state_bytes": STATE_BYTES,
    }
    return pb.JoinRequest(**{**values, **changes})


@dataclass
class Coordinator:
    """A coordinator with two honest nodes, and a third one that says what the inputs say.

    The first byte of a message is what it is: a request to join, a message on the session, part of a
    contribution, its end, a request for results or chunks, or time that passes.
    """

    hub: Hub = field(init=False)
    inputs: int = 0

    def __post_init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin a run."""
        plan = RunPlan(
            name="fuzz", run_file="", run_digest=DIGEST, method="sign-muon", rounds=1 << 40, nodes=3,
            evaluate_every=0, batch=4, policy=Policy(deadline=10.0, start_timeout=60.0, quorum=0.6),
        )  # fmt: skip
        self._timer, pool = StillTimer(), InlinePool()
        self.hub = Hub(Run(plan, TABLES, timer=self._timer, pool=pool, tally=tally))
        self._honest = [self._joined(join_request(), f"h{number}") for number in range(2)]
        self._node = self._joined(join_request(), "f")
        self._exchange: Exchange | None = None

    def _joined(self, request: pb.JoinRequest, host: str) -> Node:
        reply = self.hub.join(request, f"ipv4:192.0.2.1:{len(host)}")
        node = self.hub.node_of(reply.session)
        self.hub.open_session(node)
        return node

    def __call__(self, data: bytes) -> None:
        """Take an input; then the honest nodes must be there still."""
        self.inputs += 1
        if self.inputs % RENEWED == 0:
            self.renew()
        for message in split(data):
            with contextlib.suppress(Refused, DecodeError):
                self._take(message[:1], message[1:])
        for node in self._honest:
            self.hub.message(node, pb.NodeMessage(heartbeat=pb.Heartbeat()).SerializeToString())
            assert self.hub.node_of(node.secret) is node, node.reason
            assert node.outbox is not None
            node.outbox._messages.clear()  # it has read its orders
        assert len(self.hub.run.registry.nodes) <= MAX_NODES

    def _take(self, what: bytes, body: bytes) -> None:
        hub = self.hub
        if hub.run.registry.get(self._node.node) is not self._node or self._node.state == "left":
            self._node = self._joined(join_request(), "f")
        kind = what[0] % 8 if what else 0
        if kind == 0:
            hub.join(pb.JoinRequest.FromString(body), "ipv4:192.0.2.9:1")
        elif kind in (1, 2):
            hub.message(self._node, body)
        elif kind in (3, 4):
            if self._exchange is None or self._exchange.node is not self._node:
                self._exchange = hub.open_exchange(self._node)
            self._exchange.feed(body)
        elif kind == 5:
            if self._exchange is not None:
                self._exchange.ended()
                self._exchange.broke()
            self._exchange = None
        elif kind == 6:
            hub.results(self._node, pb.ResultsRequest.FromString(body))
            hub.chunks(self._node, pb.ChunksRequest.FromString(body))
            hub.upload(self._node, body)
        else:
            self._timer.ring(0.5)


def of_hub() -> Callable[[bytes], None]:
    """The coordinator."""
    return Coordinator()


def of_snapshot() -> Callable[[bytes], None]:
    """The chunks of a donor, as the coordinator takes them."""
    loop = asyncio.new_event_loop()

    async def take(data: bytes) -> None:
        share = {"node-0": (0, chunks(STATE_BYTES))}
        partial = PartialSnapshot(
            "round-0-0", 0, STATE_BYTES, share, store=MemoryChunkStore(), pool=InlinePool(),
            now=lambda: 0.0, agreed=lambda: "", on_end=lambda problem: None,
        )  # fmt: skip
        upload = partial.upload("node-0")
        for message in split(data):
            if await upload.feed(message):
                break

    return lambda data: loop.run_until_complete(take(data))


def of_state() -> Callable[[bytes], None]:
    """The chunks of a snapshot, as a joining node takes them."""
    rows = [Row("a", "float32", (2, 3))]
    spool = Spool(rows, 0, chunks(STATE_BYTES))

    def take(data: bytes) -> None:
        assembly = SnapshotAssembly(LoadOrder("round-0-0", 0), spool)
        with contextlib.suppress(TransferError):
            for message in split(data):
                if assembly.add(message):
                    break

    return take


def of_swarm() -> Callable[[bytes], None]:
    """The records of a stream over libp2p."""
    loop = asyncio.new_event_loop()

    async def take(data: bytes) -> None:
        reader = asyncio.StreamReader(loop=loop)
        reader.feed_data(data)
        reader.feed_eof()
        stream = SwarmStream(reader, _Nowhere(), "a peer", lambda: 0.0, Heartbeat())  # type: ignore[arg-type]
        with contextlib.suppress(Trouble):
            while await stream.read() is not None:
                pass
        stream.abort()

    return lambda data: loop.run_until_complete(take(data))


class _Nowhere:
    """A writer, and its transport, that nothing comes of."""

    def __init__(self) -> None:
        self.transport = self

    def write(self, data: bytes) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Likewise."""

    def is_closing(self) -> bool:
        """Never."""
        return False

    def get_write_buffer_size(self) -> int:
        """Nothing waits."""
        return 0

    def get_protocol(self) -> asyncio.Protocol:
        """One that does nothing."""
        return asyncio.Protocol()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """It is never called."""

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Likewise."""
