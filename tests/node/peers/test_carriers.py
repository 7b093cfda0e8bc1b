"""The contract of carriers and their streams, kept by every one of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from node.exchange.peers.base import PeerStream
from node.exchange.retry import within
from node.exchange.trouble import Trouble
from protos.wire import MAX_MESSAGE_BYTES
from tests.node.peers.carriers_rig import NEEDS_SWARM, RIGS, SWARM, Daemons, MakeRig, Rig, Served, soon

MANY = 96  # messages of the largest size: more than any carrier holds on its way

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def daemons() -> AsyncIterator[Daemons]:
    daemons = Daemons()
    try:
        await daemons.start()
        yield daemons
    finally:
        await daemons.close()


@pytest.fixture(params=[*RIGS, pytest.param(SWARM, marks=NEEDS_SWARM)])
def make(request: pytest.FixtureRequest) -> MakeRig:
    if request.param == SWARM:
        daemons: Daemons = request.getfixturevalue("daemons")
        return daemons.rig
    return RIGS[request.param]


@pytest_asyncio.fixture(loop_scope="module")
async def rig(make: MakeRig) -> AsyncIterator[Rig]:
    async with make() as made:
        yield made


def messages(count: int, seed: int) -> list[bytes]:
    """Of many sizes, the largest among them."""
    draw = random.Random(seed)
    sizes = [1, MAX_MESSAGE_BYTES, *(draw.choice((1, 16, 4096, 70_000)) for _ in range(count - 2))]
    draw.shuffle(sizes)
    return [bytes([draw.randrange(256)]) * size for size in sizes]


async def write_all(stream: PeerStream, told: list[bytes]) -> None:
    for message in told:
        await stream.write(message)
    await stream.end()


async def read_all(stream: PeerStream) -> list[bytes]:
    heard = []
    while (message := await stream.read()) is not None:
        heard.append(bytes(message))
    return heard


async def fails(operation: object) -> Trouble:
    with pytest.raises(Trouble) as trouble:
        await soon(operation)  # type: ignore[type-var]
    return trouble.value


async def finish(mine: PeerStream, served: Served) -> None:
    """Both sides end properly."""
    await soon(mine.end())
    served.leave()
    assert await soon(mine.read()) is None


# ------------------------------------------------------------------------------------------- order and pace


async def test_messages_arrive_in_order_in_both_directions_at_once(rig: Rig) -> None:
    mine, served = await rig.stream()
    up, down = messages(150, 1), messages(150, 2)
    _, _, came_up, came_down = await soon(
        asyncio.gather(
            write_all(mine, up), write_all(served.stream, down), read_all(served.stream), read_all(mine)
        )
    )
    assert came_up == up and came_down == down
    assert await soon(mine.read()) is None and await soon(served.stream.read()) is None


@pytest.mark.parametrize("upwards", [True, False])
async def test_a_reader_that_does_not_read_holds_the_writer_up(rig: Rig, upwards: bool) -> None:
    mine, served = await rig.stream()
    writer, reader = (mine, served.stream) if upwards else (served.stream, mine)
    written = 0

    async def write() -> None:
        nonlocal written
        for number in range(MANY):
            await writer.write(bytes([number]) * MAX_MESSAGE_BYTES)
            written += 1
        await writer.end()

    writing = asyncio.ensure_future(write())
    await asyncio.wait({writing}, timeout=0.5)
    assert not writing.done() and written < MANY
    # The other direction is not held up by it.
    await soon(reader.write(b"still here"))
    assert await soon(writer.read()) == b"still here"
    for number in range(MANY):
        message = await soon(reader.read())
        assert message is not None and message[0] == number and len(message) == MAX_MESSAGE_BYTES
    assert await soon(reader.read()) is None
    await soon(writing)


async def test_a_read_that_is_given_up_loses_no_message(rig: Rig) -> None:
    mine, served = await rig.stream()
    for number in range(5):
        with pytest.raises(Trouble, match="a message took longer"):
            await within(0.001, "a message", served.stream.read())
        await soon(mine.write(bytes([number])))
        assert await soon(served.stream.read()) == bytes([number])
    await finish(mine, served)


async def test_a_hundred_streams_at_once(rig: Rig) -> None:
    async def answer() -> None:
        served = await rig.arrivals.get()
        for message in await read_all(served.stream):
            await served.stream.write(message[::-1])
        served.leave()

    async def ask(number: int) -> None:
        mine = await rig.calling.open(rig.peer)
        told = [f"{number}: {part}".encode() * 50 for part in range(3)]
        await write_all(mine, told)
        assert await read_all(mine) == [message[::-1] for message in told]

    await soon(asyncio.gather(*(answer() for _ in range(100)), *(ask(number) for number in range(100))))


# ------------------------------------------------------------------------------------------- proper ends


@pytest.mark.parametrize("caller_first", [True, False])
async def test_each_side_ends_its_own_direction(rig: Rig, caller_first: bool) -> None:
    mine, served = await rig.stream()
    first, second = (mine, served.stream) if caller_first else (served.stream, mine)
    await soon(first.write(b"last words"))
    await soon(first.end())
    await soon(first.end())
    assert await soon(read_all(second)) == [b"last words"]
    assert await soon(second.read()) is None
    await fails(first.write(b"one more"))
    for number in range(3):
        await soon(second.write(bytes([number])))
    await soon(second.end())
    assert await soon(read_all(first)) == [b"\0", b"\1", b"\2"]


async def test_cancelling_a_stream_that_is_over_takes_nothing_back(rig: Rig) -> None:
    mine, served = await rig.stream()
    told = [bytes([number]) * MAX_MESSAGE_BYTES for number in range(3)]
    await soon(served.stream.end())
    assert await soon(mine.read()) is None
    writing = asyncio.ensure_future(write_all(mine, told))
    await soon(asyncio.gather(writing, served.stream.read()))
    mine.cancel()
    del mine
    assert await soon(read_all(served.stream)) == told[1:]
    served.leave()


async def test_what_a_handler_says_last_arrives_though_the_caller_still_writes(rig: Rig) -> None:
    mine, served = await rig.stream()
    told = [bytes([number]) * MAX_MESSAGE_BYTES for number in range(4)]

    async def flood() -> None:
        with pytest.raises(Trouble):
            while True:
                await mine.write(b"more" * 100_000)

    flooding = asyncio.ensure_future(flood())
    reading = asyncio.ensure_future(read_all(mine))
    for message in told:
        await soon(served.stream.write(message))
    served.leave()
    assert await soon(reading) == told
    mine.cancel()
    await soon(flooding)


# ------------------------------------------------------------------------------------------- bad ends


@pytest.mark.parametrize("by_caller", [True, False])
async def test_cancelling_ends_the_reads_and_writes_of_both_sides(rig: Rig, by_caller: bool) -> None:
    mine, served = await rig.stream()
    one, other = (mine, served.stream) if by_caller else (served.stream, mine)

    async def write() -> None:
        while True:
            await other.write(b"x" * MAX_MESSAGE_BYTES)

    waiting = [asyncio.ensure_future(work) for work in (other.read(), write())]
    await asyncio.wait(waiting, timeout=0.1)
    one.cancel()
    one.cancel()
    for work in waiting:
        await fails(work)
    for stream in (one, other):
        await fails(stream.read())
        await fails(stream.write(b"x"))
    served.leave()


async def test_a_caller_that_gives_up_has_not_ended(rig: Rig) -> None:
    mine, served = await rig.stream()
    await soon(mine.write(b"half of it"))
    assert await soon(served.stream.read()) == b"half of it"
    mine.cancel()
    await fails(served.stream.read())
    served.leave()


async def test_a_handler_that_fails_has_not_ended(rig: Rig) -> None:
    mine, served = await rig.stream()
    served.leave(RuntimeError("a handler failed, as it should"))
    await fails(mine.read())


@pytest.mark.parametrize("writer", ["nobody", "caller", "called"])
async def test_a_link_that_breaks_is_noticed_by_both_sides(rig: Rig, writer: str) -> None:
    mine, served = await rig.stream()
    await soon(mine.write(b"hello"))
    assert await soon(served.stream.read()) == b"hello"

    async def write(stream: PeerStream) -> None:
        while True:
            await stream.write(b"x" * MAX_MESSAGE_BYTES)

    work = [
        asyncio.ensure_future(write(stream) if writer == name else stream.read())
        for name, stream in (("caller", mine), ("called", served.stream))
        if writer in (name, "nobody")
    ]
    await asyncio.wait(work, timeout=0.1)
    rig.cut()
    for operation in work:
        await fails(operation)
    for stream in (mine, served.stream):
        with pytest.raises(Trouble):
            while await soon(stream.read()) is not None:
                pass
    served.leave()


@pytest.mark.parametrize("by_caller", [True, False])
async def test_nobody_receives_a_message_that_is_too_long(rig: Rig, by_caller: bool) -> None:
    mine, served = await rig.stream()
    writer, reader = (mine, served.stream) if by_caller else (served.stream, mine)

    async def write() -> None:
        await writer.write(b"x" * (MAX_MESSAGE_BYTES + 1))
        await writer.read()

    _, trouble = await soon(asyncio.gather(write(), reader.read(), return_exceptions=True))
    assert isinstance(trouble, Trouble)
    served.leave()


async def test_an_unreachable_peer_is_trouble(rig: Rig) -> None:
    assert str(await fails(rig.calling.open(rig.nobody)))
    await finish(*await rig.stream())


# ------------------------------------------------------------------------------------------- closing


async def test_closing_leaves_no_task_and_breaks_what_is_open(make: MakeRig) -> None:
    before = asyncio.all_tasks()
    async with make() as rig:
        await finish(*await rig.stream())
        open_streams = [await rig.stream() for _ in range(3)]
        waiting = [asyncio.ensure_future(mine.read()) for mine, _ in open_streams]
        await rig.calling.close()
        await rig.called.close()
        for (mine, served), reading in zip(open_streams, waiting, strict=True):
            await fails(reading)
            await fails(mine.write(b"x"))
            await fails(served.stream.read())
        await fails(rig.calling.open(rig.peer))
    for _ in range(10):  # what gRPC calls after its own ends
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    assert not left, left
