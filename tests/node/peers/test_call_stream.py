"""How far a stream over a gRPC call is ahead of who reads, and behind who writes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from node.exchange.peers.call_stream import CallStream
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble
from protos.wire import PEER_END

DEADLINE = 100.0


class FakeCall:
    """Its other side takes, and says, what the test lets it."""

    def __init__(self) -> None:
        self.reads = 0
        self.coming: asyncio.Queue[bytes] = asyncio.Queue()
        self.written: list[bytes] = []
        self.room = asyncio.Semaphore(0)
        self.error: Exception | None = None

    async def read(self) -> bytes:
        self.reads += 1
        return await self.coming.get()

    async def write(self, message: bytes) -> None:
        await self.room.acquire()
        if self.error is not None:
            raise self.error
        self.written.append(message)


def play(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE))


def stream_of(call: FakeCall) -> CallStream:
    return CallStream(call, "node-1", lambda error: Trouble(Kind.BROKEN, f"it broke: {error}"))


async def idle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_reader_that_is_slow_has_few_messages_waiting() -> None:
    async def test() -> None:
        call = FakeCall()
        stream = stream_of(call)
        for number in range(10):
            call.coming.put_nowait(bytes([number]))
        await idle()
        assert call.reads == 0  # nobody has asked for anything
        assert await stream.read() == b"\0"
        await idle()
        assert call.reads == 3
        assert [await stream.read() for _ in range(9)] == [bytes([number]) for number in range(1, 10)]
        stream.cancel()
        await stream.settled()

    play(test())


def test_a_writer_is_one_message_ahead_and_the_end_waits_for_all() -> None:
    async def test() -> None:
        call = FakeCall()
        stream = stream_of(call)
        await stream.write(b"1")
        await stream.write(b"2")
        third = asyncio.ensure_future(stream.write(b"3"))
        await idle()
        assert not third.done() and call.written == []
        call.room.release()
        await third
        ending = asyncio.ensure_future(stream.end())
        for _ in range(2):
            call.room.release()
            await idle()
            assert not ending.done()
        call.room.release()
        await ending
        assert call.written == [b"1", b"2", b"3", PEER_END]
        stream.cancel()

    play(test())


def test_what_is_given_up_is_neither_lost_nor_sent_twice() -> None:
    async def test() -> None:
        call = FakeCall()
        stream = stream_of(call)
        await stream.write(b"1")
        await stream.write(b"2")
        with pytest.raises(Trouble, match="a message took longer"):
            await within(0.001, "a message", stream.write(b"given up"))
        with pytest.raises(Trouble, match="a message took longer"):
            await within(0.001, "a message", stream.read())
        for _ in range(4):
            call.room.release()
        await stream.write(b"3")
        await stream.end()
        assert call.written == [b"1", b"2", b"3", PEER_END]
        call.coming.put_nowait(b"answer")
        assert await stream.read() == b"answer"
        stream.cancel()

    play(test())


def test_a_write_that_fails_later_breaks_the_stream_for_both_directions() -> None:
    async def test() -> None:
        call = FakeCall()
        stream = stream_of(call)
        reading = asyncio.ensure_future(stream.read())
        await stream.write(b"1")
        call.error = RuntimeError("gone")
        call.room.release()
        for operation in (reading, stream.write(b"2"), stream.end()):
            with pytest.raises(Trouble, match="it broke: gone"):
                await operation
        assert stream.trouble is not None and stream.closed.done()
        await stream.settled()

    play(test())
