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
from node.exchange.peers.places import Places
from node.exchange.peers.serving import TaskSet, serve
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble, diagnose
from protos import atoll_pb2 as pb
from protos.address import Address, AddressError, peer
from protos.certificate import CertificateError, Credential
from protos.grpc_options import DIAL_OPTIONS, PEER_OPTIONS
from protos.listening import bound
from protos.tls import PLAINTEXT, bind, channel_to
from protos.wire import PEER_SERVICE, PROTOCOL

OPEN_SECONDS: Final = 5.0  # for a stream: connecting, and one round trip
IDLE_SECONDS: Final = 60.0  # that a connection without a stream is kept
MAX_CALLS: Final = 1024  # that are served at a time
MAX_ASKERS: Final = 32  # whose questions whether this is a node are read at a time
MAX_NONCE: Final = 64  # bytes


_Place = tuple[Address, bytes]  # and the certificate of who is there


@dataclass
class _Connection:
    channel: aio.Channel
    streams: int = 0
    proven: bool = False  # the stream of which something was heard last was taken, and has not broken
    idle: asyncio.TimerHandle | None = field(default=None, repr=False)

    def stands(self) -> bool:
        """Whether a stream can be expected to be taken."""
        return self.proven and self.channel.get_state() is grpc.ChannelConnectivity.READY

    def prove(self, good: bool) -> None:
        """A stream has been taken, or it has not, or has broken."""
        self.proven = good


class DirectCarrier:
    """Implements :class:`node.exchange.peers.base.Carrier`. Used in the network thread.

    Args:
        handler: of streams that other nodes open.
        run_digest: told to whoever asks whether this node can be reached.
        credential: shown to callers, and certificates are asked of who is called; ``None``: there is no TLS.
        seconds: for a stream to be opened.
        idle: seconds that a connection without a stream is kept.
    """

    name: CarrierName = "direct"

    def __init__(
        self,
        handler: Handler,
        run_digest: str,
        *,
        credential: Credential | None = None,
        seconds: float = OPEN_SECONDS,
        idle: float = IDLE_SECONDS,
    ) -> None:
        self._handler = handler
        self._run_digest = run_digest
        self._credential = credential
        self._seconds = seconds
        self._idle = idle
        self._server: aio.Server | None = None
        self._connections: dict[_Place, _Connection] = {}
        self._tasks = TaskSet()
        self._calls = Calls(self._tasks)
        self._askers = Places(MAX_ASKERS)

    async def listen(self, address: Address, setting: str = "--listen") -> Address:
        """Listen on ``address`` (port 0: a free one); where that is, with the real port. A node that does not
        listen can call others all the same.

        Raises:
            ListenError: it cannot; ``setting`` is where people choose the address.
        """
        server = aio.server(options=PEER_OPTIONS, maximum_concurrent_rpcs=MAX_CALLS)
        calls: dict[str, Any] = {
            "Stream": grpc.stream_stream_rpc_method_handler(self._stream),
            # a stream to gRPC, which would else keep the whole question of any number of callers
            "Reach": grpc.stream_unary_rpc_method_handler(self._reach),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PEER_SERVICE, calls),))
        real = await bound(bind(server, self._credential), address, setting, others="node")
        await server.start()
        self._server = server
        return real

    def reaches(self, peer: Peer) -> bool:
        """Whoever listens where the coordinator has found it, with TLS if this node has it."""
        return bool(peer.direct) and (bool(peer.certificate) or self._credential is None)

    async def open(self, peer: Peer) -> PeerStream:
        """See the protocol."""
        self._calls.check()
        try:
            address = Address.parse(peer.direct)
        except AddressError as error:
            raise Trouble(Kind.NAME, f"{peer.node} cannot be called directly: {error}") from None

        def diagnosis(error: aio.AioRpcError) -> Trouble:
            return diagnose(error.code(), error.details(), str(address), seconds=self._seconds, who=peer.node)

        place = address, peer.certificate
        try:
            connection = self._connected(place)
        except CertificateError as error:
            raise Trouble(Kind.PROTOCOL, f"{peer.node} cannot be called directly: {error}") from None
        call = connection.channel.stream_stream(
            f"/{PEER_SERVICE}/Stream", request_serializer=bytes, response_deserializer=bytes
        )(None)
        return await self._calls.open(
            call,
            f"{peer.node} at {address}",
            diagnosis,
            seconds=self._seconds,
            at_once=connection.stands(),
            on_proof=connection.prove,
            on_over=lambda: self._left(place, connection),
        )

    async def close(self) -> None:
        """See the protocol."""
        if self._server is not None:
            await self._server.stop(None)
        await self._tasks.close()
        for place, connection in list(self._connections.items()):
            await self._disconnect(place, connection)

    # ---------------------------------------------------------------------------------- calling

    def _connected(self, place: _Place) -> _Connection:
        """The connection to who is there, with one stream more."""
        connection = self._connections.get(place)
        if connection is None:
            address, certificate = place
            way = channel_to(certificate) if certificate else PLAINTEXT
            connection = self._connections[place] = _Connection(way.open_aio(str(address), DIAL_OPTIONS))
        connection.streams += 1
        if connection.idle is not None:
            connection.idle.cancel()
            connection.idle = None
        return connection

    def _left(self, place: _Place, connection: _Connection) -> None:
        """A stream of the connection is over."""
        connection.streams -= 1
        if not connection.streams and self._connections.get(place) is connection:
            connection.idle = asyncio.get_running_loop().call_later(
                self._idle,
                lambda: self._tasks.start(self._disconnect(place, connection), f"leaving {place[0]}"),
            )

    async def _disconnect(self, place: _Place, connection: _Connection) -> None:
        if connection.idle is not None:
            connection.idle.cancel()
        if self._connections.get(place) is connection:
            del self._connections[place]
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

    async def _reach(self, _: Any, context: Any) -> bytes:
        """Prove, to whoever asks whether a node of a run can be reached here, that this is one."""
        try:
            request = await self._askers.hold(within(self._seconds, "a question", context.read()))
        except Trouble as trouble:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, str(trouble))
        try:
            if not isinstance(request, bytes):
                raise DecodeError("there is none")
            hello = pb.PeerHello.FromString(request)
            if len(hello.token) > MAX_NONCE:
                raise DecodeError(f"the nonce has {len(hello.token)} bytes")
        except DecodeError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the PeerHello cannot be read: {error}")
        answer = pb.PeerHello(
            protocol=PROTOCOL, run_digest=self._run_digest, token=hello.token, seen=peer(context.peer())
        )
        return answer.SerializeToString()
