"""The network: gRPC channels between nodes and a coordinator, without gRPC, on virtual time.

A node's real link makes its calls on a :class:`Channel`; they reach the real handlers of the coordinator's
server. Messages of one call arrive in order, as on a connection; calls overtake each other. Lines can be
slow, silent or cut, and processes asleep.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import grpc
from grpc import aio

from coordinator import server
from coordinator.hub import Hub

LATENCY: Final = (0.001, 0.02)  # seconds, drawn for every message
KEEPALIVE: Final = 6.0  # seconds of silence after which both ends of a line give its calls up
TOKEN: Final = "simulated"

Act = Callable[[], None]


@dataclass(eq=False)
class Process:
    """A process, as far as the network knows: before ``awake_at`` it neither hears nor says anything."""

    name: str
    awake_at: float = 0.0
    alive: bool = True


@dataclass(eq=False)
class Line:
    """What lies between a node and the coordinator."""

    name: str
    random: random.Random
    silent_until: float = 0.0  # nothing arrives before, on either side
    slow_until: float = 0.0
    slow_by: float = 0.0  # seconds that every message sent before takes longer
    spread_until: float = 0.0
    spread_by: float = 0.0  # seconds by which calls are apart: they overtake each other
    doubled: bool = False  # the next contribution travels twice
    calls: list[Call] = field(default_factory=list)

    def latency(self, now: float, share: float) -> float:
        """Seconds for a message of a call whose ``share`` of the spread was drawn with it."""
        seconds = self.random.uniform(*LATENCY)
        if now < self.slow_until:
            seconds += self.slow_by
        if now < self.spread_until:
            seconds += self.spread_by * share
        return seconds

    def cut(self, client: bool = True, coordinator: bool = True) -> None:
        """Break all calls, for both ends or for one of them."""
        for call in list(self.calls):
            call.broken(client, coordinator)


class _Wire:
    """One direction of a call."""

    def __init__(self, line: Line, sender: Process, receiver: Process) -> None:
        self._loop = asyncio.get_running_loop()
        self.line, self._sender, self._receiver = line, sender, receiver
        self._share = line.random.random()
        self._queue: deque[Act] = deque()
        self._due = 0.0
        self.dead = False

    def put(self, act: Act) -> None:
        """Let ``act`` happen at the other end."""
        now = max(self._loop.time(), self._sender.awake_at)
        self._due = max(self._due, now + self.line.latency(now, self._share))
        self._queue.append(act)
        self._loop.call_at(self._due, self._next)

    def _next(self) -> None:
        if self.dead:
            return
        ready = max(self.line.silent_until, self._receiver.awake_at)
        if ready > self._loop.time():
            self._loop.call_at(ready, self._next)
        elif self._queue:
            self._queue.popleft()()


class _Inbox:
    """Messages that have arrived; read by one reader."""

    def __init__(self) -> None:
        self.messages: deque[bytes] = deque()
        self.over = False
        self._changed = asyncio.Event()

    def add(self, message: bytes) -> None:
        """One more."""
        self.messages.append(message)
        self._changed.set()

    def end(self) -> None:
        """There will be no more."""
        self.over = True
        self._changed.set()

    async def wait(self) -> None:
        """Until there is a message, or never will be."""
        while not self.messages and not self.over:
            self._changed.clear()
            await self._changed.wait()


class Call:
    """A call, seen from the node: what ``grpc.aio`` gives for a stream in either or both directions."""

    def __init__(self, channel: Channel, path: str, codec: _Codec, metadata: Iterable[Any]) -> None:
        self.path, self.metadata = path, tuple(metadata)
        self.name = path.rpartition("/")[2]
        self._codec = codec
        self._channel, self.line = channel, channel.line
        self.site, self._process = channel.site, channel.process
        self._up = _Wire(self.line, self._process, self.site.process)
        self._down = _Wire(self.line, self.site.process, self._process)
        self._answers = _Inbox()
        self._over = asyncio.Event()
        self._status: tuple[grpc.StatusCode, str] | None = None
        self._closed = False  # the node's side
        self._written = 0
        self._alarm: asyncio.TimerHandle | None = None
        self._double: Call | None = None
        self.context = Context(self)
        self.line.calls.append(self)

    # ------------------------------------------------------------------------------------ the node's side

    def begin(self, request: bytes | None, timeout: float | None) -> None:
        """Let the coordinator know of it."""
        self._up.put(lambda: self.site.answer(self, request))
        if timeout is not None:
            self._alarm = asyncio.get_running_loop().call_later(timeout, self._expired)

    async def write(self, message: Any) -> None:
        """Send."""
        data = self._codec.encode(message)
        await self._channel.on_write(self, self._written)
        self._written += 1
        self._check_open()
        if self.name == "Exchange" and self._written == 1 and self.line.doubled:
            self.line.doubled = False
            self._double = Call(self._channel, self.path, self._codec, self.metadata)
            self._double.begin(None, None)
        for call in (self, self._double):
            if call is not None and call._status is None:
                call._put(data)
        await asyncio.sleep(0)

    def _put(self, data: bytes) -> None:
        self._up.put(lambda: self.context.requests.add(data))

    async def done_writing(self) -> None:
        """Nothing more will be written."""
        await self._channel.on_write(self, self._written)
        self._check_open()
        self._closed = True
        for call in (self, self._double):
            if call is not None:
                call._up.put(call.context.requests.end)

    async def read(self) -> Any:
        """The next message, ``aio.EOF`` after the last."""
        await self._answers.wait()
        if self._answers.messages:
            return self._codec.decode(self._answers.messages.popleft())
        self._raise()
        return aio.EOF

    def __await__(self) -> Generator[Any, None, Any]:
        return self._reply().__await__()

    async def _reply(self) -> Any:
        await self._over.wait()
        self._raise()
        return self._codec.decode(self._answers.messages.popleft())

    async def code(self) -> grpc.StatusCode:
        """The status, once it has come."""
        await self._over.wait()
        assert self._status is not None
        return self._status[0]

    def cancel(self) -> bool:
        """Give it up."""
        if self._status is not None:
            return False
        self.settle(grpc.StatusCode.CANCELLED, "Locally cancelled by application!", forget=False)
        self._up.put(self._gone)
        return True

    def _expired(self) -> None:
        if self._status is None:
            self.settle(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", forget=False)
            self._up.put(self._gone)

    def _check_open(self) -> None:
        self._raise()
        if self._status is not None or self._closed:
            raise asyncio.InvalidStateError("the call is over")

    def _raise(self) -> None:
        if self._status is not None and self._status[0] is not grpc.StatusCode.OK:
            code, details = self._status
            if code is grpc.StatusCode.CANCELLED:
                raise asyncio.CancelledError
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details)

    def settle(self, code: grpc.StatusCode, details: str, *, forget: bool = True) -> None:
        """The node learns how it ended."""
        if self._status is None:
            self._status = code, details
            self._answers.end()
            self._over.set()
            if self._alarm is not None:
                self._alarm.cancel()
        if forget and self in self.line.calls:
            self.line.calls.remove(self)

    # ------------------------------------------------------------------------------------ the coordinator's

    def say(self, message: bytes) -> None:
        """The coordinator sends."""
        self._down.put(lambda: self._answers.add(message))

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """The coordinator has ended it."""
        self._down.put(lambda: self.settle(code, details))

    def broken(self, client: bool = True, coordinator: bool = True) -> None:
        """The connection is gone; each end may learn of it at another time."""
        self._up.dead = self._down.dead = True
        if coordinator:
            self._gone()
        if client:
            self.settle(grpc.StatusCode.UNAVAILABLE, "Socket closed", forget=coordinator)

    def _gone(self) -> None:
        self.context.cancel()
        if self in self.line.calls and self._status is not None:
            self.line.calls.remove(self)


class Context:
    """A call, seen from the coordinator: what ``grpc.aio`` gives to a handler."""

    def __init__(self, call: Call) -> None:
        self.requests = _Inbox()
        self._call = call
        self._ended = False
        self.task: asyncio.Task[None] | None = None

    async def read(self) -> Any:
        """The next message, ``aio.EOF`` after the last."""
        await self.requests.wait()
        return self.requests.messages.popleft() if self.requests.messages else aio.EOF

    async def write(self, message: bytes) -> None:
        """Send."""
        if not self._ended:
            self._call.say(message)
            self._call.site.on_write(self._call, message)
        await asyncio.sleep(0)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status other than OK."""
        error = sys.exc_info()[1]
        if code is grpc.StatusCode.INTERNAL and isinstance(error, Exception):
            self._call.site.on_error(self._call, error)
        self.end(code, details)
        raise aio.AbortError(details)

    def end(self, code: grpc.StatusCode, details: str) -> None:
        """The handler is through."""
        if not self._ended:
            self._ended = True
            self._call.end(code, details)

    def done(self) -> bool:
        """Whether it has a status."""
        return self._ended

    def cancel(self) -> None:
        """The node has gone."""
        self._ended = True
        if self.task is not None:
            self.task.cancel()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """What came with the call."""
        return tuple((key, value) for key, value in self._call.metadata)

    def peer(self) -> str:
        """Where the node called from."""
        return f"sim:{self._call.line.name}"


@dataclass(frozen=True)
class _Details:
    """What finds a handler."""

    method: str
    invocation_metadata: tuple[Any, ...] = ()


class Site:
    """Where the coordinator listens, whichever of its incarnations is there."""

    def __init__(self) -> None:
        self.process = Process("coordinator")
        self.on_write: Callable[[Call, bytes], None] = lambda call, message: None
        self.on_answer: Callable[[Call], None] = lambda call: None
        self.on_error: Callable[[Call, Exception], None] = lambda call, error: None
        self._handlers: tuple[Any, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    def listen(self, hub: Hub) -> None:
        """``hub`` answers from now on."""
        self._handlers = server._Calls(hub, TOKEN, 10.0).handlers()

    def close(self) -> None:
        """Nobody listens; calls that are being answered end without a word."""
        self._handlers = ()
        for task in list(self._tasks):
            task.cancel()

    def answer(self, call: Call, request: bytes | None) -> None:
        """A call has arrived."""
        details = _Details(call.path)
        handler = next((found for service in self._handlers if (found := service.service(details))), None)
        if handler is None:
            call.end(grpc.StatusCode.UNAVAILABLE, "failed to connect: Connection refused")
            return
        context = contextvars.Context()  # the coordinator's, not that of the node which calls
        task = context.run(asyncio.ensure_future, self._serve(call, handler, request))
        task.set_name(f"coordinator's {call.name}")
        call.context.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.on_answer(call)

    async def _serve(self, call: Call, handler: Any, request: bytes | None) -> None:
        context = call.context
        kind = (
            handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
        )
        try:
            reply = await kind(request, context)
        except aio.AbortError:
            return
        except Exception as error:
            self.on_error(call, error)
            context.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
            return
        if reply is not None:
            await context.write(reply)
        context.end(grpc.StatusCode.OK, "")


@dataclass(frozen=True)
class _Codec:
    """Messages to bytes and back, as a call was told."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


async def _no_hook(call: Call, index: int) -> None:
    """Nothing happens before a write."""


class Channel:
    """What a link uses of ``grpc.aio.Channel``.

    Args:
        site: the other end.
        line: what lies between.
        process: this end.

    Attributes:
        on_write: awaited before the message of that index is sent on a call.
    """

    def __init__(self, site: Site, line: Line, process: Process) -> None:
        self.site, self.line, self.process = site, line, process
        self.on_write: Callable[[Call, int], Awaitable[None]] = _no_hook

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any) -> Any:
        """See grpc."""
        return self._method(path, _Codec(request_serializer, response_deserializer))

    unary_stream = stream_unary = stream_stream = unary_unary

    def _method(self, path: str, codec: _Codec) -> Callable[..., Call]:
        def begin(request: Any, *, metadata: Iterable[Any] = (), timeout: float | None = None) -> Call:
            call = Call(self, path, codec, metadata)
            call.begin(None if request is None else codec.encode(request), timeout)
            return call

        return begin

    async def close(self, grace: float | None) -> None:
        """End every call."""
        for call in list(self.line.calls):
            if call._channel is self:
                call.cancel()
