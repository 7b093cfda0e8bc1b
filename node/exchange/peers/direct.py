"""Direct: a node listens for the others, and calls those that listen."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from node.exchange.peers.base import CarrierName, Handler, Peer, PeerStream
from node.exchange.peers.call_stream import CallStream
from node.exchange.peers.calls import Calls
from node.exchange.peers.serving import TaskSet, serve
from node.exchange.trouble import Kind, Trouble, diagnose
from protos import atoll_pb2 as pb
from protos.address import Address, AddressError, peer
from protos.grpc_options import DIAL_OPTIONS, SERVER_OPTIONS
from protos.listening import bound
from protos.wire import PEER_SERVICE, PROTOCOL

OPEN_SECONDS: Final = 5.0  # for a stream: connecting, and one round trip
IDLE_SECONDS: Final = 60.0  # that a connection without a stream is kept
MAX_CALLS: Final = 1024  # that are served at a time
MAX_NONCE: Final = 64  # bytes


@dataclass
class _Connection:
    channel: aio.Channel
    streams: int = 0
    idle: asyncio.TimerHandle | None = field(default=None, repr=False)


class DirectCarrier:
    """Implements :class:`node.exchange.peers.base.Carrier`. Used in the network thread.

    Args:
        handler: of streams that other nodes open.
        run_digest: told to whoever asks whether this node can be reached.
        seconds: for a stream to be opened.
        idle: seconds that a connection without a stream is kept.
    """

    name: CarrierName = "direct"

    def __init__(
        self,
        handler: Handler,
        run_digest: str,
        *,
        seconds: float = OPEN_SECONDS,
        idle: float = IDLE_SECONDS,
    ) -> None:
        self._handler = handler
        self._run_digest = run_digest
        self._seconds = seconds
        self._idle = idle
        self._server: aio.Server | None = None
        self._connections: dict[Address, _Connection] = {}
        self._tasks = TaskSet()
        self._calls = Calls(self._tasks)

    async def listen(self, address: Address, setting: str = "--listen") -> Address:
        """Listen on ``address`` (port 0: a free one); where that is, with the real port. A node that does not
        listen can call others all the same.

        Raises:
            ListenError: it cannot; ``setting`` is where people choose the address.
        """
        server = aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        calls: dict[str, Any] = {
            "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
            "Reach": grpc.unary_unary_rpc_method_handler(self._reach),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PEER_SERVICE, calls),))
        real = await bound(server.add_insecure_port, address, setting, others="node")
        await server.start()
        self._server = server
        return real

    def reaches(self, peer: Peer) -> bool:
        """Whoever listens where the coordinator has found it."""
        return bool(peer.direct)

    async def open(self, peer: Peer) -> PeerStream:
        """See the protocol."""
        self._calls.check()
        try:
            address = Address.parse(peer.direct)
        except AddressError as error:
            raise Trouble(Kind.NAME, f"{peer.node} cannot be called directly: {error}") from None

        def diagnosis(error: aio.AioRpcError) -> Trouble:
            return diagnose(error.code(), error.details(), str(address), seconds=self._seconds, who=peer.node)

        connection = self._connected(address)
        call = connection.channel.stream_stream(
            f"/{PEER_SERVICE}/Stream", request_serializer=bytes, response_deserializer=bytes
        )(None)
        return await self._calls.open(
            call,
            f"{peer.node} at {address}",
            diagnosis,
            seconds=self._seconds,
            on_over=lambda: self._left(address, connection),
        )

    async def close(self) -> None:
        """See the protocol."""
        if self._server is not None:
            await self._server.stop(None)
        await self._tasks.close()
        for address, connection in list(self._connections.items()):
            await self._disconnect(address, connection)

    # ---------------------------------------------------------------------------------- calling

    def _connected(self, address: Address) -> _Connection:
        """The connection to ``address``, with one stream more."""
        connection = self._connections.get(address)
        if connection is None:
            channel = aio.insecure_channel(str(address), options=DIAL_OPTIONS)
            connection = self._connections[address] = _Connection(channel)
        connection.streams += 1
        if connection.idle is not None:
            connection.idle.cancel()
            connection.idle = None
        return connection

    def _left(self, address: Address, connection: _Connection) -> None:
        """A stream of the connection is over."""
        connection.streams -= 1
        if not connection.streams and self._connections.get(address) is connection:
            connection.idle = asyncio.get_running_loop().call_later(
                self._idle,
                lambda: self._tasks.start(self._disconnect(address, connection), f"leaving {address}"),
            )

    async def _disconnect(self, address: Address, connection: _Connection) -> None:
        if connection.idle is not None:
            connection.idle.cancel()
        if self._connections.get(address) is connection:
            del self._connections[address]
        await connection.channel.close(None)

    # ---------------------------------------------------------------------------------- being called

    async def _stream(self, _: Any, context: Any) -> None:
        caller = f"the node that called from {context.peer()}"
        await context.send_initial_metadata(())  # tells the caller that it is through

        def explain(error: BaseException) -> Trouble:
            return Trouble(Kind.BROKEN, f"{caller} is gone ({str(error) or type(error).__name__})")

        stream = CallStream(context, caller, explain)
        self._tasks.start(serve(stream, self._handler), f"stream from {context.peer()}")
        try:
            await asyncio.wait({stream.closed})
        finally:
            stream.broke(Trouble(Kind.BROKEN, f"{caller} is gone"))
            await stream.settled()
        if stream.trouble is not None:
            await context.abort(grpc.StatusCode.ABORTED, "this node has given the stream up")

    async def _reach(self, request: bytes, context: Any) -> bytes:
        """Prove, to whoever asks whether a node of a run can be reached here, that this is one."""
        try:
            hello = pb.PeerHello.FromString(request)
            if len(hello.token) > MAX_NONCE:
                raise DecodeError(f"the nonce has {len(hello.token)} bytes")
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the PeerHello cannot be read: {error}")
        answer = pb.PeerHello(
            protocol=PROTOCOL, run_digest=self._run_digest, token=hello.token, seen=peer(context.peer())
        )
        return answer.SerializeToString()
