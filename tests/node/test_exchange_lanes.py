"""The lanes of an island against a scripted coordinator: what travels, and what goes wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import grpc
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.base import ExchangeError, LoadOrder, RoundOrder, RoundResult, StopOrder
from node.exchange.meter import MESSAGE_PREFIX_BYTES
from node.exchange.news import LaneSession, Opened, SessionNews
from node.exchange.trouble import RoundLost
from protos import atoll_pb2 as pb
from protos import wire
from protos.invite import Invite
from tests.node.fake_hub import DEADLINE, TOKEN, ExchangeStream, FakeHub, Upload
from tests.node.hub_rig import pattern
from tests.node.lane_rig import PARTS, TABLE, Island, LaneRound, contributed, received
from tests.node.relay import Relay


@pytest.fixture
def island(hub: FakeHub) -> Iterator[Island]:
    made = Island(hub)
    yield made
    made.close()


def check(results: list[RoundResult], counted: bool = True) -> None:
    """Every lane has received its part of the one result."""
    for result, part in zip(results, PARTS, strict=True):
        assert result.payload is not None and torch.equal(result.payload, received(part))
        assert result.counted is counted
    assert len({(result.voters, result.weights, result.reason) for result in results}) == 1


# ----------------------------------------------------------------------------------------------- a round


def test_every_lane_carries_its_buckets_alone(hub: FakeHub, island: Island) -> None:
    hub.exchange = script = LaneRound()
    joined = hub.joins.get(timeout=DEADLINE)
    assert (joined.ranks, joined.batch) == (len(PARTS), 6)
    check([end() for end in island.begin(hub)])
    uploads = {tuple(upload.header.buckets): upload for upload in script.uploads}
    assert sorted(uploads) == [(), (0, 3), (1, 2)]
    for part in PARTS:
        lane = contributed(part).numpy().tobytes()
        buckets = tuple(index for index, bucket in enumerate(TABLE.buckets) if bucket.name in part)
        header = uploads[buckets].header
        assert header.part and header.table_digest == TABLE.digest
        assert (header.nbytes, header.weight, header.abstain) == (len(lane), 3, False)
        assert uploads[buckets].payload == lane
        assert uploads[buckets].end.payload_digest == wire.payload_digest(lane)


def test_bytes_of_a_lane_are_its_share(hub: FakeHub, island: Island) -> None:
    hub.exchange = script = LaneRound()
    check([end() for end in island.begin(hub)])
    total = 0
    for lane, part in zip(island.lanes, PARTS, strict=True):
        share = sum(bucket.nbytes for bucket in TABLE.buckets if bucket.name in part)
        share_down = sum(bucket.result_nbytes for bucket in TABLE.buckets if bucket.name in part)
        (upload,) = (one for one in script.uploads if len(one.payload) == share)
        frames = [upload.header.SerializeToString(), upload.end.SerializeToString()]
        overhead = sum(map(len, frames)) + (2 + bool(share)) * (wire.PREFIX_BYTES + MESSAGE_PREFIX_BYTES)
        assert lane.meter.counts()["up", "contribution"] == share + overhead
        assert 0 < lane.meter.counts()["down", "result"] - share_down < 250
        total += share
    assert total == TABLE.nbytes
    assert all(lane.meter.counts()["up", "control"] == 0 for lane in island.followers)


def test_round_without_voters_has_no_payload_in_any_lane(hub: FakeHub, island: Island) -> None:
    async def script(stream: ExchangeStream) -> None:
        await stream.upload()
        await stream.commit(0, b"", voters=[], weights=[], counted=False)

    hub.exchange = script
    assert [end().payload for end in island.begin(hub)] == [None] * len(PARTS)


def test_round_that_closes_without_the_node_gives_all_lanes_the_result(hub: FakeHub, island: Island) -> None:
    script = LaneRound(voters=["node-7"], counted=False)

    async def late(stream: ExchangeStream) -> None:
        await script.answer(stream, Upload(await stream.header(), b"", pb.ContributionEnd()))

    hub.exchange = late
    check([end() for end in island.begin(hub)], counted=False)


def test_lane_of_another_size_is_not_sent(hub: FakeHub, island: Island) -> None:
    hub.open_round(0)
    order = island.leader.next_order()
    assert isinstance(order, RoundOrder)
    for lane, part in zip(island.lanes, PARTS, strict=True):
        with pytest.raises(ValueError, match=rf"must be uint8\[{len(contributed(part))}\]"):
            lane.reduce(order, pattern(64))


# ------------------------------------------------------------------------------------- what goes wrong


class Interrupted:
    """A round that holds its lanes up; tells when all are there, and ends them with their session."""

    def __init__(self) -> None:
        self.all_there = threading.Event()
        self._over = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._count = 0

    async def __call__(self, stream: ExchangeStream) -> None:
        self._loop = asyncio.get_running_loop()
        await stream.upload()
        self._count += 1
        if self._count == len(PARTS):
            self.all_there.set()
        await self._over.wait()
        await stream.abort(grpc.StatusCode.UNAUTHENTICATED, "the session has ended")

    def end(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._over.set)


@pytest.mark.parametrize("restart", [False, True], ids=["session-ends", "coordinator-restarts"])
def test_all_lanes_are_sent_again_in_the_name_of_the_next_session(
    hub: FakeHub, island: Island, restart: bool
) -> None:
    hub.exchange = held = Interrupted()
    ends = island.begin(hub, 7)
    assert held.all_there.wait(DEADLINE)
    hub.exchange = script = LaneRound(voters=["node-1"])
    if restart:
        hub.die()
        hub.start()
    else:
        hub.end_session()
    assert hub.sessions.get(timeout=DEADLINE) == "secret-2"
    if not restart:
        held.end()
    hub.open_round(7, epoch=9)
    check([end() for end in ends])
    assert [upload.header.epoch for upload in script.uploads] == [9] * len(PARTS)


def test_lanes_lose_the_round_together_when_the_coordinator_has_something_else(
    hub: FakeHub, island: Island
) -> None:
    hub.exchange = held = Interrupted()
    ends = island.begin(hub, 7)
    assert held.all_there.wait(DEADLINE)
    hub.die()
    hub.start()
    hub.sessions.get(timeout=DEADLINE)
    hub.send(pb.CoordinatorMessage(load_state=pb.LoadState(snapshot="t", round=9)))
    for end in ends:
        with pytest.raises(RoundLost, match="round 8 went on without this node"):
            end()
    assert island.leader.next_order() == LoadOrder("t", 9)


def test_stop_ends_the_wait_of_every_lane(hub: FakeHub, island: Island) -> None:
    hub.exchange = held = Interrupted()
    ends = island.begin(hub)
    assert held.all_there.wait(DEADLINE)
    hub.send(pb.CoordinatorMessage(stop=pb.Stop(reason="digests differ")))
    for end in ends:
        with pytest.raises(RoundLost, match="has been told to stop"):
            end()
    assert island.leader.next_order() == StopOrder(False, "digests differ", False)


def test_leader_that_ends_ends_the_lanes_of_the_others(hub: FakeHub, island: Island) -> None:
    hub.exchange = held = Interrupted()
    ends = island.begin(hub)
    assert held.all_there.wait(DEADLINE)
    island.sender.close("rank 0 has failed")
    for end in ends[1:]:
        with pytest.raises(RoundLost, match="has been told to stop"):
            end()
    island.leader.close("failed")
    with pytest.raises(ExchangeError, match="has been closed"):
        ends[0]()


def test_lane_whose_connection_breaks_alone_is_sent_again_alone(hub: FakeHub) -> None:
    relay = Relay(hub.port)
    island = Island(hub, {1: Invite(TOKEN, "127.0.0.1", relay.port)})
    hub.exchange = script = LaneRound(len(PARTS) + 1)  # one of them twice
    try:
        ends = island.begin(hub)
        for _ in PARTS:
            assert script.arrived.acquire(timeout=DEADLINE)
        relay.cut()
        relay.restore()
        check([end() for end in ends])
        counts = [tuple(upload.header.buckets) for upload in script.uploads]
        assert sorted(counts) == [(), (0, 3), (1, 2), (1, 2)]
    finally:
        island.close()
        relay.close()


def test_refused_lane_abstains_and_gets_its_part_of_the_result(hub: FakeHub, island: Island) -> None:
    script = LaneRound(counted=False)

    async def refuse(stream: ExchangeStream) -> None:
        upload = await stream.upload()
        if not upload.header.abstain and tuple(upload.header.buckets) == (1, 2):
            await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "not finite")
        script.uploads.append(upload)
        await script.answer(stream, upload)

    hub.exchange = refuse
    check([end() for end in island.begin(hub)], counted=False)
    (upload,) = (one for one in script.uploads if one.header.abstain)
    assert upload.header.part and tuple(upload.header.buckets) == (1, 2)


def test_closed_lane_says_so(hub: FakeHub, island: Island) -> None:
    hub.open_round(0)
    order = island.leader.next_order()
    assert isinstance(order, RoundOrder)
    island.followers[0].close("done")
    island.followers[0].close("twice does no harm")
    with pytest.raises(ExchangeError, match="the lane has been closed"):
        island.followers[0].reduce(order, contributed(PARTS[1]))


# ------------------------------------------------------------------------------ what a lane knows by news

ORDER = RoundOrder(4, 2, ("node-0",), 0, 4, False, False, generation=3)
NOW = SessionNews("s3", "node-0", 3, connected=True, ordered=True, opened=Opened(1, 1, 0, 4, False))


def told(*news: SessionNews, again: bool = False) -> RoundOrder:
    """What a lane makes of :data:`ORDER` while news come in one by one."""

    async def follow() -> RoundOrder:
        session = LaneSession()
        wait = session.offered_again(ORDER) if again else session.confirmed(ORDER)
        task = asyncio.ensure_future(wait)
        for one in news:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done(), f"too early for {one}"
            session.take(one)
        return await asyncio.wait_for(task, DEADLINE)

    return asyncio.run(follow())


def test_order_that_is_known_before_its_stream_waits_for_the_news() -> None:
    assert told(replace(NOW, generation=2), NOW) == ORDER
    assert told(SessionNews(), NOW).epoch == 2


def test_order_of_an_earlier_stream_is_confirmed_by_the_first_of_the_present_one() -> None:
    empty = replace(NOW, generation=4, ordered=False, opened=None)
    confirmed = told(empty, replace(empty, ordered=True, opened=Opened(4, 7, 0, 4, False)))
    assert (confirmed.round, confirmed.epoch, confirmed.generation) == (4, 7, 4)
    decided = Opened(4, 8, 0, 0, True)
    assert told(NOW, replace(NOW, generation=4, opened=decided), again=True).epoch == 8
    for other in (None, Opened(5, 7, 0, 4, False)):
        with pytest.raises(RoundLost, match="round 5 went on without this node"):
            told(replace(empty, ordered=True, opened=other))


@pytest.mark.parametrize("lease", [(4, 4), (0, 3), (0, 0)])
def test_lane_does_not_send_for_other_samples(lease: tuple[int, int]) -> None:
    with pytest.raises(RoundLost, match="round 5 is open to this node again, but for other samples"):
        told(NOW, replace(NOW, generation=4, opened=Opened(4, 8, *lease, False)), again=True)


def test_session_that_failed_offers_nothing_again() -> None:
    with pytest.raises(ExchangeError, match="gave up on it"):
        told(NOW, replace(NOW, connected=False, failure="gave up on it"), again=True)


def test_failure_of_the_news_halts_and_keeps_the_first_reason() -> None:
    async def fail() -> LaneSession:
        session = LaneSession()
        session.take(NOW)
        session.fail("the leader is gone")
        session.fail("and the store")
        return session

    session = asyncio.run(fail())
    assert session.halted.is_set() and not session.connected and session.secret == "s3"
    with pytest.raises(ExchangeError, match="the leader is gone"):
        asyncio.run(session.offered_again(ORDER))


@given(
    st.builds(
        SessionNews,
        secret=st.text(),
        node=st.text(),
        generation=st.integers(0, 1 << 40),
        connected=st.booleans(),
        ordered=st.booleans(),
        opened=st.none() | st.builds(Opened, *[st.integers(0, 1 << 40)] * 4, st.booleans()),
        halted=st.booleans(),
        failure=st.text(max_size=200),
    )
)
def test_news_survive_their_way(news: SessionNews) -> None:
    assert SessionNews.from_json(news.to_json()) == news


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"secret": 1}, "secret of a session cannot be of the type int"),
        ({"generation": True}, "generation of a session cannot be of the type bool"),
        ({"opened": [1]}, "opened of a session cannot be of the type list"),
        ({"opened": {"round": 1}}, "this is no opened round"),
        ({"opened": {**asdict(Opened(1, 1, 0, 4, False)), "lease_start": "0"}}, "this is no opened round"),
        ({"more": 1}, "news of a session have the fields secret, node"),
    ],
)
def test_other_news_are_not_taken(changes: dict[str, Any], text: str) -> None:
    import json

    fields = {**json.loads(NOW.to_json()), **changes}
    with pytest.raises(ValueError, match=text):
        SessionNews.from_json(json.dumps(fields))
    with pytest.raises(ValueError):
        SessionNews.from_json("[")
    with pytest.raises(ValueError, match="have at most"):
        SessionNews.from_json(" " * (1 << 17))
