"""Nodes in name only: they speak the protocol over gRPC, vote at random, and take little processor time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable
from typing import Any, Final, TypeVar

import grpc

from protos import atoll_pb2 as pb
from protos import wire
from protos.address import Address
from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.grpc_options import CHANNEL_OPTIONS
from protos.identity import NodeKey

T = TypeVar("T")

DEADLINE: Final = 120.0  # seconds, of every single step: machines are shared
BLOCK: Final = bytes(wire.CHUNK_BYTES)  # of what is uploaded through a tunnel


async def soon(work: Awaitable[T]) -> T:
    """Wait, but not for ever."""
    return await asyncio.wait_for(work, DEADLINE)


class LoadNode:
    """One node with a connection of its own.

    Args:
        address: of the coordinator; without TLS.
        token: of the run.
        table: of every round.
        number: seeds its votes.

    Attributes:
        counted: rounds whose result holds its vote.
        ended: why its session is over; empty: it goes on.
        heartbeats: sent so far.
    """

    def __init__(self, address: Address, token: str, table: BucketTable, number: int) -> None:
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        # the stubs know no calls of raw bytes
        self._channel: Any = grpc.aio.insecure_channel(str(address), options=options)
        self._token, self._table, self._number = token, table, number
        self._secret, self.name = "", ""
        self._stream: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calls: asyncio.Queue[str] = asyncio.Queue()  # keys of tunnels
        self._writing = asyncio.Lock()
        self.counted, self.heartbeats, self.rounds = 0, 0, 0
        self.ended = ""

    def _metadata(self, *more: tuple[str, str]) -> list[tuple[str, str]]:
        pairs = [(wire.TOKEN_KEY, self._token), *more]
        return [*pairs, (wire.SESSION_KEY, self._secret)] if self._secret else pairs

    async def _ask(self, name: str, request: Any, reply: type[T]) -> T:
        call = self._channel.unary_unary(f"/{wire.CONTROL_SERVICE}/{name}")
        data = await soon(call(request.SerializeToString(), metadata=self._metadata()))
        return reply.FromString(data)  # type: ignore[attr-defined, no-any-return]

    async def join(self) -> None:
        """Join, open the session and take part from then on."""
        told = await self._ask("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply)
        key = NodeKey.new()
        request = pb.JoinRequest(
            protocol=wire.PROTOCOL,
            name=f"load-{self._number}",
            run_digest=told.run_digest,
            table_digest=told.table_digest,
            data_digest="data",
            dtype="float32",
            state_digest="state-0",
            weight=1,
            state_bytes=32 * self._table.nbytes,
            nonce=told.nonce,
            key=key.public,
            signature=key.sign(told.nonce, told.run_digest),
        )
        joined = await self._ask("Join", request, pb.JoinReply)
        self._secret, self.name = joined.session, joined.node
        self._stream = self._channel.stream_stream(f"/{wire.CONTROL_SERVICE}/Session")(
            metadata=self._metadata()
        )
        self._start(self._beat(joined.heartbeat_seconds))
        self._start(self._follow())

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.ended = self.ended or str(error)[:300] or type(error).__name__

    async def _say(self, **kind: Any) -> None:
        async with self._writing:
            await soon(self._stream.write(pb.NodeMessage(**kind).SerializeToString()))

    async def _beat(self, seconds: float) -> None:
        while True:
            await self._say(heartbeat=pb.Heartbeat())
            self.heartbeats += 1
            await asyncio.sleep(seconds)

    async def _follow(self) -> None:
        while isinstance(data := await self._stream.read(), bytes):
            order = pb.CoordinatorMessage.FromString(data)
            kind = order.WhichOneof("kind")
            if kind == "round_open":
                self._start(self._contribute(order.round_open))
            elif kind == "tunnel":
                self._calls.put_nowait(order.tunnel.key)
            elif kind == "stop":
                await self._say(leave=pb.Leave(reason="done"))
        self.ended = self.ended or "the coordinator has ended the session"

    async def _contribute(self, order: pb.RoundOpen) -> None:
        call = self._channel.stream_stream(f"/{wire.BULK_SERVICE}/Exchange")(metadata=self._metadata())
        table = self._table
        payload = random.Random(f"{self._number} {order.round}").randbytes(table.nbytes)
        header = pb.ContributionHeader(
            round=order.round, epoch=order.epoch, table_digest=table.digest, nbytes=table.nbytes, weight=1
        )
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the round is over
            await soon(call.write(wire.encode_frame(wire.HEADER, header.SerializeToString())))
            for start in range(0, len(payload), wire.CHUNK_BYTES):
                chunk = payload[start : start + wire.CHUNK_BYTES]
                await soon(call.write(wire.encode_frame(wire.CHUNK, chunk, offset=start)))
            end = pb.ContributionEnd(payload_digest=wire.payload_digest(payload))
            await soon(call.write(wire.encode_frame(wire.END, end.SerializeToString())))
            await soon(call.done_writing())
            while isinstance(message := await soon(call.read()), bytes):
                frame = wire.decode_frame(message)
                if frame.kind == wire.COMMIT:
                    self.counted += pb.Commit.FromString(bytes(frame.body)).counted
                    self.rounds = order.round + 1
        digest = f"state-{order.round + 1}"
        await self._say(report=pb.Report(round=order.round, state_digest=digest, loss=1.0, tokens=8))

    async def upload(self, other: LoadNode, nbytes: int) -> None:
        """Send ``nbytes`` to another node through a tunnel of the coordinator, as fast as that goes."""
        path = f"/{wire.BULK_SERVICE}/Tunnel"
        near = self._channel.stream_stream(path)(metadata=self._metadata((wire.TUNNEL_TO_KEY, other.name)))
        key = await soon(other._calls.get())
        far = other._channel.stream_stream(path)(metadata=other._metadata((wire.TUNNEL_KEY, key)))

        async def send() -> None:
            for _ in range(nbytes // len(BLOCK)):
                await soon(near.write(BLOCK))
            await soon(near.write(wire.PEER_END))
            await soon(near.read())
            await soon(near.done_writing())

        async def receive() -> None:
            while await soon(far.read()) != wire.PEER_END:
                pass
            await soon(far.write(wire.PEER_END))
            await soon(far.done_writing())

        await asyncio.gather(send(), receive())
        near.cancel()
        far.cancel()

    async def close(self) -> None:
        """Leave without a word."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close(None)


class Fleet:
    """Many of them.

    Args:
        address, token, table: see :class:`LoadNode`.
        count: how many.
    """

    def __init__(self, address: Address, token: str, table: BucketTable, count: int) -> None:
        self.nodes = [LoadNode(address, token, table, number) for number in range(count)]

    async def join(self) -> None:
        """All at once."""
        await asyncio.gather(*(node.join() for node in self.nodes))

    async def reached(self, rounds: int) -> None:
        """Wait until every node has seen the commit of so many rounds.

        Raises:
            RuntimeError: a node's session has ended, or nothing was committed for a long time.
        """
        loop = asyncio.get_running_loop()
        last, since = -1, loop.time()
        while (seen := min(node.rounds for node in self.nodes)) < rounds:
            if ended := [f"{node.name}: {node.ended}" for node in self.nodes if node.ended]:
                raise RuntimeError(f"{len(ended)} sessions have ended: {ended[0]}")
            if seen != last:
                last, since = seen, loop.time()
            elif loop.time() - since > DEADLINE:
                raise RuntimeError(f"round {seen + 1} was not committed within {DEADLINE:g} s")
            await asyncio.sleep(0.02)

    async def uploads(self, pairs: int, nbytes: int) -> None:
        """So many uploads at the same time, each between two nodes of its own."""
        couples = zip(self.nodes[0 : 2 * pairs : 2], self.nodes[1 : 2 * pairs : 2], strict=True)
        await asyncio.gather(*(one.upload(other, nbytes) for one, other in couples))

    async def close(self) -> None:
        """All leave."""
        await asyncio.gather(*(node.close() for node in self.nodes))


def tables(nbytes: int) -> TableSchedule:
    """One vote of ``nbytes`` in every round."""
    return TableSchedule((BucketTable((Bucket.of("w", "majority", [("w", (8 * nbytes,))]),)),))
