"""The transport of the hub: a thin gRPC layer, generic handlers with raw bytes.

It checks the token, finds the session, counts bytes and turns refusals into status codes; decisions are the
hub's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from coordinator.exchange import Exchange
from coordinator.hub import Hub
from coordinator.nodes import Node
from coordinator.stream import Context, Interrupted, Stream
from protos.address import Address
from protos.atoll_pb2 import (
    ChunksReceipt,
    ChunksRequest,
    GetRunRequest,
    JoinRequest,
    ProbeRequest,
    ResultsRequest,
    StatusRequest,
)
from protos.grpc_options import SERVER_OPTIONS
from protos.listening import bound
from protos.refusal import BAD_MESSAGE, BAD_TOKEN, BAD_TRANSFER, STALLED, Refused
from protos.traffic import OTHERS, Content
from protos.wire import (
    BULK_SERVICE,
    CONTROL_SERVICE,
    MAX_MESSAGE_BYTES,
    SESSION_KEY,
    TOKEN_KEY,
    TUNNEL_KEY,
    TUNNEL_TO_KEY,
)

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)

STOP_GRACE: Final = 2.0  # seconds for open calls to end by themselves
DRAIN_SECONDS: Final = 10.0  # for a node to end an upload that has been answered
BREAK_GRACE: Final = 0.05  # seconds in which a broken call, which first looks like an ended one, is cancelled


class Server:
    """A listening coordinator.

    Attributes:
        address: where it listens, with the real port.
    """

    def __init__(self, server: grpc.aio.Server, address: Address) -> None:
        self.address = address
        self._server = server

    async def stop(self, grace: float = STOP_GRACE) -> None:
        """Close the port at once, give open calls ``grace`` seconds, then cut them."""
        await self._server.stop(grace)


async def serve(hub: Hub, listen: Address | str, token: str, *, drain: float = DRAIN_SECONDS) -> Server:
    """Listen on ``listen`` (port 0: a free one) and serve ``hub`` to whoever holds ``token``.

    ``drain`` is how many seconds an upload is still read, and dropped, after its commit or refusal.

    Raises:
        ListenError: the port is taken, or the address cannot be used.
    """
    address = Address.parse(listen) if isinstance(listen, str) else listen
    server = grpc.aio.server(options=SERVER_OPTIONS)
    calls = _Calls(hub, token, drain)
    server.add_generic_rpc_handlers(calls.handlers())
    real = await bound(server.add_insecure_port, address, "[coordinator] listen", others="coordinator")
    await server.start()
    return Server(server, real)


class _Calls:
    """The handlers of both services."""

    def __init__(self, hub: Hub, token: str, drain: float) -> None:
        self._hub = hub
        self._token = token.encode()
        self._drain = drain
        self._draining: dict[Exchange, asyncio.Event] = {}  # set to end it

    def handlers(self) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
        """Generic handlers without (de)serializers: messages are bytes."""
        unary, bidi = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        control: dict[str, Any] = {
            "GetRun": unary(self._guard(self._get_run)),
            "Join": unary(self._guard(self._join)),
            "GetStatus": unary(self._guard(self._get_status)),
            "Session": bidi(self._guard(self._session)),
            "Probe": unary(self._guard(self._probe)),
        }
        bulk: dict[str, Any] = {
            "Exchange": bidi(self._guard(self._exchange)),
            "Tunnel": bidi(self._guard(self._tunnel)),
            "Measure": bidi(self._guard(self._measure)),
            "PutChunks": grpc.stream_unary_rpc_method_handler(self._guard(self._put_chunks)),
            "GetChunks": grpc.unary_stream_rpc_method_handler(self._guard(self._get_chunks)),
            "GetResults": grpc.unary_stream_rpc_method_handler(self._guard(self._get_results)),
        }
        return (
            grpc.method_handlers_generic_handler(CONTROL_SERVICE, control),
            grpc.method_handlers_generic_handler(BULK_SERVICE, bulk),
        )

    def _guard(
        self, call: Callable[[Any, Context], Awaitable[bytes | None]]
    ) -> Callable[..., Awaitable[bytes | None]]:
        """Check the token; turn refusals into status codes and keep the text of other errors at home."""

        async def guarded(request: Any, context: Context) -> bytes | None:
            try:
                self._check_token(context)
                return await call(request, context)
            except Refused as refused:
                if not context.done():
                    await context.abort(getattr(grpc.StatusCode, refused.code), refused.text)
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

    def _check_token(self, context: Context) -> None:
        given = self._metadata(context, TOKEN_KEY).encode("utf-8", "replace")
        if not hmac.compare_digest(given, self._token):
            self._hub.count(BAD_TOKEN)
            raise Refused(
                BAD_TOKEN, "the invite's token is not this run's: ask for a new invite", "UNAUTHENTICATED"
            )

    def _node(self, context: Context) -> Node:
        return self._hub.node_of(self._metadata(context, SESSION_KEY))

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
        return self._reply(self._hub.get_run(self._parse(GetRunRequest, request)))

    async def _join(self, request: bytes, context: Context) -> bytes:
        return self._reply(self._hub.join(self._parse(JoinRequest, request), context.peer()))

    async def _get_status(self, request: bytes, context: Context) -> bytes:
        self._parse(StatusRequest, request)
        return self._reply(self._hub.status())

    async def _probe(self, request: bytes, context: Context) -> bytes:
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
            self._hub.close_session(node, "its session ended")

        listening = asyncio.create_task(listen(), name=f"session of {node.node}")
        try:
            while (order := await outbox.get()) is not None:
                await stream.write(order.SerializeToString())
        except Interrupted:
            raise Refused("", f"the session has ended: {node.reason}", "ABORTED") from None
        finally:
            await _cancelled(listening)
            self._hub.close_session(node, "its session broke off")

    # --------------------------------------------------------------------------------------------- bulk

    async def _exchange(self, requests: Any, context: Context) -> None:
        node = self._node(context)
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
                await _cancelled(uploading)

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
                await _cancelled(listening)

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
        message = await stream.read()
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
        await self._send(node, context, "state", self._hub.chunks, asked)

    async def _get_results(self, request: bytes, context: Context) -> None:
        node = self._node(context)
        asked = self._parse(ResultsRequest, request, "result", node.node)
        await self._send(node, context, "result", self._hub.results, asked, replayed=asked.first)

    async def _send(
        self,
        node: Node,
        context: Context,
        content: Content,
        answer: Callable[[Node, M], AsyncGenerator[bytes, None]],
        request: M,
        *,
        replayed: int | None = None,
    ) -> None:
        """Send what answers a request, at the pace that the rounds leave; as long as it is read."""
        stream, stall = Stream(context, self._hub, node, content), self._hub.plan.stall
        loop = asyncio.get_running_loop()
        try:
            with self._hub.pacer.flow(replayed) as flow:
                async with contextlib.aclosing(answer(node, request)) as frames:
                    async for frame in frames:
                        while pause := flow.pause(len(frame)):
                            await asyncio.sleep(pause)
                        if node.state == "left":
                            raise Refused("", f"the session has ended: {node.reason}", "ABORTED")
                        alarm = loop.call_later(stall, stream.interrupt)
                        try:
                            await stream.write(frame)
                        except Interrupted:
                            text = f"{node.node} has not read for {stall:g} s"
                            raise Refused(STALLED, text, "DEADLINE_EXCEEDED") from None
                        finally:
                            alarm.cancel()
                        self._hub.moved(node)
        except Refused as refused:
            self._hub.count(refused.kind)
            raise


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel ``task`` and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
