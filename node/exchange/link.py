"""The link: the gRPC channels of a node to its coordinator, and the calls it makes on them, metered.

Control and bulk travel on separate connections: a slow uplink full of payload must not delay heartbeats.
Downloads of what is stored have one of their own as well, with another window
(:data:`~protos.grpc_options.DOWNLOAD_OPTIONS`); it is connected with the first of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from google.protobuf.message import Message
from grpc import aio

from node.exchange import meter
from node.exchange.meter import Meter
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble, diagnose
from protos import atoll_pb2 as pb
from protos import wire
from protos.address import Address
from protos.certificate import CertificateError
from protos.grpc_options import DIAL_OPTIONS, DOWNLOAD_OPTIONS
from protos.identity import NodeKey
from protos.invite import Invite
from protos.refusal import OLD_VERSION, kind_in
from protos.tls import (
    PINNED,
    ClientTls,
    ConnectError,
    aside,
    channel_by,
    encrypted_there,
    examine,
    expects_tls,
    fetch,
)

M = TypeVar("M", bound=Message)
Call = aio.StreamStreamCall[Any, Any]

STATUS_SECONDS: Final = 5.0  # for the status that follows a last frame


@dataclass(frozen=True)
class Limits:
    """Deadlines of a node's dealings with the coordinator, in seconds."""

    wait: float = 120.0  # for a coordinator to be there when the node starts
    reconnect: float = 120.0  # for one that went away in mid-run
    call: float = 10.0  # an ordinary call
    order: float = 3600.0  # between two orders, for instance while other nodes are awaited
    round: float = 1800.0  # from contribution to commit
    transfer: float = 6 * 3600.0  # of the shared state, or of results to replay
    stall: float = 120.0  # without a byte in such a transfer
    leave: float = 3.0  # for a clean departure


async def seen_out(call: Any) -> None:
    """Let the status of a call arrive whose last frame has come, before the call is cancelled: on the heels
    of that frame a cancellation would look like a broken stream at the other end."""
    with suppress(Trouble):
        await within(STATUS_SECONDS, "the status of a call", call.code())


class Link:
    """Opened and used in the network thread only.

    Attributes:
        address: of the coordinator, HOST:PORT.
        limits: deadlines.
        key: who this node is.
        traffic: what has been counted.

    Args:
        invite: where the coordinator is, and how it proves that it is the one.
        counter: counts the bytes.
        limits: deadlines.
        tls: what this node brings beside the invite.
        key: who this node is; ``None``: somebody new.
    """

    def __init__(
        self,
        invite: Invite,
        counter: Meter,
        limits: Limits,
        tls: ClientTls = PINNED,
        key: NodeKey | None = None,
    ) -> None:
        self.address = invite.address
        self.limits = limits
        self._token = invite.token
        self._pin, self._tls = invite.pin, tls
        self.key = key or NodeKey.new()
        self._met = False  # a call has succeeded, or why none does has been looked at
        self._meter = counter
        self.traffic = counter.traffic
        self._control: aio.Channel | None = None
        self._bulk: aio.Channel | None = None
        self._downloads: aio.Channel | None = None
        self._former: list[aio.Channel | None] = []

    @property
    def secure(self) -> bool:
        """Whether the coordinator proves who it is, and the connection is encrypted."""
        return bool(self._pin)

    def open(self) -> None:
        """Make the channels; connecting happens with the first call. If this process has not seen the
        coordinator's certificate yet, that has to be one of get_run and join."""
        self._control = self._bulk = self._downloads = None
        way = channel_by(self._pin, self._tls)
        if way is not None:
            self._control = way.open_aio(self.address, DIAL_OPTIONS)
            self._bulk = way.open_aio(self.address, DIAL_OPTIONS)
            self._downloads = way.open_aio(self.address, DOWNLOAD_OPTIONS)

    async def _opened(self) -> aio.Channel:
        """The channel for control, once the certificate is known."""
        if self._control is None:
            where = Address.parse(self.address)
            try:
                await aside(fetch, where, self._pin, self._tls, self.limits.call)
                if self._control is None:  # else another call has been faster
                    self.open()
            except ConnectError as error:
                raise Trouble(Kind[error.cause], str(error)) from None
            except CertificateError as error:
                raise Trouble(Kind.HANDSHAKE, f"TLS with {self.address} is not possible: {error}") from None
        assert self._control is not None
        return self._control

    async def _looked_at(self, trouble: Trouble) -> Trouble:
        """Why the first connection failed: gRPC has the same words for a server that speaks TLS, one that
        does not like this node's certificate, and one that breaks down."""
        if self._met or trouble.kind not in (Kind.BROKEN, Kind.CERTIFICATE):
            return trouble
        self._met, where = True, Address.parse(self.address)
        try:
            if not self.secure:
                if await aside(expects_tls, where, self.limits.call):
                    raise encrypted_there(self.address)
            elif self._tls.ca:
                await aside(examine, where, self._tls.own is None, self.limits.call)
            else:
                await aside(fetch, where, self._pin, self._tls, self.limits.call)
        except ConnectError as error:
            return Trouble(Kind[error.cause], str(error))
        if self._tls.own is not None:
            return Trouble(trouble.kind, f"{trouble}; it may not accept the certificate of this machine")
        return trouble

    def move(self, address: str) -> None:
        """Calls go to ``address`` (HOST:PORT) from now on.

        Those that have begun end by themselves: cancelled ones would look as if their callers gave up.
        """
        self._former += (self._control, self._bulk, self._downloads)
        self.address = address
        self.open()

    def elsewhere(self, address: str) -> Link:
        """Another one with the same token and certificate, not opened, to ``address`` (HOST:PORT)."""
        to = Address.parse(address)
        invite = Invite(self._token, to.host, to.port, self._pin)
        return Link(invite, self._meter, self.limits, self._tls, self.key)

    async def close(self) -> None:
        """End all connections and every call on them."""
        for channel in (self._control, self._bulk, self._downloads, *self._former):
            if channel is not None:
                await channel.close(None)

    async def get_run(self) -> pb.GetRunReply:
        """What run this is.

        Raises:
            Trouble: unreachable, refused, or another protocol version.
        """
        reply = await self._unary("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply)
        if reply.protocol != wire.PROTOCOL:
            older = "this node's" if reply.protocol > wire.PROTOCOL else "the coordinator's"
            raise Trouble(
                Kind.PROTOCOL,
                f"the coordinator at {self.address} speaks protocol {reply.protocol}, this node "
                f"{wire.PROTOCOL}: install the same version of Atoll on both; {older} is the older",
                OLD_VERSION,
            )
        return reply

    async def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        """Ask for admission, with a proof that this node has its key.

        Raises:
            Trouble: unreachable or refused.
        """
        told = await self.get_run()
        self.key.prove(request, told.nonce)
        return await self._unary("Join", request, pb.JoinReply)

    def session(self, secret: str) -> Call:
        """The stream that keeps the node in the run: NodeMessage up, CoordinatorMessage down."""
        assert self._control is not None
        method = self._control.stream_stream(
            f"/{wire.CONTROL_SERVICE}/Session",
            request_serializer=self._counting_serializer("up"),
            response_deserializer=self._counting_parser(pb.CoordinatorMessage),
        )
        return method(None, metadata=self._metadata(secret))

    def exchange(self, secret: str) -> Call:
        """The stream of one round."""
        return self._frames("Exchange", secret, ("contribution", "result"), self.limits.round)

    def tunnel(self, secret: str, key: str, value: str) -> Call:
        """A stream to another node through the coordinator: to the one that ``value`` names (``key``
        :data:`~protos.wire.TUNNEL_TO_KEY`), or the one that called this node by it
        (:data:`~protos.wire.TUNNEL_KEY`). Whoever uses the stream counts its bytes."""
        assert self._bulk is not None
        method = self._bulk.stream_stream(
            f"/{wire.BULK_SERVICE}/Tunnel", request_serializer=bytes, response_deserializer=bytes
        )
        return method(None, metadata=aio.Metadata(*self._metadata(secret), (key, value)))

    def put_chunks(self, secret: str) -> aio.StreamUnaryCall[bytes, bytes]:
        """The upload of a part of a snapshot; the reply is a ChunksReceipt."""
        assert self._bulk is not None
        method = self._bulk.stream_unary(
            f"/{wire.BULK_SERVICE}/PutChunks",
            request_serializer=self._counter("up", "state"),
            response_deserializer=self._counter("down", "state"),
        )
        return method(None, metadata=self._metadata(secret), timeout=self.limits.transfer)

    def get_chunks(self, secret: str, request: pb.ChunksRequest) -> aio.UnaryStreamCall[bytes, bytes]:
        """The download of a snapshot."""
        return self._stored("GetChunks", secret, request, "state")

    def get_results(self, secret: str, request: pb.ResultsRequest) -> aio.UnaryStreamCall[bytes, bytes]:
        """The results of rounds that have been committed."""
        return self._stored("GetResults", secret, request, "result")

    def trouble(self, error: aio.AioRpcError, seconds: float) -> Trouble:
        """What the failure of a call means."""
        refusal = kind_in(error.trailing_metadata())
        return diagnose(error.code(), error.details(), self.address, seconds=seconds, refusal=refusal)

    def _frames(self, name: str, secret: str, kinds: tuple[meter.Kind, meter.Kind], seconds: float) -> Call:
        assert self._bulk is not None
        method = self._bulk.stream_stream(
            f"/{wire.BULK_SERVICE}/{name}",
            request_serializer=self._counter("up", kinds[0]),
            response_deserializer=self._counter("down", kinds[1]),
        )
        return method(None, metadata=self._metadata(secret), timeout=seconds)

    def _stored(
        self, name: str, secret: str, request: Message, kind: meter.Kind
    ) -> aio.UnaryStreamCall[bytes, bytes]:
        assert self._downloads is not None
        method = self._downloads.unary_stream(
            f"/{wire.BULK_SERVICE}/{name}",
            request_serializer=self._counter("up", kind),
            response_deserializer=self._counter("down", kind),
        )
        return method(
            request.SerializeToString(), metadata=self._metadata(secret), timeout=self.limits.transfer
        )

    async def _unary(self, name: str, request: Message, reply: type[M]) -> M:
        method = (await self._opened()).unary_unary(
            f"/{wire.CONTROL_SERVICE}/{name}",
            request_serializer=self._counting_serializer("up"),
            response_deserializer=self._counting_parser(reply),
        )
        try:
            answer: M = await method(request, metadata=self._metadata(), timeout=self.limits.call)
        except aio.AioRpcError as error:
            raise await self._looked_at(self.trouble(error, self.limits.call)) from None
        self._met = True
        return answer

    def _metadata(self, secret: str = "") -> aio.Metadata:
        token = (wire.TOKEN_KEY, self._token)
        return aio.Metadata(token, (wire.SESSION_KEY, secret)) if secret else aio.Metadata(token)

    def _counter(self, direction: meter.Direction, kind: meter.Kind) -> Callable[[bytes], bytes]:
        def count(message: bytes) -> bytes:
            self._meter.add(direction, kind, len(message))
            return message

        return count

    def _counting_serializer(self, direction: meter.Direction) -> Callable[[Message], bytes]:
        count = self._counter(direction, "control")
        return lambda message: count(message.SerializeToString())

    def _counting_parser(self, message: type[M]) -> Callable[[bytes], M]:
        count = self._counter("down", "control")

        def parse(data: bytes) -> M:
            result = message()
            result.ParseFromString(count(data))
            return result

        return parse
