"""The calls that a carrier makes: each from its opening to its status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from grpc import aio

from node.exchange.link import Call, seen_out
from node.exchange.peers.call_stream import CallStream
from node.exchange.peers.serving import TaskSet
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble

Diagnosis = Callable[[aio.AioRpcError], Trouble]

_LATE: Final = "the stream is over"
_CLOSED: Final = "this node opens no more streams"


class Calls:
    """Streams that this side has opened.

    Args:
        tasks: runs one for each, until its call has ended.
    """

    def __init__(self, tasks: TaskSet) -> None:
        self._tasks = tasks

    def check(self) -> None:
        """Raises :class:`Trouble` once the carrier is closed."""
        if self._tasks.closed:
            raise Trouble(Kind.BROKEN, _CLOSED)

    async def open(
        self,
        call: Call,
        peer: str,
        diagnose: Diagnosis,
        *,
        seconds: float,
        at_once: bool = False,
        on_proof: Callable[[bool], None] = lambda good: None,
        on_over: Callable[[], None] = lambda: None,
    ) -> CallStream:
        """The stream of ``call``, once the other side has taken it.

        Args:
            call: that has just been made.
            peer: whom it reaches, for people.
            diagnose: what a bad status of it means.
            seconds: for the other side to take it.
            at_once: do not wait for that, which is a round trip; a stream that is not taken breaks.
            on_proof: called with true when it has been taken, with false when it has not, or has broken.
            on_over: called when the call has ended, whatever becomes of it.

        Raises:
            Trouble: it was not taken in time, or refused.
        """

        def explain(error: BaseException) -> Trouble:
            return diagnose(error) if isinstance(error, aio.AioRpcError) else Trouble(Kind.BROKEN, _LATE)

        async def taken() -> None:
            try:
                await within(seconds, f"a stream to {peer}", call.initial_metadata())
                if call.done() and (status := await _failure(call)) is not None:
                    raise diagnose(status)
            except Trouble:
                on_proof(False)
                raise
            on_proof(True)

        if not at_once:
            try:
                await taken()
                self.check()
            except BaseException:
                call.cancel()
                on_over()
                raise
        stream = CallStream(call, peer, explain)
        if at_once:
            self._tasks.start(_broken_unless(taken(), stream), f"taking of a stream to {peer}")
        self._tasks.start(_seen_to_its_end(call, stream, on_proof, on_over), f"stream to {peer}")
        return stream


async def _broken_unless(taken: Awaitable[None], stream: CallStream) -> None:
    try:
        await taken
    except Trouble as trouble:
        stream.broke(trouble)


async def _failure(call: Call) -> aio.AioRpcError | None:
    try:
        await call.wait_for_connection()
    except aio.AioRpcError as error:
        return error
    return None


async def _seen_to_its_end(
    call: Call, stream: CallStream, on_proof: Callable[[bool], None], on_over: Callable[[], None]
) -> None:
    try:
        await asyncio.wait({stream.closed})
        if stream.trouble is None:
            await seen_out(call)
        else:
            on_proof(False)
    finally:
        stream.broke(Trouble(Kind.BROKEN, "the carrier has been closed"))
        call.cancel()
        on_over()
    await stream.settled()
