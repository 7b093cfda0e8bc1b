"""State transfers: back-pressure, fan-out, and every way to break off."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.refusal import Refused
from coordinator.transfers import LANE_MESSAGES, Lane, Transfer
from protos.atoll_pb2 import StateHeader
from protos.wire import CHUNK, CHUNK_BYTES, END, HEADER, encode_frame
from tests.coordinator.coordinator_rig import VirtualTimer, soon


class Case:
    def __init__(self, joiners: Sequence[str] = ("j",), **changes: Any) -> None:
        self.timer = VirtualTimer()
        self.ended: list[Transfer] = []
        self.transfer = Transfer(
            "t1", 5, "donor", joiners, stall=60.0, now=self.timer.now, on_end=self.ended.append, **changes
        )


def header(nbytes: int, **changes: Any) -> bytes:
    values: dict[str, Any] = {"transfer": "t1", "round": 5, "state_digest": "s5", "nbytes": nbytes}
    return encode_frame(HEADER, StateHeader(**{**values, **changes}).SerializeToString())


def state(nbytes: int, chunk: int = 64) -> list[bytes]:
    body = bytes(range(256)) * (nbytes // 256 + 1)
    return [
        header(nbytes),
        *(
            encode_frame(CHUNK, body[at : min(at + chunk, nbytes)], offset=at)
            for at in range(0, nbytes, chunk)
        ),
        encode_frame(END),
    ]


async def upload(transfer: Transfer, messages: Sequence[bytes]) -> bool:
    done = False
    for message in messages:
        done = await transfer.feed(message)
    return done


async def download(lane: Lane) -> list[bytes]:
    received = []
    while (message := await lane.get()) is not None:
        received.append(message)
    return received


async def test_messages_pass_unchanged_to_all_joiners() -> None:
    case = Case(["a", "b"])
    messages = state(1000)
    lanes = [case.transfer.attach(node) for node in "ab"]
    done, *received = await soon(asyncio.gather(upload(case.transfer, messages), *map(download, lanes)))
    assert done and received == [messages, messages]
    assert (case.transfer.phase, case.transfer.relayed) == ("complete", 1000)
    assert case.ended == [case.transfer]
    assert all(lane.finished for lane in lanes)


async def test_the_donor_waits_until_the_joiners_are_there() -> None:
    case = Case(["a", "b"])
    task = asyncio.ensure_future(upload(case.transfer, state(100)))
    await asyncio.sleep(0)
    first = asyncio.ensure_future(download(case.transfer.attach("a")))
    await asyncio.sleep(0)
    assert not task.done()
    second = asyncio.ensure_future(download(case.transfer.attach("b")))
    assert await soon(task)
    assert await soon(first) == await soon(second)


async def test_a_slow_reader_holds_the_donor_back() -> None:
    case = Case()
    lane = case.transfer.attach("j")
    fed = 0

    async def feed() -> None:
        nonlocal fed
        for message in state(64 * 40):
            await case.transfer.feed(message)
            fed += 1

    task = asyncio.ensure_future(feed())
    for taken in range(1, 20):
        await soon(lane.get())
        for _ in range(5):  # let the donor run as far as it can
            await asyncio.sleep(0)
        assert fed <= taken + LANE_MESSAGES
    assert not task.done()
    rest = asyncio.ensure_future(download(lane))
    await soon(task)
    assert len(await soon(rest)) == 42 - 19


async def test_a_large_state_is_never_held() -> None:
    """256 MiB pass; at most the lane's messages are alive at once."""
    case = Case()
    chunks, alive, peak = 256, 0, 0
    lane = case.transfer.attach("j")

    class Counted(bytes):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    body = bytes(CHUNK_BYTES)

    async def feed() -> None:
        nonlocal alive, peak
        await case.transfer.feed(header(chunks * CHUNK_BYTES))
        for index in range(chunks):
            message = Counted(encode_frame(CHUNK, body, offset=index * CHUNK_BYTES))
            alive += 1
            peak = max(peak, alive)
            await case.transfer.feed(message)
            del message
        await case.transfer.feed(encode_frame(END))

    async def read() -> int:
        count = 0
        while await lane.get() is not None:
            count += 1
        return count

    _, count = await soon(asyncio.gather(feed(), read()))
    gc.collect()
    assert count == chunks + 2
    assert case.transfer.relayed == chunks * CHUNK_BYTES
    assert peak <= LANE_MESSAGES + 3
    assert alive == 0


@pytest.mark.parametrize(
    "messages",
    [
        [encode_frame(CHUNK, b"x")],
        [encode_frame(HEADER, b"\xff\xff\xff")],
        [b"short"],
        [header(10, transfer="other")],
        [header(10, round=4)],
        [header(10, state_digest="")],
        [header(10), encode_frame(END)],
        [header(10), encode_frame(CHUNK, b"x" * 11)],
        [header(10), encode_frame(CHUNK, b"x" * 5, offset=1)],
        [header(10), encode_frame(CHUNK, b"")],
        [header(10), encode_frame(CHUNK, b"x" * 5), encode_frame(CHUNK, b"x" * 5)],
        [header(10), header(10)],
        [header(10), encode_frame(CHUNK, b"x" * 9), encode_frame(END)],
    ],
)
async def test_a_bad_upload_fails_the_transfer_and_the_joiner_learns_it(messages: list[bytes]) -> None:
    case = Case()
    lane = case.transfer.attach("j")
    with pytest.raises(Refused) as refused:
        await soon(upload(case.transfer, messages))
    assert refused.value.kind == "bad-transfer"
    assert case.transfer.phase == "failed" and case.ended == [case.transfer]
    with pytest.raises(Refused, match="the transfer of the state failed") as told:
        while True:
            await soon(lane.get())
    assert told.value.code == "UNAVAILABLE"


async def test_a_donor_with_another_digest_is_refused() -> None:
    case = Case(expected_digest=lambda: "agreed")
    case.transfer.attach("j")
    with pytest.raises(Refused, match="digest s5, the nodes agreed on agreed"):
        await soon(case.transfer.feed(header(10)))


async def test_a_dead_donor_wakes_waiting_joiners() -> None:
    case = Case(["a", "b"])
    readers = [asyncio.ensure_future(download(case.transfer.attach(node))) for node in "ab"]
    await soon(upload(case.transfer, state(1000)[:4]))
    case.transfer.fail("it died")
    for reader in readers:
        with pytest.raises(Refused, match="it died"):
            await soon(reader)
    with pytest.raises(Refused):
        await soon(case.transfer.feed(state(1000)[4]))
    assert len(case.ended) == 1


async def test_one_joiner_out_the_others_go_on() -> None:
    case = Case(["a", "b"])
    a, b = (case.transfer.attach(node) for node in "ab")
    task = asyncio.ensure_future(upload(case.transfer, state(64 * 30)))
    reader = asyncio.ensure_future(download(b))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done()  # a does not read
    case.transfer.drop("a", "it left")
    assert await soon(task)
    assert len(await soon(reader)) == 32
    with pytest.raises(Refused, match="it left"):
        await soon(a.get())


async def test_without_joiners_the_donor_is_let_go() -> None:
    case = Case(["a"])
    task = asyncio.ensure_future(upload(case.transfer, state(1000)))
    await asyncio.sleep(0)
    case.transfer.drop("a", "it left")
    with pytest.raises(Refused, match="no joiner is left"):
        await soon(task)


async def test_attaching_twice_or_uninvited() -> None:
    case = Case()
    with pytest.raises(Refused, match="not for stranger"):
        case.transfer.attach("stranger")
    case.transfer.attach("j")
    with pytest.raises(Refused, match="already"):
        case.transfer.attach("j")
    case.transfer.fail("over")
    with pytest.raises(Refused, match="over"):
        case.transfer.attach("j")


async def test_a_donor_that_never_begins_is_given_up() -> None:
    case = Case()
    case.timer.advance(59.0)
    assert case.transfer.sweep() == () and case.transfer.phase == "offered"
    case.timer.advance(1.0)
    assert case.transfer.sweep() == ()
    assert case.transfer.phase == "failed"
    assert case.transfer.reason == "the donor donor has not begun to send the state for 60 s"


async def test_a_donor_that_stops_is_given_up() -> None:
    case = Case()
    lane = case.transfer.attach("j")
    case.timer.advance(50.0)
    await soon(upload(case.transfer, state(1000)[:3]))
    for _ in range(3):
        await soon(lane.get())
    case.timer.advance(59.0)
    case.transfer.sweep()
    assert case.transfer.phase == "running"
    case.timer.advance(1.0)
    case.transfer.sweep()
    assert case.transfer.reason == "the donor donor has sent nothing for 60 s"


async def test_a_reader_that_stops_is_dropped_not_its_donor() -> None:
    case = Case(["slow", "good"])
    slow, good = (case.transfer.attach(node) for node in ("slow", "good"))
    task = asyncio.ensure_future(upload(case.transfer, state(64 * 30)))
    reader = asyncio.ensure_future(download(good))
    for _ in range(20):
        await asyncio.sleep(0)
    case.timer.advance(60.0)
    assert case.transfer.sweep() == ("slow",)
    assert await soon(task)
    assert len(await soon(reader)) == 32
    with pytest.raises(Refused, match="has not read the state for 60 s"):
        await soon(slow.get())


async def test_a_joiner_that_never_reads_is_dropped() -> None:
    case = Case(["absent", "good"])
    reader = asyncio.ensure_future(download(case.transfer.attach("good")))
    task = asyncio.ensure_future(upload(case.transfer, state(100)))
    for _ in range(5):
        await asyncio.sleep(0)
    case.timer.advance(60.0)
    assert case.transfer.sweep() == ("absent",)
    assert await soon(task)
    await soon(reader)
