"""The calls of the hub: a thin gRPC layer, generic handlers with raw bytes.

It checks the token, finds the session, counts bytes and turns refusals into status codes; decisions are the
hub's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from coordinator.access import ANYBODY, NODE, Access
from coordinator.exchange import Exchange
from coordinator.gate import Gate
from coordinator.hub import Hub
from coordinator.nodes import Node
from coordinator.sending import send
from coordinator.stream import Context, Interrupted, Stream, cancelled, first, within
from coordinator.tokens import Role, Token
from protos.atoll_pb2 import (
    ChunksReceipt,
    ChunksRequest,
    GetRunRequest,
    JoinRequest,
    ProbeRequest,
    ResultsRequest,
    StatusRequest,
)
from protos.refusal import BAD_MESSAGE, BAD_SESSION, BAD_TOKEN, BAD_TRANSFER, Refused
from protos.traffic import OTHERS, Content
from protos.wire import (
    BULK_SERVICE,
    CONTROL_SERVICE,
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    REFUSAL_KEY,
    SESSION_KEY,
    TOKEN_KEY,
    TUNNEL_KEY,
    TUNNEL_TO_KEY,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

DRAIN_SECONDS: Final = 10.0  # for a node to end an upload that has been answered
BREAK_GRACE: Final = 0.05  # seconds in which a broken call, which first looks like an ended one, is cancelled


class Calls:
    """The handlers of both services."""

    def __init__(self, hub: Hub, access: Access, drain: float, gate: Gate) -> None:
        self._hub = hub
        self._gate = gate
        self._access = access
        self._drain = drain
        self._draining: dict[Exchange, asyncio.Event] = {}  # set to end it

    def handlers(self) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
        """Generic handlers without (de)serializers: messages are bytes."""
        unary, bidi = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        control: dict[str, Any] = {
            "GetRun": unary(self._guard(self._asked(self._get_run))),
            "Join": unary(self._guard(self._asked(self._join))),
            "GetStatus": unary(self._guard(self._asked(self._get_status), ANYBODY)),
            "Session": bidi(self._guard(self._session)),
            "Probe": unary(self._guard(self._asked(self._probe))),
        }
        bulk: dict[str, Any] = {
            "Exchange": bidi(self._guard(self._exchange)),
            "Tunnel": bidi(self._guard(self._tunnel)),
            "Measure": bidi(self._guard(self._measure)),
            "PutChunks": unary(self._guard(self._put_chunks)),
            "GetChunks": bidi(self._guard(self._asked(self._get_chunks))),
            "GetResults": bidi(self._guard(self._asked(self._get_results))),
        }
        return (
            grpc.method_handlers_generic_handler(CONTROL_SERVICE, control),
            grpc.method_handlers_generic_handler(BULK_SERVICE, bulk),
        )

    def _asked(
        self, call: Callable[[bytes, Context], Awaitable[bytes | None]]
    ) -> Callable[[Any, Context], Awaitable[bytes | None]]:
        """A call with one request. To gRPC it is a stream: it would read, and keep, the whole request of any
        other before it is known whose it is."""

        async def asked(_: Any, context: Context) -> bytes | None:
            return await call(await first(context, self._gate.limits.first_call_seconds), context)

        return asked

    def _guard(
        self, call: Callable[[Any, Context], Awaitable[bytes | None]], roles: Collection[Role] = NODE
    ) -> Callable[..., Awaitable[bytes | None]]:
        """Check the token; turn refusals into status codes and keep the text of other errors at home."""

        async def guarded(request: Any, context: Context) -> bytes | None:
            try:
                self._caller(context, roles)
                return await call(request, context)
            except Refused as refused:
                if not context.done():
                    kind = ((REFUSAL_KEY, refused.kind),) if refused.kind else ()
                    await context.abort(getattr(grpc.StatusCode, refused.code), refused.text, kind)
            except (asyncio.CancelledError, grpc.RpcError, grpc.aio.AbortError):
                raise
            except Exception:
                log.exception("a call failed")
                await context.abort(grpc.StatusCode.INTERNAL, "the coordinator failed; its log tells why")
            return None

        return guarded

    def _metadata(self, context: Context, key: str) -> str:
        for name, value in context.invocation_metadata() or ():
            if name == key:
                return value if isinstance(value, str) else ""
        return ""

    def _caller(self, context: Context, roles: Collection[Role]) -> Token:
        try:
            token = self._access.check(self._metadata(context, TOKEN_KEY), roles, context.peer())
        except Refused as refused:
            if refused.kind == BAD_TOKEN:
                self._gate.wrong_token(context.peer())
            raise
        self._gate.welcome(context.peer())
        return token

    def _node(self, context: Context) -> Node:
        node = self._hub.node_of(self._metadata(context, SESSION_KEY))
        if node.token != self._caller(context, NODE).digest:
            self._hub.count(BAD_SESSION)
            raise Refused(BAD_SESSION, "this session is of another token's node", "FAILED_PRECONDITION")
        return node

    def _parse(self, kind: type[M], data: bytes, content: Content = "control", peer: str = OTHERS) -> M:
        self._hub.received(len(data), content, peer)
        try:
            if len(data) > MAX_MESSAGE_BYTES:
                raise DecodeError(f"it has {len(data)} bytes")
            return kind.FromString(data)
        except DecodeError as error:
            self._hub.count(BAD_MESSAGE)
            raise Refused(BAD_MESSAGE, f"the {kind.DESCRIPTOR.name} cannot be read") from error

    def _reply(self, message: Message, content: Content = "control", peer: str = OTHERS) -> bytes:
        data = message.SerializeToString()
        self._hub.sent(len(data), content, peer)
        return data

    # --------------------------------------------------------------------------------------------- control

    async def _get_run(self, request: bytes, context: Context) -> bytes:
        self._gate.question(context.peer())
        reply = self._hub.get_run(self._parse(GetRunRequest, request))
        reply.nonce = self._access.nonce()
        reply.swarm_secret = self._hub.swarm_secret
        return self._reply(reply)

    async def _join(self, request: bytes, context: Context) -> bytes:
        self._gate.join(context.peer())
        asked, token, address = self._parse(JoinRequest, request), self._caller(context, NODE), context.peer()
        if asked.protocol == PROTOCOL:
            self._access.check_key(asked, address, token.name)
        try:
            return self._reply(self._hub.join(asked, address, token.digest))
        except Refused as refused:
            self._access.note(refused, address, token.name, asked.key)
            raise

    async def _get_status(self, request: bytes, context: Context) -> bytes:
        self._gate.question(context.peer())
        self._parse(StatusRequest, request)
        return self._reply(self._hub.status())

    async def _probe(self, request: bytes, context: Context) -> bytes:
        self._gate.question(context.peer())
        asked = self._parse(ProbeRequest, request)
        return self._reply(await self._hub.probing.probe(asked, context.peer()))

    async def _session(self, requests: Any, context: Context) -> None:
        node = self._node(context)
        outbox = self._hub.open_session(node)
        stream = Stream(context, self._hub, node, "control")
        outbox.on_close = stream.interrupt

        async def listen() -> None:
            while (message := await stream.read()) is not None:
                self._hub.message(node, message)
                if pause := self._gate.pause(node):
                    await asyncio.sleep(pause)
            self._hub.close_session(node, "its session ended")

        listening = asyncio.create_task(listen(), name=f"session of {node.node}")
        try:
            while (order := await outbox.get()) is not None:
                await stream.write(order.SerializeToString())
        except Interrupted:
            raise Refused("", f"the session has ended: {node.reason}", "ABORTED") from None
        finally:
            await cancelled(listening)
            self._hub.close_session(node, "its session broke off")

    # --------------------------------------------------------------------------------------------- bulk

    async def _exchange(self, requests: Any, context: Context) -> None:
        node = self._node(context)
        self._gate.contribution(node)
        exchange = self._hub.open_exchange(node)
        stream = Stream(context, self._hub, node, "contribution", "result")
        exchange.on_close = stream.interrupt
        spent = asyncio.Event()  # nothing more has to be read

        async def upload() -> None:
            while not exchange.spent and (message := await stream.read()) is not None:
                exchange.feed(message)
            spent.set()
            while (message := await stream.read()) is not None:
                exchange.feed(message)
            if exchange.unfinished:
                await asyncio.sleep(BREAK_GRACE)
                exchange.ended()

        uploading = refusal = None
        try:
            first = await stream.read()
            if first is None:
                await asyncio.sleep(BREAK_GRACE)
                exchange.ended()
            else:
                exchange.feed(first)
                for older, over in self._draining.items():
                    if older.node is node and exchange.supersedes(older):
                        over.set()
                uploading = asyncio.create_task(upload(), name=f"upload of {node.node}")
            try:
                while (frame := await exchange.next_frame()) is not None:
                    await stream.write(frame)
            except Refused as error:
                refusal = error
            if uploading is not None:
                exchange.broke()
                await self._drained(exchange, spent)
            if refusal is not None:
                raise refusal
        except Interrupted:
            raise exchange.refusal or Refused("", "the exchange has ended", "ABORTED") from None
        finally:
            exchange.broke()
            if uploading is not None:
                await cancelled(uploading)

    async def _drained(self, exchange: Exchange, spent: asyncio.Event) -> None:
        """Wait, for a bounded time, until the node has sent what it was sending.

        A client that is still writing when its call ends sees an internal error instead of the status, and
        may lose unread results with it (gRPC issue 36066).
        """
        if spent.is_set():
            return
        self._draining[exchange] = spent
        try:
            await asyncio.wait_for(spent.wait(), self._drain)
        except asyncio.TimeoutError:
            name = exchange.node.node
            log.info("%s did not end its upload within %g s of the answer", name, self._drain)
        finally:
            del self._draining[exchange]

    async def _tunnel(self, requests: Any, context: Context) -> None:
        node = self._node(context)
        to, key = (self._metadata(context, name) for name in (TUNNEL_TO_KEY, TUNNEL_KEY))
        end = self._hub.tunnel(node, to=to, key=key)
        stream = Stream(context, self._hub, node, "relay")
        end.on_close = stream.interrupt

        async def listen() -> None:
            with contextlib.suppress(Refused):  # whoever writes is told so too
                while (message := await stream.read()) is not None:
                    await end.feed(message)
                end.hung_up()

        listening = None
        try:
            await end.joined()
            await context.send_initial_metadata(())  # tells the node that it is through
            listening = asyncio.create_task(listen(), name=f"tunnel of {node.node}")
            while (message := await end.next()) is not None:
                await stream.write(message)
        except Interrupted:
            raise end.refusal or Refused("", "the tunnel has ended", "ABORTED") from None
        finally:
            end.close()
            if listening is not None:
                await cancelled(listening)

    async def _measure(self, requests: Any, context: Context) -> None:
        async def read() -> bytes | None:
            message = await context.read()
            if not isinstance(message, bytes):
                return None
            self._hub.received(len(message))
            return message

        async def write(message: bytes) -> None:
            await context.write(message)
            self._hub.sent(len(message))

        try:
            await self._hub.probing.measure(read, write)
        except Refused as refused:
            self._hub.count(refused.kind)
            raise

    async def _put_chunks(self, requests: Any, context: Context) -> bytes:
        node = self._node(context)
        stream = Stream(context, self._hub, node, "state")
        message = await within(self._gate.limits.first_call_seconds, stream.read())
        if message is None:
            raise Refused(BAD_TRANSFER, "the upload of chunks ended before its header")
        try:
            upload = self._hub.upload(node, message)
            upload.on_close = stream.interrupt
            try:
                while not await upload.feed(message):
                    self._hub.moved(node)
                    message = await stream.read(interruptible=True)
                    if message is None:
                        raise Refused(BAD_TRANSFER, f"the upload ended after {upload.count} whole chunks")
            except Interrupted:
                raise upload.refusal or Refused("", "the upload has ended", "ABORTED") from None
            finally:
                upload.broke("the stream ended")
        except Refused as refused:
            self._hub.count(refused.kind)
            raise
        return self._reply(ChunksReceipt(count=upload.count), "state", node.node)

    async def _get_chunks(self, request: bytes, context: Context) -> None:
        node = self._node(context)
        asked = self._parse(ChunksRequest, request, "state", node.node)
        stream = Stream(context, self._hub, node, "state")
        await send(stream, self._hub, node, lambda: self._hub.chunks(node, asked))

    async def _get_results(self, request: bytes, context: Context) -> None:
        node = self._node(context)
        asked = self._parse(ResultsRequest, request, "result", node.node)
        stream = Stream(context, self._hub, node, "result")
        await send(stream, self._hub, node, lambda: self._hub.results(node, asked), asked.first)
