"""Nodes of a run in one event loop: real desks and rounds, streams in memory, a scripted coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from node.exchange.base import RoundOrder
from node.exchange.filling import Filling
from node.exchange.link import Limits
from node.exchange.meter import Meter
from node.exchange.peers.base import CarrierName, Peer, PeerStream
from node.exchange.peers.desk import Desk
from node.exchange.peers.direct import DirectCarrier
from node.exchange.peers.loopback import pair
from node.exchange.peers.rounds import PeerRounds
from node.exchange.retry import Backoff, Timing
from node.exchange.trouble import Kind, Trouble
from optim.aggregate import Aggregation, ReducerMemory
from optim.bits import tally
from optim.pieces import cut
from optim.reduction import Reduction
from optim.slices import Slice, slice_pieces, units
from protos import atoll_pb2 as pb
from protos import wire
from protos.address import Address
from protos.buckets import BucketTable, TableSchedule

DEADLINE = 100.0
RUN = "run-digest"
LIMITS = Limits(round=DEADLINE, stall=5.0, transfer=DEADLINE)
QUICK = Timing(backoff=Backoff(first=0.005, cap=0.02))

Spoil = Callable[[bytes], bytes]


class Relay:
    """A stream that may be broken, or spoil what comes down, by the test."""

    def __init__(self, stream: PeerStream, spoil: Spoil) -> None:
        self._stream, self._spoil = stream, spoil
        self.cancelled = self.silent = False
        self.read_bytes = self.written_bytes = 0

    async def read(self) -> bytes | None:
        message = await self._stream.read()
        if self.silent:  # nothing more arrives, and nothing says so
            await asyncio.Event().wait()
        if message is None:
            return None
        self.read_bytes += len(message)
        return self._spoil(message)

    async def write(self, message: bytes) -> None:
        await self._stream.write(message)
        self.written_bytes += len(message)

    async def end(self) -> None:
        await self._stream.end()

    def cancel(self) -> None:
        self.cancelled = True
        self._stream.cancel()


class MemoryCarrier:
    """Calls the desks of a :class:`Coordinator`'s nodes.

    Attributes:
        unreachable: names of nodes.
        silent: names of nodes from which nothing comes.
        opened: node and stream, in order.
    """

    def __init__(self, name: CarrierName, coordinator: Coordinator, me: str) -> None:
        self.name: CarrierName = name
        self._coordinator, self._me = coordinator, me
        self.unreachable: set[str] = set()
        self.silent: set[str] = set()
        self.opened: list[tuple[str, Relay]] = []
        self.spoil: Spoil = lambda message: message
        self.closed = False

    def reaches(self, peer: Peer) -> bool:
        return True

    async def open(self, peer: Peer) -> PeerStream:
        node = self._coordinator.nodes[peer.node]
        if peer.node in self.unreachable or node.dead:
            raise Trouble(Kind.NOBODY_LISTENS, f"nothing listens at {peer.node}")
        mine, theirs = pair()
        node.serve(theirs)
        relay = Relay(mine, self.spoil)
        relay.silent = peer.node in self.silent
        self.opened.append((peer.node, relay))
        return relay

    async def close(self) -> None:
        self.closed = True


class Wrapped:
    """The other end of a stream between nodes: not a loopback, for the desk."""

    def __init__(self, stream: PeerStream) -> None:
        self.read, self.write, self.end, self.cancel = stream.read, stream.write, stream.end, stream.cancel


class Node:
    """Its session is its own name and the way to the coordinator."""

    def __init__(self, name: str, coordinator: Coordinator, ways: Sequence[CarrierName]) -> None:
        self.node, self._coordinator = name, coordinator
        self.meter = Meter()
        self.said: list[str] = []
        self.called: list[tuple[str, str]] = []  # to tunnels
        self.dead = False
        self.served: list[PeerStream] = []
        self._tasks: list[asyncio.Future[None]] = []
        tables = coordinator.tables
        self.desk = Desk(tables, RUN, tell=self.send, now=QUICK.now, meter=self.meter, say=self.said.append)
        self.carriers = [MemoryCarrier(way, coordinator, name) for way in ways]
        self.direct = DirectCarrier(self.desk.serve, RUN)
        self.address = f"{name}:1"
        self.rounds = PeerRounds(
            self.desk,
            self.carriers or [self.direct],
            self,
            tables=tables,
            run_digest=RUN,
            limits=LIMITS,
            timing=QUICK,
            say=self.said.append,
            meter=self.meter,
            answer=lambda key, caller: self.called.append((key, caller)),
        )
        self.into = bytearray(tables.result_nbytes)

    async def listen(self) -> None:
        """Be called by gRPC instead of through memory; ``ways`` must be empty for that."""
        self.address = str(await self.direct.listen(Address("127.0.0.1", 0)))

    def serve(self, stream: PeerStream) -> None:
        self.served.append(stream)
        self._tasks.append(asyncio.ensure_future(self.desk.serve(Wrapped(stream))))

    def send(self, message: pb.NodeMessage) -> None:
        if not self.dead:
            self._coordinator.hear(self.node, message)

    def die(self) -> None:
        """Say nothing more, serve nobody, break every stream."""
        self.dead = True
        for stream in self.served:
            stream.cancel()

    async def reduce(
        self,
        order: RoundOrder,
        payload: bytes | bytearray | None,
        filling: Filling | None = None,
        reason: str = "",
        on_sent: Callable[[], None] = lambda: None,
    ) -> pb.Commit:
        view = None if payload is None else memoryview(payload)
        into = memoryview(self.into)[: self._coordinator.tables.of(order.round).result_nbytes]
        return await asyncio.wait_for(
            self.rounds.reduce(order, view, filling, into, reason, on_sent), DEADLINE
        )

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.rounds.close()


class Coordinator:
    """Commits a round once every slice's reducer has said the digest of its voters' result, and all
    contributors hold it.

    Attributes:
        heard: node and message, of every kind.
        on_trouble: called with a SliceTrouble.
    """

    def __init__(
        self, table: BucketTable, names: Sequence[str], ways: Sequence[CarrierName] = ("direct",)
    ) -> None:
        self.tables = TableSchedule((table,))
        self.table = table
        self.heard: list[tuple[str, pb.NodeMessage]] = []
        self.on_trouble: Callable[[pb.SliceTrouble], None] = lambda trouble: None
        self.nodes: dict[str, Node] = {}
        for name in names:
            self.nodes[name] = Node(name, self, ways)
        self.number = self.attempt = 0
        self.round = -1
        self.voters: list[str] = []
        self.slices: list[tuple[Slice, str]] = []
        self.digests: dict[int, bytes] = {}
        self.holding: set[str] = set()
        self.commits: list[pb.Commit] = []
        self.hold_back = False  # commit() is the test's to call
        self.deaf: set[str] = set()  # nodes that are told nothing

    # -------------------------------------------------------------------------------------- topology

    def plan(self, reducers: Sequence[str]) -> None:
        """About equal slices for these nodes, in order."""
        finest = units(self.table, slice_pieces(self.table))
        assert len(finest) >= len(reducers)
        bounds = [len(finest) * index // len(reducers) for index in range(len(reducers) + 1)]
        self.slices = [
            (
                Slice(
                    finest[first].start,
                    finest[last - 1].end,
                    finest[first].out_start,
                    finest[last - 1].out_end,
                ),
                reducer,
            )
            for first, last, reducer in zip(bounds, bounds[1:], reducers, strict=False)
        ]
        self.announce()

    def give(self, index: int, reducer: str) -> None:
        """Another reducer for a slice."""
        self.slices[index] = (self.slices[index][0], reducer)
        self.digests.pop(index, None)
        self.announce()

    def announce(self) -> None:
        self.number += 1
        for name, node in self.nodes.items():
            self.say(node, pb.CoordinatorMessage(topology=self.topology(name)))

    def topology(self, me: str) -> pb.Topology:
        slices = [
            pb.SliceOf(
                reducer=reducer,
                start=part.start,
                end=part.end,
                out_start=part.out_start,
                out_end=part.out_end,
            )
            for part, reducer in self.slices
        ]
        nodes = [
            pb.PeerNode(
                node=name,
                direct=self.nodes[name].address,
                call_token=f"{me}->{name}".encode(),
                accept_token=f"{name}->{me}".encode(),
            )
            for name in self.nodes
        ]
        tables = [pb.TableSlices(table_digest=self.table.digest, slices=slices)]
        return pb.Topology(number=self.number, nodes=nodes, tables=tables)

    def say(self, node: Node, message: pb.CoordinatorMessage) -> None:
        if not node.dead and node.node not in self.deaf:
            assert node.rounds.take(message)

    # ----------------------------------------------------------------------------------------- rounds

    def open(self, voters: Sequence[str], round_index: int | None = None) -> RoundOrder:
        self.round = self.round + 1 if round_index is None else round_index
        self.digests.clear()
        self.holding.clear()
        self.expect(voters)
        return RoundOrder(self.round, 0, tuple(self.nodes), 0, 1, False, False, topology=self.number)

    def expect(self, voters: Sequence[str]) -> None:
        """The result is made of the votes of these from now on."""
        self.voters = list(voters)
        self.attempt += 1
        self.digests.clear()
        for _, reducer in self.slices:
            self.order_from(reducer)

    def order_from(self, reducer: str) -> None:
        order = pb.Reduce(
            round=self.round,
            topology=self.number,
            attempt=self.attempt,
            voters=self.voters,
            weights=[1] * len(self.voters),
            mean_weights=[1] * len(self.voters),
            leases=[pb.Lease(start=0, count=1)] * len(self.voters),
        )
        self.say(self.nodes[reducer], pb.CoordinatorMessage(reduce=order))

    def hear(self, name: str, message: pb.NodeMessage) -> None:
        self.heard.append((name, message))
        kind = message.WhichOneof("kind")
        if kind == "slice_news":
            news = message.slice_news
            current = self.slices[news.slice][1] == name and news.attempt == self.attempt
            if news.round == self.round and news.digest and current:
                self.digests[news.slice] = news.digest
        elif kind == "holding" and message.holding.round == self.round:
            self.holding.add(name)
        elif kind == "slice_trouble":
            self.on_trouble(message.slice_trouble)
        self.consider()

    def consider(self) -> None:
        if self.hold_back or self.round < 0 or any(commit.round == self.round for commit in self.commits):
            return
        live = {name for name in self.voters if not self.nodes[name].dead}
        if len(self.digests) == len(self.slices) and live <= self.holding:
            self.commit()

    def commit(self) -> None:
        for name, node in self.nodes.items():
            self.say(node, pb.CoordinatorMessage(committed=self.commit_for(name)))

    def commit_for(self, name: str) -> pb.Commit:
        commit = pb.Commit(
            round=self.round,
            voters=self.voters,
            weights=[1] * len(self.voters),
            counted=name in self.voters,
            topology=self.number,
            holders=[node for node in self.nodes if not self.nodes[node].dead],
        )
        for index, (part, reducer) in enumerate(self.slices):
            commit.slices.add(
                out_start=part.out_start, out_end=part.out_end, digest=self.digests[index], reducer=reducer
            )
        self.commits.append(commit)
        return commit

    def messages(self, kind: str) -> list[tuple[str, Any]]:
        """Who has said messages of a kind, and their content."""
        return [
            (name, getattr(message, kind))
            for name, message in self.heard
            if message.WhichOneof("kind") == kind
        ]

    async def close(self) -> None:
        for node in self.nodes.values():
            await node.close()


def expected(
    table: BucketTable,
    payloads: Sequence[bytes],
    round_index: int = 0,
    memory: ReducerMemory | None = None,
) -> bytes:
    """The result of these contributions, reduced in one place."""
    rows = [np.frombuffer(payload, np.uint8).copy() for payload in payloads]
    memory = memory or ReducerMemory()
    aggregation = Aggregation(table, len(rows), round_index=round_index, tally=tally, memory=memory)
    reduction = Reduction(cut(table, 1 << 20), aggregation, rows, phase=round_index)
    frames = reduction.advance(table.nbytes)
    reduction.commit()
    return b"".join(bytes(wire.decode_frame(frame).body) for frame in frames)


def digest(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


def again(order: RoundOrder, **changes: Any) -> RoundOrder:
    return dataclasses.replace(order, **changes)
