"""Rounds that are replayed: results in order, whole or not at all, from streams that break."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import pytest
import torch
from grpc import aio
from hypothesis import given, settings
from hypothesis import strategies as st

from node.exchange.base import ReplayOrder, RoundResult
from node.exchange.in_flight import InFlight
from node.exchange.link import Limits
from node.exchange.replay import Replay
from node.exchange.retry import Timing
from node.exchange.trouble import Kind, RoundLost, TransferError, Trouble, diagnose
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import TableSchedule
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub
from tests.node.hub_rig import LARGE, SMALL, FakeClock, Make, next_message, pattern, tables, take_part
from tests.node.lane_rig import PARTS, RESULT, SCHEDULE, TABLE, Island, received

# ------------------------------------------------------------------------------- streams from a list


class Recorded(ExchangeStream):
    """Keeps the frames instead of sending them."""

    def __init__(self) -> None:
        super().__init__(None)
        self.frames: list[bytes] = []

    async def send(self, kind: int, body: bytes = b"", *, attempt: int = 0, offset: int = 0) -> None:
        self.frames.append(wire.encode_frame(kind, body, attempt=attempt, offset=offset))


def frames_of(round_index: int, payload: bytes, **commit: Any) -> list[bytes]:
    stream = Recorded()

    async def send() -> None:
        await stream.chunks(payload)
        await stream.commit(round_index, payload, **commit)

    asyncio.run(send())
    return stream.frames


class Call:
    """A stream of ``messages``, and then its end, or an error."""

    def __init__(self, messages: Sequence[bytes], error: aio.AioRpcError | None = None) -> None:
        self.messages, self.error = list(messages), error
        self.cancelled = False

    async def read(self) -> Any:
        await asyncio.sleep(0)
        if self.messages:
            return self.messages.pop(0)
        if self.error is not None:
            raise self.error
        return aio.EOF

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        self.cancelled = True


def failure(code: grpc.StatusCode, text: str) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(), details=text)


class Streams:
    """Stands for the link and the session: each request is answered by the next call."""

    def __init__(self, *calls: Call) -> None:
        self.limits = Limits(reconnect=60.0)
        self.calls, self.asked = list(calls), list[pb.ResultsRequest]()
        self.secret, self.halted = "secret", asyncio.Event()
        self.opened: list[Call] = []

    def get_results(self, secret: str, request: pb.ResultsRequest) -> Call:
        assert secret == self.secret
        self.asked.append(request)
        self.opened.append(self.calls.pop(0))
        return self.opened[-1]

    def trouble(self, error: aio.AioRpcError, seconds: float) -> Trouble:
        return diagnose(error.code(), error.details(), "hub:1", seconds=seconds)


def replay_of(
    streams: Any,
    first: int,
    count: int,
    *,
    schedule: TableSchedule | None = None,
    lane: TableSchedule | None = None,
    counted: Callable[[pb.Commit], bool] = lambda commit: commit.counted,
    timing: Timing | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Replay:
    return Replay(
        ReplayOrder(first, count),
        streams,
        streams,
        tables=schedule or tables(SMALL),
        lane=lane,
        counted=counted,
        timing=timing or FakeClock().timing(),
        say=say,
    )


async def drained(replay: Replay) -> tuple[list[tuple[RoundResult, bytes]], Exception | None]:
    """Copies of all results, and what ended them."""
    came: list[tuple[RoundResult, bytes]] = []
    try:
        while (result := await replay.next()) is not None:
            came.append((result, b"" if result.payload is None else result.payload.numpy().tobytes()))
        return came, None
    except (TransferError, Trouble) as error:
        return came, error
    finally:
        await replay.close()


def drain(streams: Streams, *rounds: int, **options: Any) -> tuple[list[Any], Exception | None]:
    async def run() -> tuple[list[Any], Exception | None]:
        return await drained(replay_of(streams, *rounds, **options))

    return asyncio.run(run())


PAYLOADS = [pattern(SMALL, seed).numpy().tobytes() for seed in range(3)]
ROUNDS = [frames_of(5 + index, payload) for index, payload in enumerate(PAYLOADS)]
WHOLE = [message for frames in ROUNDS for message in frames]


def test_results_come_in_order_and_a_round_without_voters_has_none() -> None:
    empty = frames_of(8, b"", voters=[], weights=[], payload_digest="", counted=False)
    streams = Streams(Call(WHOLE + empty))
    came, error = drain(streams, 5, 4)
    assert error is None
    assert [result.round for result, _ in came] == [5, 6, 7, 8]
    assert [data for _, data in came] == [*PAYLOADS, b""]
    assert came[3][0].payload is None and came[0][0].voters == ("node-0",)
    assert [(ask.first, ask.count, ask.part) for ask in streams.asked] == [(5, 4, False)]


def test_one_result_and_no_more_is_received_ahead() -> None:
    async def run() -> None:
        call = Call(WHOLE)
        replay = replay_of(Streams(call), 5, 3)
        first = await replay.next()
        assert first is not None and first.payload is not None
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(call.messages) == len(ROUNDS[2]), "the second has come, nothing of the third is asked for"
        assert first.payload.numpy().tobytes() == PAYLOADS[0], "the one that is applied is not touched"
        await replay.close()
        assert call.cancelled

    asyncio.run(run())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, len(WHOLE)), st.sampled_from(["end", "unavailable", "unknown"]))
def test_broken_stream_is_taken_up_again_at_the_first_missing_round(whole: int, how: str) -> None:
    errors = {
        "end": None,
        "unavailable": failure(grpc.StatusCode.UNAVAILABLE, "Connection reset by peer"),
        "unknown": failure(grpc.StatusCode.UNAUTHENTICATED, f"{wire.SESSION_UNKNOWN}this session is unknown"),
    }
    complete = sum(whole >= end for end in (2, 4, 6))
    rest = [message for frames in ROUNDS[complete:] for message in frames]
    clock = FakeClock()
    streams = Streams(Call(WHOLE[:whole], errors[how]), Call(rest))
    came, error = drain(streams, 5, 3, timing=clock.timing())
    assert error is None
    assert [(result.round, data) for result, data in came] == list(zip((5, 6, 7), PAYLOADS, strict=True))
    asked = [(ask.first, ask.count) for ask in streams.asked]
    assert asked == ([(5, 3)] if complete == 3 else [(5, 3), (5 + complete, 3 - complete)])
    assert len(clock.pauses) == len(asked) - 1


@settings(max_examples=200, deadline=None)
@given(st.integers(0, sum(map(len, WHOLE)) - 1))
def test_stream_that_is_cut_at_any_byte_gives_whole_results_or_none(at: int) -> None:
    messages, left = [], at
    for message in WHOLE:
        if left <= 0:
            break
        messages.append(message[:left])
        left -= len(message)
    streams = Streams(Call(messages), Call([], failure(grpc.StatusCode.NOT_FOUND, "not kept any more")))
    came, error = drain(streams, 5, 3)
    assert [data for _, data in came] == PAYLOADS[: len(came)]
    ends = [sum(map(len, WHOLE[:count])) for count in (2, 4, 6)]
    assert len(came) == sum(at >= end for end in ends)
    assert isinstance(error, TransferError) or (isinstance(error, Trouble) and error.kind is Kind.PROTOCOL)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 8 * sum(map(len, ROUNDS[0])) - 1))
def test_result_with_a_flipped_bit_is_never_handed_out_as_another(bit: int) -> None:
    messages = [bytearray(message) for message in ROUNDS[0]]
    place, message = bit // 8, 0
    while place >= len(messages[message]):
        place -= len(messages[message])
        message += 1
    messages[message][place] ^= 1 << bit % 8
    streams = Streams(Call([bytes(message) for message in messages]), *[Call(ROUNDS[0])] * 3)
    came, error = drain(streams, 5, 1)
    assert [data for _, data in came] == PAYLOADS[: len(came)]
    assert bool(came) == (error is None)


def test_refusal_and_a_coordinator_that_stays_away_end_it_with_a_reason() -> None:
    gone = Call(ROUNDS[0], failure(grpc.StatusCode.NOT_FOUND, "results before round 9 are not kept"))
    came, error = drain(Streams(gone), 5, 3)
    assert len(came) == 1
    assert str(error) == "the result of round 7 is not to be had: results before round 9 are not kept"
    away = [Call([], failure(grpc.StatusCode.UNAVAILABLE, "connection refused")) for _ in range(50)]
    said, clock = list[str](), FakeClock()
    came, error = drain(Streams(*away), 5, 3, timing=clock.timing(), say=said.append)
    assert not came and "gave up on the results that are missing here after 60 s" in str(error)
    assert 4 <= len(said) <= 7 < len(clock.pauses), "every 10 s, not every time"


def test_stop_ends_the_wait_for_a_result() -> None:
    class Silent(Call):
        async def read(self) -> Any:
            streams.halted.set()
            await asyncio.Event().wait()

    streams = Streams(Silent([]))
    came, error = drain(streams, 5, 3)
    assert not came and "this node has to stop" in str(error)
    assert streams.opened[0].cancelled


def test_lanes_of_every_table_are_asked_for() -> None:
    other = tables(SMALL).tables[0]
    schedule = TableSchedule((TABLE, other), (0, 0, 1))
    streams = Streams(Call([]))
    replay = replay_of(streams, 0, 1, schedule=schedule, lane=schedule.part({"a", "d"}))

    async def ask() -> None:
        streams.halted.set()
        with pytest.raises(TransferError):
            await replay.next()
        await replay.close()

    request = replay._request(0)
    assert [(lane.table_digest, list(lane.buckets)) for lane in request.lanes] == [
        (TABLE.digest, [0, 3]),
        (other.digest, []),
    ]
    asyncio.run(ask())


# ------------------------------------------------------------------------------- through a coordinator


class Kept:
    """A coordinator that keeps results; breaks off its streams after so many of them, once each."""

    def __init__(self, payloads: dict[int, bytes], *cuts: int, **commit: Any) -> None:
        self.asked: list[pb.ResultsRequest] = []
        self._payloads, self._cuts, self._commit = payloads, list(cuts), commit

    async def __call__(self, request: pb.ResultsRequest, stream: ExchangeStream) -> None:
        self.asked.append(request)
        cut = self._cuts.pop(0) if self._cuts else request.count
        for done, round_index in enumerate(range(request.first, request.first + request.count)):
            payload = self._payloads[round_index]
            if done == cut:
                await stream.chunks(payload, until=wire.CHUNK_BYTES)
                await stream.abort(grpc.StatusCode.ABORTED, "this coordinator goes down")
            await stream.chunks(payload)
            await stream.commit(round_index, payload, **self._commit)


def test_replay_through_a_coordinator_that_breaks_off_in_the_middle(hub: FakeHub, make: Make) -> None:
    payloads = {round_index: pattern(LARGE, round_index).numpy().tobytes() for round_index in range(3, 7)}
    hub.get_results = kept = Kept(payloads, 1, 2)
    exchange = make(LARGE)
    hub.send(pb.CoordinatorMessage(replay=pb.Replay(first=3, count=4, frontier=40)))
    order = exchange.next_order()
    assert order == ReplayOrder(3, 4, 40)
    came = []
    for result in exchange.replay(order):
        assert result.payload is not None
        came.append((result.round, result.payload.numpy().tobytes(), result.counted))
    assert came == [(round_index, payload, False) for round_index, payload in payloads.items()]
    assert [(ask.first, ask.count) for ask in kept.asked] == [(3, 4), (4, 3), (6, 1)]
    down = exchange.meter.counts()
    assert down["down", "result"] > 4 * LARGE and not down["down", "state"]
    exchange.ready(7, "s7")
    ready = next_message(hub, "ready").ready
    assert (ready.round, ready.state_digest) == (7, "s7")
    hub.end_session()
    hub.sessions.get(timeout=DEADLINE)
    hub.joins.get(timeout=DEADLINE)
    again = hub.joins.get(timeout=DEADLINE)
    assert (again.round, again.state_digest, again.samples) == (7, "s7", 40)


def test_replay_that_is_left_in_the_middle_leaves_nothing_behind(hub: FakeHub, make: Make) -> None:
    payloads = {round_index: pattern(SMALL, round_index).numpy().tobytes() for round_index in range(3)}
    hub.get_results = Kept(payloads)
    exchange = make()
    results = exchange.replay(ReplayOrder(0, 3))
    assert next(results).round == 0
    results.close()
    exchange.close("interrupted by its user")
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-network"]


@pytest.mark.parametrize("sent", [True, False])
def test_replayed_round_counts_only_if_this_process_has_sent_a_part_of_it(
    hub: FakeHub, make: Make, sent: bool
) -> None:
    arrived = threading.Event()

    async def swallow(stream: ExchangeStream) -> None:
        await stream.upload()
        arrived.set()
        await stream.context.read()

    def cut() -> None:
        assert arrived.wait(DEADLINE)
        hub.end_session()
        hub.sessions.get(timeout=DEADLINE)
        hub.send(pb.CoordinatorMessage(replay=pb.Replay(first=7, count=2)))

    hub.exchange = swallow
    payload = pattern(SMALL).numpy().tobytes()
    hub.get_results = Kept({7: payload, 8: payload}, counted=True)
    exchange = make()
    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(RoundLost, match="round 8 went on without this node"):
        take_part(hub, exchange, pattern(SMALL) if sent else None, round_index=7)
    thread.join(DEADLINE)
    order = exchange.next_order()
    assert isinstance(order, ReplayOrder)
    counted = [result.counted for result in exchange.replay(order)]
    assert counted == [sent, False]


def test_ranks_replay_their_lanes(hub: FakeHub) -> None:
    whole: bytes = RESULT.numpy().tobytes()

    async def serve(request: pb.ResultsRequest, stream: ExchangeStream) -> None:
        assert request.part and [lane.table_digest for lane in request.lanes] == [TABLE.digest]
        part = {TABLE.buckets[index].name for index in request.lanes[0].buckets}
        for round_index in range(request.first, request.first + request.count):
            lane = received(part).numpy().tobytes()
            await stream.chunks(lane)
            await stream.commit(round_index, lane)

    hub.get_results = serve
    island = Island(hub)
    try:

        def replayed(lane: Any) -> list[torch.Tensor]:
            found = []
            for result in lane.replay(ReplayOrder(2, 3)):
                assert result.payload is not None, "a lane of no buckets has a result of no bytes"
                found.append(result.payload.clone())
            return found

        flights = [InFlight(lambda lane=lane: replayed(lane), "lane") for lane in island.lanes]  # type: ignore[misc]
        for flight, part in zip(flights, PARTS, strict=True):
            results = flight.result()
            assert len(results) == 3
            assert all(torch.equal(result, received(part)) for result in results)
    finally:
        island.close()
    assert len(whole) == SCHEDULE.result_nbytes
