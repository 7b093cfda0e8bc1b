"""A node's stream to itself keeps the promises of every stream between nodes."""

from __future__ import annotations

import asyncio

import pytest

from node.exchange.peers.loopback import pair
from node.exchange.trouble import Trouble
from protos.wire import MAX_MESSAGE_BYTES
from tests.node.peers.desk_rig import idle, soon


async def test_messages_arrive_in_order_in_both_directions() -> None:
    a, b = pair()
    for index in range(5):
        await a.write(b"a%d" % index)
        await b.write(b"b%d" % index)
    await a.end()
    assert [await b.read() for _ in range(6)] == [b"a0", b"a1", b"a2", b"a3", b"a4", None]
    await b.write(b"after the end of the other direction")
    assert [await a.read() for _ in range(6)][-1] == b"after the end of the other direction"


async def test_a_writer_waits_for_a_slow_reader_and_then_goes_on() -> None:
    a, b = pair()
    written: list[int] = []

    async def write() -> None:
        for index in range(50):
            await a.write(b"x" * index)
            written.append(index)

    task = asyncio.ensure_future(write())
    await idle()
    before = len(written)
    assert 0 < before < 50
    await idle()
    assert len(written) == before
    for index in range(50):
        assert await soon(b.read()) == b"x" * index
    await soon(task)


@pytest.mark.parametrize("side", [0, 1])
async def test_giving_up_wakes_everybody_who_waits(side: int) -> None:
    ends = pair()
    reads = [asyncio.ensure_future(end.read()) for end in ends]
    for _ in range(8):
        await ends[0].write(b"x")
    await reads[1]
    await ends[0].write(b"x")
    write = asyncio.ensure_future(ends[0].write(b"one too many"))
    await idle()
    assert not reads[0].done() and not write.done()
    ends[side].cancel()
    ends[side].cancel()
    for waiting in (reads[0], write, ends[1].read(), ends[1].write(b"x")):
        with pytest.raises(Trouble):
            await soon(waiting)
    await ends[0].end()  # nothing to say any more


async def test_giving_up_after_both_ends_takes_nothing_away() -> None:
    a, b = pair()
    await a.write(b"last")
    await a.end()
    await b.end()
    a.cancel()
    assert [await b.read(), await b.read(), await a.read()] == [b"last", None, None]


async def test_nothing_is_written_behind_the_end() -> None:
    a, _ = pair()
    await a.end()
    with pytest.raises(Trouble, match="behind the end"):
        await a.write(b"x")


async def test_a_message_that_is_too_long_breaks_the_stream() -> None:
    a, b = pair()
    await a.write(bytes(MAX_MESSAGE_BYTES))
    with pytest.raises(Trouble, match="at most"):
        await a.write(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(Trouble, match="at most"):
        await b.read()
