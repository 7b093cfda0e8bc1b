"""A raw stream taken over from reader and writer, and given back: in Python's event loop and in uvloop's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from node.exchange.retry import within
from node.exchange.swarm.records import Records
from node.exchange.swarm.relaying import RawStream

SECONDS = 60.0
ALONE = 1 << 24  # heads from here on are records by themselves
STOP = ALONE + 1  # behind which the stream is given back

Case = Callable[[RawStream, RawStream], Awaitable[None]]


class Taken:
    """What has come, and news of it."""

    def __init__(self, pause: bool = False) -> None:
        self.records: Records
        self.heads: list[int] = []
        self.messages: list[bytes] = []
        self.nbytes = 0
        self.lost: Exception | None = None
        self._pause = pause
        self._changed = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async def waited() -> None:
            while not condition():
                self._changed.clear()
                await self._changed.wait()

        await within(SECONDS, "what was sent", waited())

    def take_bytes(self, nbytes: int) -> None:
        self.nbytes += nbytes
        self._changed.set()

    def take_head(self, head: int) -> int | None:
        if head < ALONE:
            return head
        self.heads.append(head)
        if head == STOP:
            self.records.give_back()
        self._changed.set()
        return None

    def take_message(self, message: memoryview) -> None:
        self.messages.append(bytes(message))
        if self._pause:
            self.records.pause()
        self._changed.set()

    def take_loss(self, error: Exception) -> None:
        self.lost = error
        self._changed.set()


def over(raw: RawStream, *, pause: bool = False) -> Taken:
    taken = Taken(pause)
    taken.records = Records(raw, taken)
    taken.records.start()
    return taken


def record(head: int, body: bytes = b"") -> bytes:
    return head.to_bytes(4, "little") + body


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def in_loop(request: pytest.FixtureRequest) -> Any:
    """Runs a case with both ends of a raw stream."""

    def run(case: Case) -> None:
        async def with_ends() -> None:
            here, there = [await asyncio.open_connection(sock=one) for one in socket.socketpair()]
            try:
                await case(here, there)
            finally:
                here[1].close()
                there[1].close()

        loop = request.param()
        try:
            loop.run_until_complete(with_ends())
        finally:
            loop.close()

    return run


def test_messages_come_whole_also_those_that_the_reader_held(in_loop: Any) -> None:
    big = bytes(range(256)) * 3000

    async def case(here: RawStream, there: RawStream) -> None:
        there[1].write(b"!" + record(3, b"abc") + record(5, b"de"))
        assert await here[0].readexactly(1) == b"!"  # so the reader holds the rest
        taken = over(here)
        assert taken.messages == [b"abc"]
        there[1].write(b"fgh" + record(0) + record(ALONE) + record(len(big), big))
        await taken.until(lambda: len(taken.messages) == 4)
        assert taken.messages[1:] == [b"defgh", b"", big] and taken.heads == [ALONE]
        assert taken.nbytes == 5 * 4 + 3 + 5 + len(big)

    in_loop(case)


@pytest.mark.parametrize("held", [False, True], ids=["comes", "held"])
def test_what_is_given_back_goes_on_behind_the_last_record(in_loop: Any, held: bool) -> None:
    async def case(here: RawStream, there: RawStream) -> None:
        last = record(2, b"ab") + record(STOP) + b"more"
        if held:
            there[1].write(b"!" + last)
            assert await here[0].readexactly(1) == b"!"
            taken = over(here)
        else:
            taken = over(here)
            there[1].write(last)
            await taken.until(lambda: taken.heads == [STOP])
        assert taken.messages == [b"ab"]
        assert await within(SECONDS, "the rest", here[0].readexactly(4)) == b"more"
        here[1].write(b"answer")
        await here[1].drain()
        assert await within(SECONDS, "the answer", there[0].readexactly(6)) == b"answer"
        again = over(here)
        there[1].write(record(1, b"x"))
        await again.until(lambda: again.messages == [b"x"])
        assert taken.lost is None and taken.nbytes == 10

    in_loop(case)


def test_nothing_is_read_while_it_is_paused(in_loop: Any) -> None:
    async def case(here: RawStream, there: RawStream) -> None:
        taken = over(here, pause=True)
        there[1].write(record(1, b"a") + record(1, b"b"))
        await taken.until(lambda: bool(taken.messages))
        more = record(1 << 20, bytes(1 << 20))
        there[1].write(more * 4)  # beyond what the system holds
        assert there[1].transport.get_write_buffer_size() > 0
        for expected in range(2, 7):
            taken.records.resume()
            await taken.until(lambda expected=expected: len(taken.messages) >= expected)  # type: ignore[misc]
            for _ in range(50):  # turns of the loop, in each of which it would read on
                await asyncio.sleep(0)
            assert len(taken.messages) == expected
        assert taken.messages[:2] == [b"a", b"b"] and taken.nbytes == 2 * 5 + 4 * len(more)

    in_loop(case)


def test_who_writes_waits_for_room(in_loop: Any) -> None:
    async def case(here: RawStream, there: RawStream) -> None:
        taken = over(here)
        size = 1 << 20
        assert taken.records.write(4 * size, bytes(4 * size))
        assert taken.records.waiting > 0
        drained = asyncio.ensure_future(taken.records.drained())
        assert await there[0].readexactly(4) == (4 * size).to_bytes(4, "little")
        assert not drained.done()
        assert await within(SECONDS, "the message", there[0].readexactly(4 * size)) == bytes(4 * size)
        await within(SECONDS, "room", drained)

    in_loop(case)


def test_an_end_is_told_apart_from_a_break(in_loop: Any) -> None:
    async def case(here: RawStream, there: RawStream) -> None:
        taken = over(here)
        there[1].write(record(3, b"ab"))
        there[1].close()
        await taken.until(lambda: taken.lost is not None)
        assert isinstance(taken.lost, EOFError) and taken.messages == []
        await within(SECONDS, "the close", here[1].wait_closed())  # who had the writer hears of it
        assert not taken.records.write(1, b"x")
        await taken.records.drained()

    in_loop(case)


def test_an_end_that_the_reader_knew_is_told_behind_what_it_held(in_loop: Any) -> None:
    async def case(here: RawStream, there: RawStream) -> None:
        there[1].write(b"!" + record(2, b"ab"))
        there[1].close()
        assert await here[0].readexactly(1) == b"!"
        while not here[0]._eof:  # type: ignore[attr-defined]
            await asyncio.sleep(0)
        taken = over(here)
        assert taken.messages == [b"ab"] and isinstance(taken.lost, EOFError)

    in_loop(case)


def test_what_broke_before_is_told(in_loop: Any) -> None:
    async def case(here: RawStream, there: RawStream) -> None:
        here[0].set_exception(ConnectionResetError("reset by peer"))
        taken = over(here)
        assert isinstance(taken.lost, ConnectionResetError)

    in_loop(case)


def test_nothing_is_taken_behind_a_close(in_loop: Any) -> None:
    async def case(here: RawStream, there: RawStream) -> None:
        taken = over(here)
        taken.records.close(at_once=True)
        assert await within(SECONDS, "the end", there[0].read(1)) == b""
        await within(SECONDS, "the close", here[1].wait_closed())
        assert taken.lost is None

    in_loop(case)
