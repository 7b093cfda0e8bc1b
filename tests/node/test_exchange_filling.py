"""Payloads that are sent while they are being written."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable

import pytest
import torch

from node.exchange.base import ExchangeError, RoundOrder, RoundResult
from node.exchange.filling import Filling, Withdrawn
from node.exchange.hub import HubExchange
from node.exchange.in_flight import InFlight
from node.exchange.local import LocalExchange
from protos import wire
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub, Upload
from tests.node.hub_rig import LARGE, SMALL, Make, pattern, tables

# ------------------------------------------------------------------------------------- the filling itself


def test_reader_wakes_when_its_bytes_are_final_and_not_before() -> None:
    filling = Filling(100)
    woken: list[int] = []

    async def read() -> None:
        reader = asyncio.ensure_future(filling.until(40))
        await asyncio.sleep(0)
        filling.advance(39)
        for _ in range(3):
            await asyncio.sleep(0)
        assert not reader.done()
        thread = threading.Thread(target=filling.advance, args=(70,))
        thread.start()
        woken.append(await asyncio.wait_for(reader, DEADLINE))
        thread.join(DEADLINE)
        woken.append(await filling.until(70))

    asyncio.run(read())
    assert woken == [70, 70] and filling.final == 70 and not filling.finished


def test_end_wakes_every_reader_of_every_loop_and_thread() -> None:
    filling = Filling(100)
    waiting = threading.Barrier(4)

    def thread() -> bool:
        waiting.wait(DEADLINE)
        return filling.wait(DEADLINE)

    def loop() -> int:
        async def read() -> int:
            reader = asyncio.ensure_future(filling.until(50))
            await asyncio.sleep(0)
            waiting.wait(DEADLINE)
            await asyncio.wait_for(filling.until(101), DEADLINE)
            return await reader

        return asyncio.run(read())

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        blocked, loops = pool.submit(thread), [pool.submit(loop) for _ in range(2)]
        waiting.wait(DEADLINE)
        filling.finish(True)
        assert blocked.result(DEADLINE)
        assert [future.result(DEADLINE) for future in loops] == [100, 100]


def test_end_without_use_tells_the_reason_and_only_the_first_end_counts() -> None:
    filling = Filling(100)
    filling.finish(False, "the gradient is not finite")
    filling.finish(True)
    with pytest.raises(Withdrawn, match="the gradient is not finite"):
        asyncio.run(filling.until(1))
    assert not filling.wait(0) and filling.reason == "the gradient is not finite"


def test_reader_that_gave_up_is_no_matter_to_the_writer() -> None:
    filling = Filling(100)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(filling.until(50), 0.01)

    asyncio.run(give_up())
    with pytest.raises(concurrent.futures.TimeoutError):
        filling.wait(0.01)
    filling.advance(60)
    filling.finish(True)
    assert filling.wait(0)


def test_bytes_that_were_final_stay_so() -> None:
    filling = Filling(100)
    filling.advance(60)
    for nbytes in (59, 101):
        with pytest.raises(ValueError, match=f"{nbytes} bytes cannot be final: 60 of 100"):
            filling.advance(nbytes)
    filling.finish(True)
    with pytest.raises(RuntimeError, match="grows no more"):
        filling.advance(100)
    with pytest.raises(ValueError, match="cannot have -1 bytes"):
        Filling(-1)


# ------------------------------------------------------------------------------------------ over the hub


def begin(
    hub: FakeHub, exchange: HubExchange, payload: torch.Tensor, filling: Filling
) -> InFlight[RoundResult]:
    """Open round 0 and contribute in another thread."""
    hub.open_round(0)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    return InFlight(lambda: exchange.reduce(order, payload, filling=filling), "in-flight")


def test_chunks_travel_while_the_rest_is_written_and_the_end_comes_last(hub: FakeHub, make: Make) -> None:
    arrived = threading.Semaphore(0)
    seen: list[int] = []
    whole = pattern(LARGE)
    filling = Filling(LARGE)

    async def script(stream: ExchangeStream) -> None:
        header = await stream.header()
        assert header.nbytes == LARGE
        received = bytearray()
        while (frame := wire.decode_frame(await stream.context.read())).kind == wire.CHUNK:
            assert frame.offset == len(received) and not filling.finished
            received += frame.body
            seen.append(len(frame.body))
            arrived.release()
        assert frame.kind == wire.END and filling.finished
        assert bytes(received) == whole.numpy().tobytes()
        await stream.chunks(bytes(received))
        await stream.commit(0, bytes(received))

    hub.exchange = script
    payload = torch.zeros_like(whole)
    flight = begin(hub, make(LARGE), payload, filling)
    written = 0
    for step in (100_000, 1_500_000, LARGE):
        payload[written:step] = whole[written:step]
        filling.advance(written := step)
        assert arrived.acquire(timeout=DEADLINE)
    while sum(seen) < LARGE:
        assert arrived.acquire(timeout=DEADLINE)
    filling.finish(True)
    result = flight.result()
    assert result.counted and result.payload is not None and torch.equal(result.payload, whole)
    assert seen[0] == 100_000 // 64 * 64, "what is final is sent, in whole lines"
    assert max(seen) <= wire.CHUNK_BYTES and min(seen[:-1]) >= 64 << 10


def test_payload_that_turns_out_useless_is_broken_off_and_abstained_from(hub: FakeHub, make: Make) -> None:
    begun, broken = threading.Event(), threading.Event()
    uploads: list[Upload] = []
    stored = pattern(LARGE, 5).numpy().tobytes()

    async def script(stream: ExchangeStream) -> None:
        if not begun.is_set():
            await stream.header()
            await stream.context.read()
            begun.set()
            stream.context.add_done_callback(lambda context: broken.set())
            assert not isinstance(await stream.context.read(), bytes), "nothing more was final"
            return
        uploads.append(await stream.upload())
        await stream.chunks(stored)
        await stream.commit(0, stored, voters=["node-1"], counted=False)

    hub.exchange = script
    filling = Filling(LARGE)
    flight = begin(hub, make(LARGE), pattern(LARGE), filling)
    filling.advance(1 << 20)
    assert begun.wait(DEADLINE)
    filling.finish(False, "a gradient is not finite")
    result = flight.result()
    assert broken.wait(DEADLINE)
    assert not result.counted and result.payload is not None
    assert result.payload.numpy().tobytes() == stored
    (upload,) = uploads
    assert upload.header.abstain and upload.header.reason == "a gradient is not finite"
    assert not upload.payload and not upload.header.nbytes


def test_broken_connection_sends_what_is_final_from_the_start_again(hub: FakeHub, make: Make) -> None:
    first, again = threading.Event(), threading.Event()
    whole = pattern(LARGE)
    filling = Filling(LARGE)
    tries: list[int] = []

    async def script(stream: ExchangeStream) -> None:
        tries.append((await stream.header()).nbytes)
        frame = wire.decode_frame(await stream.context.read())
        assert (frame.kind, frame.offset, bytes(frame.body[:64])) == (
            wire.CHUNK,
            0,
            whole[:64].numpy().tobytes(),
        )
        if len(tries) == 1:
            first.set()
            return  # without a commit
        received = bytearray(frame.body)
        again.set()
        while (frame := wire.decode_frame(await stream.context.read())).kind == wire.CHUNK:
            received += frame.body
        assert bytes(received) == whole.numpy().tobytes()
        await stream.chunks(bytes(received))
        await stream.commit(0, bytes(received))

    hub.exchange = script
    flight = begin(hub, make(LARGE), whole, filling)
    filling.advance(200_000)
    assert first.wait(DEADLINE) and again.wait(DEADLINE)
    filling.advance(LARGE)
    filling.finish(True)
    assert flight.result().counted and len(tries) == 2


def test_round_that_closes_early_does_not_wait_for_the_filling(hub: FakeHub, make: Make) -> None:
    stored = pattern(LARGE, 3).numpy().tobytes()

    ended = threading.Event()

    async def script(stream: ExchangeStream) -> None:
        await stream.header()
        await stream.chunks(stored)
        await stream.commit(0, stored, voters=["node-1"], counted=False)
        while wire.decode_frame(await stream.context.read()).kind != wire.END:
            pass
        ended.set()

    hub.exchange = script
    filling = Filling(LARGE)
    result = begin(hub, make(LARGE), pattern(LARGE), filling).result()
    assert not result.counted
    assert ended.wait(DEADLINE) and not filling.finished, "else the coordinator waits for more"


@pytest.mark.parametrize("close", [True, False], ids=["closed", "halted"])
def test_wait_for_a_filling_that_never_ends_is_ended(hub: FakeHub, make: Make, close: bool) -> None:
    begun = threading.Event()

    async def script(stream: ExchangeStream) -> None:
        await stream.header()
        begun.set()
        await stream.context.read()

    hub.exchange = script
    exchange = make(LARGE)
    flight = begin(hub, exchange, pattern(LARGE), Filling(LARGE))
    assert begun.wait(DEADLINE)
    if close:
        exchange.close("interrupted by its user")
    else:
        hub.refuse_join = "the run has ended"
        hub.die()
        hub.start()
    with pytest.raises(ExchangeError):
        flight.result()


def test_filling_of_another_size_is_not_sent(hub: FakeHub, make: Make) -> None:
    exchange = make()
    hub.open_round(0)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    with pytest.raises(ValueError, match="has 192 bytes, its filling 128"):
        exchange.reduce(order, pattern(SMALL), filling=Filling(128))


# ------------------------------------------------------------------------------------------------- alone


def local(act: Callable[[LocalExchange, Filling], None]) -> RoundResult:
    exchange = LocalExchange(tables(SMALL), rounds=2, batch=1)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    filling = Filling(SMALL)
    flight = InFlight(lambda: exchange.reduce(order, pattern(SMALL), filling=filling), "in-flight")
    act(exchange, filling)
    return flight.result()


def test_local_exchange_waits_for_the_end() -> None:
    result = local(lambda exchange, filling: filling.finish(True))
    assert result.counted and result.payload is not None and torch.equal(result.payload, pattern(SMALL))
    result = local(lambda exchange, filling: filling.finish(False, "not finite"))
    assert not result.counted and result.payload is None and "not finite" in result.reason
    with pytest.raises(ExchangeError, match="round 1 was cut short: the exchange has been closed"):
        local(lambda exchange, filling: exchange.close("interrupted"))
