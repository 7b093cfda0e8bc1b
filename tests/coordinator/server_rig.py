"""The gRPC server on loopback, and a client that can send anything."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import grpc
import pytest
from google.protobuf.message import Message

from coordinator.access import Access
from coordinator.calls import DRAIN_SECONDS
from coordinator.hub import Hub
from coordinator.pool import ThreadPool
from coordinator.run import Run
from coordinator.server import Server, serve
from coordinator.timer import LoopTimer
from optim.bits import tally
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import BucketTable
from protos.certificate import Credential
from protos.grpc_options import CHANNEL_OPTIONS
from protos.identity import NodeKey
from tests.coordinator.contribution_rig import (
    Download,
    contribution_frames,
    lane_frames,
    random_payload,
    schedule,
    voted_table,
)
from tests.coordinator.coordinator_rig import join_request, make_plan, soon
from tests.coordinator.state_rig import SharedState

TOKEN = "the-token"

LARGE = voted_table(lines=(3 << 20) // 64)  # three chunks

M = TypeVar("M", bound=Message)


class Client:
    """A node in name only: raw calls on channels of its own."""

    def __init__(self, site: Site, token: str = TOKEN) -> None:
        self.site = site
        self.token = token
        self.key = NodeKey.new()
        self.session = ""
        self.id = ""
        self.sent = self.received = self.sent_before = 0  # the last one: before it was admitted
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self.channel = grpc.aio.insecure_channel(str(site.server.address), options=options)
        self.stream: Any = None

    def metadata(self) -> list[tuple[str, str]]:
        pairs = [(wire.TOKEN_KEY, self.token)]
        return [*pairs, (wire.SESSION_KEY, self.session)] if self.session else pairs

    async def unary(self, name: str, request: Message, reply: type[M]) -> M:
        data = request.SerializeToString()
        call = self.channel.unary_unary(f"/{wire.CONTROL_SERVICE}/{name}")
        answer = await soon(call(data, metadata=self.metadata()))
        self.sent += len(data)
        self.received += len(answer)
        return reply.FromString(answer)

    async def join(self, **changes: Any) -> Client:
        request = join_request(self.site.table, **{"state_bytes": self.site.state.nbytes, **changes})
        reply = await self.unary("Join", await self.proven(request), pb.JoinReply)
        self.session, self.id, self.sent_before = reply.session, reply.node, self.sent
        self.stream = self.open_session()
        await self.say(heartbeat=pb.Heartbeat())
        return self

    async def proven(self, request: pb.JoinRequest) -> pb.JoinRequest:
        """A join that shows that it is this client's."""
        run = await self.unary("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply)
        self.key.prove(request, run.nonce)
        return request

    def open_session(self) -> Any:
        return self.channel.stream_stream(f"/{wire.CONTROL_SERVICE}/Session")(metadata=self.metadata())

    async def say(self, **kind: Any) -> None:
        data = pb.NodeMessage(**kind).SerializeToString()
        await soon(self.stream.write(data))
        self.sent += len(data)

    async def order(self) -> pb.CoordinatorMessage | None:
        message = await soon(self.stream.read())
        if not isinstance(message, bytes):
            return None
        self.received += len(message)
        return pb.CoordinatorMessage.FromString(message)

    async def opened(self) -> pb.RoundOpen:
        message = await self.order()
        assert message is not None and message.WhichOneof("kind") == "round_open", message
        return message.round_open

    def exchange(self) -> Any:
        return self.channel.stream_stream(f"/{wire.BULK_SERVICE}/Exchange")(metadata=self.metadata())

    async def write(self, call: Any, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await soon(call.write(frame))
            self.sent += len(frame)

    async def read(self, call: Any) -> Download:
        download = Download(self.site.table.result_nbytes)
        while isinstance(message := await soon(call.read()), bytes):
            self.received += len(message)
            download.add(message)
        assert download.commit is not None
        assert await soon(call.code()) is grpc.StatusCode.OK
        return download

    async def contribute(
        self, order: pb.RoundOpen, payload: bytes, lane: Sequence[int] | None = None
    ) -> Download:
        """A whole contribution, or a lane of it."""
        call = self.exchange()
        frames = (
            contribution_frames(order, self.site.table, payload)
            if lane is None
            else lane_frames(order, self.site.table, payload, lane)
        )

        async def up() -> None:
            await self.write(call, frames)
            await call.done_writing()

        uploading = asyncio.ensure_future(up())
        download = await self.read(call)
        await uploading
        if self.stream is not None:
            digest = self.site.state.digest
            await self.say(report=pb.Report(round=order.round, state_digest=digest, loss=1.0, tokens=8))
        return download

    async def ordered(self, kind: str) -> Any:
        """The next order of this kind; others are passed over."""
        while (message := await self.order()) is not None:
            if message.WhichOneof("kind") == kind:
                return getattr(message, kind)
        raise AssertionError(f"no {kind}")

    def get(self, name: str, request: Message | bytes) -> Any:
        """A download."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return self.channel.unary_stream(f"/{wire.BULK_SERVICE}/{name}")(data, metadata=self.metadata())

    def put_chunks(self) -> Any:
        return self.channel.stream_unary(f"/{wire.BULK_SERVICE}/PutChunks")(metadata=self.metadata())

    async def donate(self, order: pb.Donate) -> pb.ChunksReceipt:
        call = self.put_chunks()
        await self.write(call, self.site.state.frames(order))
        await call.done_writing()
        return pb.ChunksReceipt.FromString(await soon(call))

    async def leave(self) -> None:
        await self.say(leave=pb.Leave(reason="done"))
        assert await self.order() is None  # the coordinator has heard it
        await self.close()

    async def close(self) -> None:
        await soon(self.channel.close(None))


class Site:
    """A hub behind a real server."""

    hub: Hub
    server: Server
    table: BucketTable
    state = SharedState.of(nbytes=24 << 20)  # after every round

    async def clients(self, count: int) -> list[Client]:
        return [await Client(self).join() for _ in range(count)]

    async def play(self, clients: Sequence[Client], seed: int = 0) -> list[Download]:
        orders = [await client.opened() for client in clients]
        return list(
            await asyncio.gather(
                *(
                    client.contribute(order, random_payload(seed + i, self.table))
                    for i, (client, order) in enumerate(zip(clients, orders, strict=True))
                )
            )
        )


@contextlib.asynccontextmanager
async def site(
    table: BucketTable | None = None,
    listen: str = "127.0.0.1:0",
    drain: float = DRAIN_SECONDS,
    credential: Credential | None = None,
    token: str | Access = TOKEN,
    **plan: Any,
) -> AsyncIterator[Site]:
    made = Site()
    made.table = table or voted_table()
    pool = ThreadPool()
    made.hub = Hub(Run(make_plan(**plan), schedule(made.table), timer=LoopTimer(), pool=pool, tally=tally))
    made.server = await serve(made.hub, listen, token, drain=drain, credential=credential)
    try:
        yield made
    finally:
        await soon(made.server.stop(0.2))
        made.hub.close()
        pool.close()


async def code_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await soon(call)
    return error.value.code(), error.value.details() or ""


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a stream to its bad end."""

    async def read() -> None:
        while isinstance(await call.read(), bytes):
            pass

    return await code_of(read())
