"""One call of a node: its messages, counted, and a way out while the peer keeps it waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, TypeVar

from coordinator.hub import Hub
from coordinator.nodes import Node
from protos.refusal import STALLED, Refused
from protos.traffic import Content

Context = Any  # grpc.aio.ServicerContext[bytes, bytes]; the stubs lack its read and write
T = TypeVar("T")


async def within(seconds: float, message: Awaitable[T]) -> T:
    """The first message of a call, whole.

    Raises:
        Refused: it took longer than ``seconds``.
    """
    try:
        return await asyncio.wait_for(message, seconds)
    except asyncio.TimeoutError:
        text = f"the first message of the call was not here within {seconds:g} s"
        raise Refused(STALLED, text, "DEADLINE_EXCEEDED") from None


async def first(context: Context, seconds: float) -> bytes:
    """The request of a call; an empty message if there was none.

    Raises:
        Refused: it took longer than ``seconds``.
    """
    message = await within(seconds, context.read())
    return message if isinstance(message, bytes) else b""


class Interrupted(Exception):
    """A write, or an interruptible read, was given up because the hub has closed the stream."""


class Stream:
    """One call's messages: counts bytes, and can be interrupted while the peer does not read.

    Args:
        context: of the call.
        hub, node: whose bytes are counted.
        up: what the node sends is.
        down: what it receives is; the same by default.
    """

    def __init__(
        self, context: Context, hub: Hub, node: Node, up: Content, down: Content | None = None
    ) -> None:
        self._context = context
        self._hub = hub
        self._node = node
        self._up, self._down = up, down or up
        self._task = asyncio.current_task()
        self._waiting = False  # in a way that can be interrupted
        self._interrupted = False

    async def write(self, message: bytes) -> None:
        """Send; raises :class:`Interrupted` after :meth:`interrupt`."""
        await self._interruptible(self._context.write(message))
        self._hub.sent(len(message), self._down, self._node.node)
        self._node.bytes_out += len(message)

    async def read(self, *, interruptible: bool = False) -> bytes | None:
        """The next message, ``None`` at the end of the peer's side."""
        reading = self._context.read()
        message = await (self._interruptible(reading) if interruptible else reading)
        if not isinstance(message, bytes):  # EOF
            return None
        self._hub.received(len(message), self._up, self._node.node)
        self._node.bytes_in += len(message)
        return message

    async def _interruptible(self, operation: Awaitable[T]) -> T:
        self._waiting = True
        try:
            return await operation
        except asyncio.CancelledError:
            if self._interrupted:
                raise Interrupted from None
            raise
        finally:
            self._waiting = False

    def interrupt(self) -> None:
        """End a write that the peer's flow control holds up, or a read that waits for the peer."""
        if self._waiting and self._task is not None:
            self._interrupted = True
            self._task.cancel()


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel ``task`` and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
