"""A stream over one gRPC call, at either end of it.

Each side's last message is an empty one (:data:`protos.wire.PEER_END`): to the side that answers a call, the
end of a caller that dies looks like that of one that is done. The call itself ends after both of these, so
never while a side still writes, which would cost the caller what it has not read (gRPC issue 36066).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from node.exchange.trouble import Kind, Trouble
from protos.wire import MAX_MESSAGE_BYTES, PEER_END

_OVER: Final = "the stream has been given up"
_BEHIND: Final = "a message was written behind the end of a stream, or an empty one"
_AHEAD: Final = 2  # messages that are read before they are asked for


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

    Each direction has one task of its own, since a cancelled operation of gRPC ends the whole call. It is at
    most :data:`_AHEAD` messages ahead of who reads, or one behind who writes: a call of :meth:`read` or
    :meth:`write` that is cancelled leaves the stream as it is.

    Args:
        call: that has begun.
        peer: whose other end it is, for people.
        explain: what an exception of the call means.
    """

    def __init__(self, call: RawCall, peer: str, explain: Callable[[BaseException], Trouble]) -> None:
        self._call = call
        self._peer = peer
        self._explain = explain
        self._inbox: deque[bytes] = deque()
        self._came = asyncio.Event()  # something to read, or nothing more
        self._taken = asyncio.Event()
        self._outbox: bytes | None = None
        self._given = asyncio.Event()
        self._sent = asyncio.Event()  # the outbox is empty, or the end has been sent, or nothing more will be
        self._receiving: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._ended = self._sent_end = self._heard_end = False
        self._trouble: Trouble | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def trouble(self) -> Trouble | None:
        """Why the stream broke, ``None`` as long as it has not: once :attr:`closed` is done, both sides have
        ended it."""
        return self._trouble

    async def read(self) -> bytes | None:
        """See the protocol."""
        while not self._inbox:
            self._check()
            if self._heard_end:
                return None
            if self._receiving is None:
                self._receiving = asyncio.get_running_loop().create_task(self._receive())
            self._came.clear()
            await self._came.wait()
        self._taken.set()
        return self._inbox.popleft()

    async def write(self, message: bytes) -> None:
        """See the protocol."""
        if len(message) > MAX_MESSAGE_BYTES:
            raise self.broke(Trouble(Kind.PROTOCOL, f"this node was to send {_too_long(message)}"))
        if self._ended or message == PEER_END:
            raise Trouble(Kind.PROTOCOL, _BEHIND)
        await self._give(message)

    async def end(self) -> None:
        """See the protocol."""
        if not self._ended:
            await self._give(PEER_END)
            self._ended = True
        while not self._sent_end:
            await self._progress()

    def cancel(self) -> None:
        """See the protocol."""
        self.broke(Trouble(Kind.BROKEN, _OVER))

    def broke(self, trouble: Trouble) -> Trouble:
        """The stream is of no use any more, unless it is over already; returns ``trouble``."""
        if not self.closed.done():
            self._trouble = trouble
            self.closed.set_result(None)
            self._inbox.clear()
            self._came.set()
            self._sent.set()
            for task in (self._receiving, self._sending):
                if task is not None:
                    task.cancel()
        return trouble

    async def settled(self) -> None:
        """Wait for what is left of a stream that is closed."""
        tasks = {task for task in (self._receiving, self._sending) if task is not None}
        if tasks:
            await asyncio.wait(tasks)

    def _check(self) -> None:
        if self._trouble is not None:
            raise Trouble(self._trouble.kind, str(self._trouble))

    async def _give(self, message: bytes) -> None:
        """Put a message into the outbox, once the one before has left that."""
        self._check()
        while self._outbox is not None:
            await self._progress()
        if self._ended:
            if message == PEER_END:
                return
            raise Trouble(Kind.PROTOCOL, _BEHIND)
        self._outbox = message
        self._given.set()
        if self._sending is None:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    async def _progress(self) -> None:
        self._sent.clear()
        await self._sent.wait()
        self._check()

    async def _receive(self) -> None:
        try:
            while True:
                message = await self._call.read()
                if not isinstance(message, bytes):
                    self.broke(Trouble(Kind.CUT, f"{self._peer} broke off a stream without ending it"))
                    return
                if len(message) > MAX_MESSAGE_BYTES:
                    self.broke(Trouble(Kind.PROTOCOL, f"{self._peer} sent {_too_long(message)}"))
                    return
                if message == PEER_END:
                    break
                self._inbox.append(message)
                self._came.set()
                while len(self._inbox) >= _AHEAD:
                    self._taken.clear()
                    await self._taken.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:
            self.broke(self._explain(error))
            return
        self._heard_end = True
        self._came.set()
        self._close_once_over()

    async def _send(self) -> None:
        message: bytes | None = None
        try:
            while message != PEER_END:
                while (message := self._outbox) is None:
                    self._given.clear()
                    await self._given.wait()
                self._outbox = None
                self._sent.set()
                await self._call.write(message)
        except asyncio.CancelledError:
            self.cancel()
            raise
        except Exception as error:
            self.broke(self._explain(error))
            return
        self._sent_end = True
        self._sent.set()
        self._close_once_over()

    def _close_once_over(self) -> None:
        if self._sent_end and self._heard_end and not self.closed.done():
            self.closed.set_result(None)


def _too_long(message: bytes) -> str:
    return f"a message of {len(message)} bytes; at most {MAX_MESSAGE_BYTES} are carried"
