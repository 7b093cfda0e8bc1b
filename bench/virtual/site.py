"""The coordinator's end of the network: calls reach the handlers of its server as they are."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc
from grpc import aio

from bench.virtual.line import Inbox, Process
from coordinator.access import Access
from coordinator.calls import Calls
from coordinator.gate import Gate
from coordinator.hub import Hub

if TYPE_CHECKING:
    from bench.virtual.network import Call

TOKEN: Final = "simulated"
EOF: Final[Any] = vars(aio)["EOF"]  # the stubs lack it


class Context:
    """A call, seen from the coordinator: what ``grpc.aio`` gives to a handler."""

    def __init__(self, call: Call) -> None:
        self.requests = Inbox()
        self._call = call
        self._ended = False
        self.task: asyncio.Task[None] | None = None

    async def read(self) -> Any:
        """The next message, ``aio.EOF`` after the last."""
        await self.requests.wait()
        return self.requests.messages.popleft() if self.requests.messages else EOF

    async def write(self, message: bytes) -> None:
        """Send."""
        if not self._ended:
            self._call.say(message)
            self._call.site.on_write(self._call, message)
        await asyncio.sleep(0)

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()
    ) -> None:
        """End the call with a status other than OK."""
        error = sys.exc_info()[1]
        if code is grpc.StatusCode.INTERNAL and isinstance(error, Exception):
            self._call.site.on_error(self._call, error)
        self.end(code, details, trailing)
        raise aio.AbortError(details)

    def end(self, code: grpc.StatusCode, details: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        """The handler is through."""
        if not self._ended:
            self._ended = True
            self._call.end(code, details, trailing)

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
        gate = Gate(hub.run.now, hub.count, hub.plan.limits)
        self._handlers = Calls(hub, Access(TOKEN), 10.0, gate).handlers()

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
        if request is not None:
            call.context.requests.add(request)
            call.context.requests.end()
        context = contextvars.Context()  # the coordinator's, not that of the node which calls
        task = context.run(asyncio.ensure_future, self._serve(call, handler))
        task.set_name(f"coordinator's {call.name}")
        call.context.task = task
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.on_answer(call)

    async def _serve(self, call: Call, handler: Any) -> None:
        context = call.context
        kind = handler.stream_unary or handler.stream_stream
        try:
            reply = await kind(None, context)
        except aio.AbortError:
            return
        except Exception as error:
            self.on_error(call, error)
            context.end(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
            return
        if reply is not None:
            await context.write(reply)
        context.end(grpc.StatusCode.OK, "")
