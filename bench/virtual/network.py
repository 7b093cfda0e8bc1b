"""The network: gRPC channels between nodes and a coordinator, without gRPC, on virtual time.

A node's real link makes its calls on a :class:`Channel`; they reach the real handlers of the coordinator's
server. Messages of one call arrive in order, as on a connection; calls overtake each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from bench.virtual.line import Inbox, Line, Process, Wire
from bench.virtual.site import EOF, Context, Site


class Call:
    """A call, seen from the node: what ``grpc.aio`` gives for a stream in either or both directions."""

    def __init__(self, channel: Channel, path: str, codec: _Codec, metadata: Iterable[Any]) -> None:
        self.path, self.metadata = path, tuple(metadata)
        self.name = path.rpartition("/")[2]
        self._codec = codec
        self._channel, self.line = channel, channel.line
        self.site, self._process = channel.site, channel.process
        self._up = Wire(self.line, self._process, self.site.process)
        self._down = Wire(self.line, self.site.process, self._process)
        self._answers = Inbox()
        self._over = asyncio.Event()
        self._status: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None
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
        return EOF

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
            code, details, trailing = self._status
            if code is grpc.StatusCode.CANCELLED:
                raise asyncio.CancelledError
            raise aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), details, None)

    def settle(
        self,
        code: grpc.StatusCode,
        details: str,
        trailing: tuple[tuple[str, str], ...] = (),
        *,
        forget: bool = True,
    ) -> None:
        """The node learns how it ended."""
        if self._status is None:
            self._status = code, details, trailing
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

    def end(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        """The coordinator has ended it."""
        self._down.put(lambda: self.settle(code, details, trailing))

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
