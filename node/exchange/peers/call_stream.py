"""A stream over one gRPC call, at either end of it.

Each side's last message is an empty one (:data:`protos.wire.PEER_END`): to the side that answers a call, the
end of a caller that dies looks like that of one that is done. The call itself ends after both of these, so
never while a side still writes, which would cost the caller what it has not read (gRPC issue 36066).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol, TypeVar

from node.exchange.trouble import Kind, Trouble
from protos.wire import MAX_MESSAGE_BYTES, PEER_END

T = TypeVar("T")

_OVER: Final = "the stream has been given up"


class RawCall(Protocol):
    """What gRPC's calls and server contexts have in common; ``read`` returns no bytes at the end."""

    async def read(self) -> Any:
        """A message."""
        ...

    async def write(self, message: bytes) -> None:
        """Send one."""
        ...


class CallStream:
    """Implements :class:`node.exchange.peers.base.PeerStream`.

    A call of :meth:`read` or :meth:`write` that is cancelled leaves the stream as it is: the message that was
    waited for comes with the next read, the one that was being written goes on its way.

    Args:
        call: that has begun.
        peer: whose other end it is, for people.
        explain: what an exception of the call means.
    """

    def __init__(self, call: RawCall, peer: str, explain: Callable[[BaseException], Trouble]) -> None:
        self._call = call
        self._peer = peer
        self._explain = explain
        self._reading: asyncio.Task[Any] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._ended = False
        self._heard_end = False
        self._trouble: Trouble | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def trouble(self) -> Trouble | None:
        """Why the stream broke, ``None`` as long as it has not: once :attr:`closed` is done, both sides have
        ended it."""
        return self._trouble

    async def read(self) -> bytes | None:
        """See the protocol."""
        if self._heard_end:
            return None
        if self._reading is None:
            self._reading = _started(self._call.read())
        message = await self._result(self._reading)
        self._reading = None
        if not isinstance(message, bytes):
            raise self.broke(Trouble(Kind.CUT, f"{self._peer} broke off a stream without ending it"))
        if len(message) > MAX_MESSAGE_BYTES:
            raise self.broke(Trouble(Kind.PROTOCOL, f"{self._peer} sent {_too_long(message)}"))
        if message == PEER_END:
            self._heard_end = True
            self._close_once_over()
            return None
        return message

    async def write(self, message: bytes) -> None:
        """See the protocol."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise self.broke(Trouble(Kind.PROTOCOL, f"this node was to send {_too_long(message)}"))
        if self._ended or message == PEER_END:
            raise Trouble(Kind.PROTOCOL, "a message was written behind the end of a stream, or an empty one")
        await self._written()  # one whose caller was cancelled
        self._writing = _started(self._call.write(message))
        await self._written()

    async def end(self) -> None:
        """See the protocol."""
        if not self._ended:
            await self._written()
            self._ended = True
            self._writing = _started(self._call.write(PEER_END))
            self._writing.add_done_callback(self._close_once_over)
        await self._written()

    def cancel(self) -> None:
        """See the protocol."""
        self.broke(Trouble(Kind.BROKEN, _OVER))

    def broke(self, trouble: Trouble) -> Trouble:
        """The stream is of no use any more, unless it is over already; returns ``trouble``."""
        if not self.closed.done():
            self._trouble = trouble
            self.closed.set_result(None)
            for task in (self._reading, self._writing):
                if task is not None:
                    task.cancel()
        return trouble

    async def settled(self) -> None:
        """Wait for what is left of a stream that is closed."""
        tasks = {task for task in (self._reading, self._writing) if task is not None}
        if tasks:
            await asyncio.wait(tasks)

    async def _written(self) -> None:
        if self._writing is not None:
            await self._result(self._writing)
            self._writing = None

    def _close_once_over(self, _: object = None) -> None:
        written = self._ended and (self._writing is None or self._writing.done())
        if written and self._heard_end and not self.closed.done():
            self.closed.set_result(None)

    async def _result(self, task: asyncio.Task[T]) -> T:
        """Wait for one operation, or the end of the stream."""
        either: set[asyncio.Future[Any]] = {task, self.closed}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._trouble is not None:
            raise Trouble(self._trouble.kind, str(self._trouble))
        if not task.done() or task.cancelled():
            raise self.broke(Trouble(Kind.BROKEN, _OVER))
        if (error := task.exception()) is not None:
            raise self.broke(self._explain(error))
        return task.result()


def _started(operation: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    task = asyncio.ensure_future(operation)
    task.add_done_callback(
        lambda done: done.cancelled() or done.exception()
    )  # nobody may be waiting any more
    return task


def _too_long(message: bytes) -> str:
    return f"a message of {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are carried"
