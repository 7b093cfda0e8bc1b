"""A coordinator that follows a script: a gRPC server in its own thread, for tests of the hub exchange."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from node.exchange.network import NetworkThread
from protos import atoll_pb2 as pb
from protos import wire
from protos.certificate import Credential
from protos.grpc_options import SERVER_OPTIONS
from protos.invite import Invite
from protos.tls import bind

TOKEN = "test-token"
DEADLINE = 100.0  # seconds; of every wait in these tests


@dataclass
class Upload:
    """A contribution as it came."""

    header: pb.ContributionHeader
    payload: bytes
    end: pb.ContributionEnd


class ExchangeStream:
    """The coordinator's side of one Exchange call."""

    def __init__(self, context: Any) -> None:
        self.context = context

    async def header(self) -> pb.ContributionHeader:
        frame = wire.decode_frame(await self.context.read())
        assert frame.kind == wire.HEADER
        return pb.ContributionHeader.FromString(bytes(frame.body))

    async def upload(self) -> Upload:
        """Read the whole contribution, checking order and framing."""
        header = await self.header()
        payload = bytearray()
        while (frame := wire.decode_frame(await self.context.read())).kind == wire.CHUNK:
            assert frame.offset == len(payload)
            payload += frame.body
        assert frame.kind == wire.END
        return Upload(header, bytes(payload), pb.ContributionEnd.FromString(bytes(frame.body)))

    async def chunks(self, payload: bytes, *, attempt: int = 0, until: int | None = None) -> None:
        for offset in range(0, len(payload) if until is None else until, wire.CHUNK_BYTES):
            body = payload[offset : offset + wire.CHUNK_BYTES]
            await self.send(wire.CHUNK, body, attempt=attempt, offset=offset)

    async def commit(self, round_index: int, payload: bytes, **fields: Any) -> None:
        values: dict[str, Any] = {
            "round": round_index,
            "epoch": 1,
            "voters": ["node-0"],
            "weights": [1],
            "nbytes": len(payload),
            "payload_digest": wire.payload_digest(payload),
            "counted": True,
            "reason": "all contributions are in",
            "agreement": 0.75,
        }
        commit = pb.Commit(**{**values, **fields})
        await self.send(wire.COMMIT, commit.SerializeToString())

    async def send(self, kind: int, body: bytes = b"", *, attempt: int = 0, offset: int = 0) -> None:
        await self.context.write(wire.encode_frame(kind, body, attempt=attempt, offset=offset))

    async def abort(self, code: grpc.StatusCode, text: str) -> None:
        await self.context.abort(code, text)


@dataclass
class FakeHub:
    """Start with :meth:`start`; replace the coroutines to script it. They run in the server's thread."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str = TOKEN
    run: pb.GetRunReply = field(default_factory=lambda: pb.GetRunReply(protocol=wire.PROTOCOL, run_file="x"))
    exchange: Callable[[ExchangeStream], Awaitable[None]] | None = None
    put_chunks: Callable[[Any], Awaitable[bytes]] | None = None
    get_chunks: Callable[[pb.ChunksRequest, Any], Awaitable[None]] | None = None
    get_results: Callable[[pb.ResultsRequest, ExchangeStream], Awaitable[None]] | None = None
    refuse_join: str = ""
    refuse_code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION
    heartbeat_seconds: float = 5.0
    credential: Credential | None = None

    def __post_init__(self) -> None:
        self.messages: queue.Queue[pb.NodeMessage] = queue.Queue()
        self.joins: queue.Queue[pb.JoinRequest] = queue.Queue()
        self.sessions: queue.Queue[str] = queue.Queue()  # secrets, as sessions open
        self.known: set[str] = set()
        self.break_session: asyncio.Event | None = None
        self._outgoing: asyncio.Queue[pb.CoordinatorMessage] | None = None
        self._network = NetworkThread("fake-hub").open()
        self._server: Any = None
        self._count = 0

    @property
    def invite(self) -> Invite:
        return Invite(TOKEN, self.host, self.port, "" if self.credential is None else self.credential.pin)

    def start(self) -> FakeHub:
        """Listen; again on the same port after :meth:`die`."""
        self._network.call(self._start(), DEADLINE, "starting the fake hub")
        return self

    def die(self) -> None:
        """End every call and connection at once, and forget all sessions."""
        self.known.clear()
        self._network.call(self._server.stop(0), DEADLINE, "stopping the fake hub")

    def close(self) -> None:
        self.die()
        self._network.close()

    def send(self, message: pb.CoordinatorMessage) -> None:
        """To the node, over its session."""

        async def put() -> None:
            assert self._outgoing is not None
            await self._outgoing.put(message)

        self._network.call(put(), DEADLINE, "sending an order")

    def open_round(self, round_index: int, **fields: Any) -> None:
        values = {"epoch": 1, "members": ["node-0"], "lease_start": 0, "lease_count": 4, "frontier": 12}
        self.send(pb.CoordinatorMessage(round_open=pb.RoundOpen(round=round_index, **{**values, **fields})))

    def end_session(self) -> None:
        """End the node's session stream without a word."""
        assert self.break_session is not None
        self._network.soon(self.break_session.set)

    async def _start(self) -> None:
        self._outgoing = asyncio.Queue()
        self.break_session = asyncio.Event()
        self._server = aio.server(options=SERVER_OPTIONS)
        control = grpc.method_handlers_generic_handler(
            wire.CONTROL_SERVICE,
            {
                "GetRun": grpc.unary_unary_rpc_method_handler(
                    self._get_run, pb.GetRunRequest.FromString, pb.GetRunReply.SerializeToString
                ),
                "Join": grpc.unary_unary_rpc_method_handler(
                    self._join, pb.JoinRequest.FromString, pb.JoinReply.SerializeToString
                ),
                "Session": grpc.stream_stream_rpc_method_handler(
                    self._session, pb.NodeMessage.FromString, pb.CoordinatorMessage.SerializeToString
                ),
            },
        )
        bulk = grpc.method_handlers_generic_handler(
            wire.BULK_SERVICE,
            {
                "Exchange": grpc.stream_stream_rpc_method_handler(self._exchange),
                "PutChunks": grpc.stream_unary_rpc_method_handler(self._put_chunks),
                "GetChunks": grpc.unary_stream_rpc_method_handler(self._get_chunks),
                "GetResults": grpc.unary_stream_rpc_method_handler(self._get_results),
            },
        )
        self._server.add_generic_rpc_handlers((control, bulk))
        host = f"[{self.host}]" if ":" in self.host else self.host
        self.port = bind(self._server, self.credential)(f"{host}:{self.port}")
        assert self.port
        await self._server.start()

    async def _admit(self, context: Any, session: bool = True) -> str:
        metadata = dict(context.invocation_metadata())
        if metadata.get(wire.TOKEN_KEY) != self.token:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the invite's token is not this run's: ask")
        secret = str(metadata.get(wire.SESSION_KEY, ""))
        if session and secret not in self.known:
            text = f"{wire.SESSION_UNKNOWN}this session is unknown"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)
        return secret

    async def _get_run(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunReply:
        await self._admit(context, session=False)
        return self.run

    async def _join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        await self._admit(context, session=False)
        if self.refuse_join:
            await context.abort(self.refuse_code, self.refuse_join)
        self._count += 1
        secret = f"secret-{self._count}"
        self.known.add(secret)
        self.joins.put(request)
        return pb.JoinReply(
            node=f"node-{self._count - 1}", session=secret, heartbeat_seconds=self.heartbeat_seconds
        )

    async def _session(self, requests: Any, context: Any) -> None:
        secret = await self._admit(context)
        assert self._outgoing is not None and self.break_session is not None
        self.break_session.clear()
        outgoing = self._outgoing = asyncio.Queue()
        self.sessions.put(secret)

        async def receive() -> None:
            while isinstance(message := await context.read(), pb.NodeMessage):
                self.messages.put(message)

        async def transmit() -> None:
            while True:
                await context.write(await outgoing.get())

        tasks = [asyncio.create_task(work) for work in (receive(), transmit(), self.break_session.wait())]
        try:
            await asyncio.wait((tasks[0], tasks[2]), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.known.discard(secret)

    async def _exchange(self, requests: Any, context: Any) -> None:
        await self._admit(context)
        assert self.exchange is not None
        await self.exchange(ExchangeStream(context))

    async def _put_chunks(self, requests: Any, context: Any) -> bytes:
        await self._admit(context)
        assert self.put_chunks is not None
        return await self.put_chunks(context)

    async def _get_chunks(self, request: bytes, context: Any) -> None:
        await self._admit(context)
        assert self.get_chunks is not None
        await self.get_chunks(pb.ChunksRequest.FromString(request), context)

    async def _get_results(self, request: bytes, context: Any) -> None:
        await self._admit(context)
        assert self.get_results is not None
        await self.get_results(pb.ResultsRequest.FromString(request), ExchangeStream(context))
