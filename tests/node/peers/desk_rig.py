"""One node's desk, topologies for it, and other nodes that speak frames to it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from node.exchange.meter import Meter
from node.exchange.peers.base import PeerStream
from node.exchange.peers.desk import Desk, DeskLimits
from node.exchange.peers.loopback import Loopback, pair
from node.exchange.trouble import Trouble
from optim.aggregate import Aggregation, ReducerMemory
from optim.bits import tally
from optim.pieces import cut
from optim.reduction import Reduction
from optim.slices import Slice, slice_pieces, units
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.upload import end_frame
from tests.coordinator.contribution_rig import coded_table, mixed_table, voted_table
from tests.optim.aggregate_rig import contribution

DEADLINE = 100.0  # seconds; only a hang reaches it
RUN = "run-digest"
T = TypeVar("T")


def basis_table() -> BucketTable:
    """Votes, and two matrices with the bases of their means, one of them encoded both ways."""
    return BucketTable(
        (
            Bucket.of("v", "majority", [("v", (700,))]),
            Bucket.of("a", "mean", [("a", (32, 64))]),
            Bucket.of("a/basis", "basis", [("optimizer/a/basis", (32, 4))], source="a"),
            Bucket.of("b", "mean", [("b", (16, 48))], codec="int8", result="int4"),
            Bucket.of("b/basis", "basis", [("optimizer/b/basis", (16, 3))], source="b"),
            Bucket.of("z", "majority", [("z", (9000,))]),
        )
    )


TABLES = {
    "voted": voted_table(600),
    "mixed": mixed_table(),
    "coded": coded_table(),
    "basis": basis_table(),
}


def payloads(table: BucketTable, count: int, seed: int = 0) -> list[bytes]:
    """Contributions that may be decoded."""
    return [contribution(seed * 100 + i, table).tobytes() for i in range(count)]


def slices(table: BucketTable, cuts: int, seed: int = 0) -> list[Slice]:
    """Any cut between units."""
    finest = units(table, slice_pieces(table))
    inner = random.Random(seed).choices(range(len(finest) + 1), k=cuts - 1)
    edges = sorted({0, len(finest), *inner})
    return [
        Slice(finest[a].start, finest[b - 1].end, finest[a].out_start, finest[b - 1].out_end)
        for a, b in itertools.pairwise(edges)
    ]


def at_the_hub(
    table: BucketTable,
    rows: Sequence[bytes],
    *,
    round_index: int = 0,
    weights: Sequence[int] | None = None,
    mean_weights: Sequence[int] | None = None,
    memory: ReducerMemory | None = None,
) -> bytes:
    """The result that the hub would make of whole contributions, and commit."""
    aggregation = Aggregation(
        table,
        len(rows),
        round_index=round_index,
        tally=tally,
        memory=ReducerMemory() if memory is None else memory,
        weights=weights,
        mean_weights=mean_weights,
    )
    arrays = [np.frombuffer(row, np.uint8) for row in rows]
    reduction = Reduction(cut(table, wire.CHUNK_BYTES), aggregation, arrays, phase=round_index)
    frames = reduction.advance(table.nbytes)
    assert reduction.done
    reduction.commit()
    return b"".join(bytes(wire.decode_frame(frame).body) for frame in frames)


def order(
    voters: Sequence[str], *, round_index: int = 0, topology: int = 1, attempt: int = 1, **changes: Any
) -> pb.Reduce:
    values: dict[str, Any] = {
        "round": round_index,
        "topology": topology,
        "attempt": attempt,
        "voters": voters,
        "weights": [1] * len(voters),
        "mean_weights": [1] * len(voters),
        "leases": [pb.Lease(start=0, count=1)] * len(voters),
    }
    return pb.Reduce(**{**values, **changes})


def chunk(body: bytes, offset: int = 0) -> bytes:
    return wire.encode_frame(wire.CHUNK, body, offset=offset)


def upload_frames(body: bytes, size: int = wire.CHUNK_BYTES) -> list[bytes]:
    """CHUNKs and END."""
    starts = range(0, len(body), size)
    return [*(chunk(body[i : i + size], i) for i in starts), end_frame(wire.payload_digest(body))]


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, DEADLINE)


async def until(holds: Callable[[], Any]) -> None:
    """Let the loop run until ``holds()``."""

    async def look() -> None:
        while not holds():
            await asyncio.sleep(0)

    await soon(look())


async def idle(turns: int = 30) -> None:
    """Let everything happen that is ready to."""
    for _ in range(turns):
        await asyncio.sleep(0)


class Carried:
    """A stream from another node: the desk cannot tell that it never leaves the process."""

    def __init__(self, stream: PeerStream) -> None:
        self.read, self.write, self.end, self.cancel = stream.read, stream.write, stream.end, stream.cancel


class Caller:
    """The other end of a stream to a desk; keeps what comes down."""

    def __init__(self, stream: Loopback, served: asyncio.Future[None]) -> None:
        self.stream, self.served = stream, served
        self.result = bytearray()
        self.first = -1  # offset of the first chunk
        self.attempt = self.restarts = 0
        self.digest = ""  # of the END; of the present attempt
        self.refusal: pb.Refusal | None = None
        self.ended = self.broken = False
        self.reading: asyncio.Future[None] | None = None

    async def say(self, *messages: bytes) -> None:
        for message in messages:
            await soon(self.stream.write(message))

    def listen(self) -> Caller:
        self.reading = asyncio.ensure_future(self._read())
        return self

    async def _read(self) -> None:
        try:
            while (message := await self.stream.read()) is not None:
                self._take(wire.decode_frame(message))
            self.ended = True
            await self.stream.end()
        except Trouble:
            self.broken = True

    def _take(self, frame: wire.Frame) -> None:
        if frame.kind == wire.RESTART:
            self.attempt, self.restarts = frame.attempt, self.restarts + 1
            self.result.clear()
            self.digest = ""
            self.first = -1
        elif frame.kind == wire.CHUNK:
            self.first = frame.offset if self.first < 0 else self.first
            assert frame.attempt == self.attempt and frame.offset == self.first + len(self.result)
            self.result += frame.body
        elif frame.kind == wire.END:
            self.digest = pb.ContributionEnd.FromString(bytes(frame.body)).payload_digest
            assert self.digest == wire.payload_digest(self.result)
        else:
            assert frame.kind == wire.REFUSAL
            self.refusal = pb.Refusal.FromString(bytes(frame.body))

    async def refused(self) -> str:
        """The kind of the refusal that ends it."""
        await soon(self.served)
        await until(lambda: self.ended or self.broken)
        assert self.refusal is not None
        return self.refusal.kind

    def die(self) -> None:
        self.stream.cancel()


class Site:
    """The desk of the node "me", in a run with the nodes "a", "b", "c", ..."""

    def __init__(
        self, table: BucketTable | None = None, *, names: str = "abc", submit: Any = None, **limits: Any
    ) -> None:
        self.table = table or TABLES["mixed"]
        self.names = list(names)
        self.told: list[pb.SliceNews] = []
        self.said: list[str] = []
        self.meter = Meter()
        self.time = 100.0
        self.desk = Desk(
            TableSchedule((self.table,)),
            RUN,
            tell=lambda message: self.told.append(message.slice_news),
            now=lambda: self.time,
            meter=self.meter,
            say=self.said.append,
            submit=submit,
            limits=DeskLimits(**limits),
        )
        self.parts: list[Slice] = []

    def topology(
        self, parts: Sequence[Slice] | None = None, reducers: Sequence[str] | None = None, number: int = 1
    ) -> None:
        """The slices go to these reducers; all to this node if nothing is said."""
        self.parts = list(parts or slices(self.table, 1))
        reducers = reducers or ["me"] * len(self.parts)
        nodes = [
            pb.PeerNode(node=name, accept_token=self.token(name, number), call_token=b"?")
            for name in [*self.names, "me"]
        ]
        table = pb.TableSlices(
            table_digest=self.table.digest,
            slices=[
                pb.SliceOf(
                    reducer=reducer, start=p.start, end=p.end, out_start=p.out_start, out_end=p.out_end
                )
                for p, reducer in zip(self.parts, reducers, strict=True)
            ],
        )
        self.desk.set_topology(pb.Topology(number=number, nodes=nodes, tables=[table]), "me")

    def token(self, name: str, number: int = 1) -> bytes:
        return f"token of {name} in {number}".encode()

    async def call(self, message: bytes | None = None, *, local: bool = False) -> Caller:
        mine, theirs = pair()
        served = self.desk.serve(theirs if local else Carried(theirs))
        caller = Caller(mine, asyncio.ensure_future(served))
        if message is not None:
            await caller.say(message)
        return caller

    def hello(self, sender: str, index: int = 0, **changes: Any) -> bytes:
        round_index, topology = changes.pop("round_index", 0), changes.pop("topology", 1)
        nbytes = self.parts[index].nbytes if index < len(self.parts) else 0
        up = pb.SliceUp(
            round=round_index,
            topology=topology,
            slice=index,
            nbytes=changes.pop("nbytes", nbytes),
            lease=pb.Lease(start=changes.pop("lease", 0), count=1),
        )
        return self._hello(sender, slice=up, **{"token": self.token(sender, topology), **changes})

    def fetching(self, sender: str, start: int, end: int, round_index: int = 0, **changes: Any) -> bytes:
        fetch = pb.FetchResult(round=round_index, out_start=start, out_end=end)
        return self._hello(sender, fetch=fetch, **{"token": self.token(sender), **changes})

    def _hello(self, sender: str, **changes: Any) -> bytes:
        values: dict[str, Any] = {"protocol": wire.PROTOCOL, "run_digest": RUN, "sender": sender}
        return wire.encode_frame(wire.HEADER, pb.PeerHello(**{**values, **changes}).SerializeToString())

    async def begin(self, sender: str, index: int = 0, **changes: Any) -> Caller:
        """A stream with its hello, and a task that reads the result."""
        local = changes.pop("local", False)
        return (await self.call(self.hello(sender, index, **changes), local=local)).listen()

    async def send(self, sender: str, payload: bytes, index: int = 0, **changes: Any) -> Caller:
        """A whole contribution to a slice, cut out of a whole payload."""
        caller = await self.begin(sender, index, **changes)
        part = self.parts[index]
        await caller.say(*upload_frames(payload[part.start : part.end], 4096))
        return caller

    def commit(self, result: bytes, round_index: int = 0) -> pb.Commit:
        digests = [
            pb.SliceDigest(
                out_start=p.out_start,
                out_end=p.out_end,
                digest=bytes.fromhex(wire.payload_digest(result[p.out_start : p.out_end])),
                reducer="me",
            )
            for p in self.parts
        ]
        return pb.Commit(round=round_index, voters=self.names, slices=digests)

    @property
    def news(self) -> pb.SliceNews:
        return self.told[-1]


def digest_of(result: bytes) -> bytes:
    return bytes.fromhex(wire.payload_digest(result))


async def delivered(site: Site, rows: list[bytes], voters: str = "abc", **changes: Any) -> list[Caller]:
    return [await site.send(name, row, **changes) for name, row in zip(voters, rows, strict=False)]


async def finished(site: Site, rows: list[bytes], round_index: int = 0) -> bytes:
    """A committed round of one slice."""
    site.desk.reduce(order("abc", round_index=round_index))
    callers = await delivered(site, rows, round_index=round_index)
    await until(lambda: site.told and site.news.round == round_index and site.news.digest)
    result = at_the_hub(site.table, rows, round_index=round_index)
    site.desk.committed(site.commit(result, round_index))
    for caller in callers:
        await soon(caller.served)
    return result
