"""Lanes of an island's ranks on their way to the leader and back, over gRPC; the rounds are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.base import RoundOrder
from node.exchange.filling import Filling, Withdrawn
from node.exchange.lanes.follower import FollowerRounds
from node.exchange.lanes.leader import LeaderRounds
from node.exchange.lanes.place import LeaderPlace, listening_for
from node.exchange.lanes.whole import LaneUpload, Whole
from node.exchange.peers.shelf import Kept
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos.lane_layout import LaneLayout
from protos.upload import end_frame
from protos.wire import CHUNK, decode_frame, encode_frame, payload_digest
from tests.node.lane_rig import PARTS, PAYLOAD, RESULT, SCHEDULE, TABLE, contributed, received
from tests.node.peers.peer_rig import DEADLINE, LIMITS

ORDER = RoundOrder(3, 1, ("node-0",), 40, 8, False, False, topology=7)
COMMIT = pb.Commit(round=3, voters=["node-0"], weights=[1], counted=True, slices=[pb.SliceDigest()])
LAYOUTS = tuple(
    LaneLayout(TABLE, [i for i, bucket in enumerate(TABLE.buckets) if bucket.name in part]) for part in PARTS
)


class Script:
    """Rounds between nodes: what the leader brings to one is kept, and :attr:`ends` come to pass in turn."""

    def __init__(self) -> None:
        self.ends: list[pb.Commit | Trouble] = []
        self.brought: list[bytes | str] = []
        self.shelf: dict[int, Kept] = {}

    async def reduce(
        self,
        order: RoundOrder,
        payload: memoryview | None,
        filling: Filling,
        into: memoryview,
        reason: str,
        on_sent: Callable[[], None],
    ) -> pb.Commit:
        try:
            await filling.until(filling.nbytes + 1)
        except Withdrawn as withdrawn:
            self.brought.append(str(withdrawn))
        else:
            assert payload is not None
            self.brought.append(bytes(payload))
        end = self.ends.pop(0)
        if isinstance(end, Trouble):
            raise end
        if end.slices:
            into[:] = RESULT.numpy().tobytes()
            self.shelf[end.round] = Kept(end, memoryview(bytes(into)))
        return end

    def kept(self, round_index: int) -> Kept | None:
        return self.shelf.get(round_index)


class Island:
    def __init__(self) -> None:
        self.script: Any = Script()
        self.leader = LeaderRounds(LIMITS, "run")
        self.followers: list[FollowerRounds] = []
        self.place = LeaderPlace("", "")

    async def open(self) -> Island:
        self.place = await self.leader.listen("127.0.0.1")
        self.leader.begin(self.script, SCHEDULE, [SCHEDULE.part(part) for part in PARTS])
        self.followers = [FollowerRounds(self.place, rank, LIMITS) for rank in (1, 2)]
        return self

    async def close(self) -> None:
        for end in (self.leader, *self.followers):
            await end.close()

    def lanes(self, *without: int) -> list[asyncio.Future[tuple[pb.Commit, bytes]]]:
        """All ranks contribute, but for those which abstain."""
        ranks = enumerate((self.leader, *self.followers))
        return [asyncio.ensure_future(lane(ends, rank, rank not in without)) for rank, ends in ranks]


async def lane(
    rounds: LeaderRounds | FollowerRounds,
    rank: int,
    contributes: bool = True,
    mine: memoryview | None = None,
) -> tuple[pb.Commit, bytes]:
    """The commit, and the lane of the result that has come."""
    if mine is None and contributes:
        mine = contributed(PARTS[rank]).numpy().data
    into = bytearray(len(received(PARTS[rank])))
    work = rounds.reduce(ORDER, mine, None, memoryview(into), "" if contributes else "it has none")
    return await within(DEADLINE, f"the lane of rank {rank}", work), bytes(into)


@pytest.fixture
async def island() -> AsyncIterator[Island]:
    made = await Island().open()
    yield made
    await made.close()


def check(ends: Sequence[tuple[pb.Commit, bytes]]) -> None:
    for (commit, into), part in zip(ends, PARTS, strict=True):
        assert commit == COMMIT and into == received(part).numpy().tobytes()


async def test_lanes_become_one_contribution_and_the_result_comes_apart(island: Island) -> None:
    island.script.ends = [COMMIT]
    check(await asyncio.gather(*island.lanes()))
    assert island.script.brought == [PAYLOAD.numpy().tobytes()]
    into = bytearray(len(received(PARTS[1])))
    await island.followers[0].complete(COMMIT, memoryview(into), "state")
    assert bytes(into) == received(PARTS[1]).numpy().tobytes()


async def test_a_round_without_voters_leaves_what_is_there(island: Island) -> None:
    void = pb.Commit(round=3)
    island.script.ends = [void]
    for commit, into in await asyncio.gather(*island.lanes()):
        assert commit == void and not any(into)


@pytest.mark.parametrize(
    ("without", "reason"), [(0, "it has none"), (1, "rank 1 of this node has nothing to contribute")]
)
async def test_a_lane_that_has_nothing_makes_the_node_abstain(
    without: int, reason: str, island: Island
) -> None:
    island.script.ends = [COMMIT]
    check(await asyncio.gather(*island.lanes(without)))
    assert island.script.brought == [reason]


async def test_ranks_ask_again_where_the_leader_has_to(island: Island) -> None:
    island.script.ends = [Trouble(Kind.CUT, "it is not to be had"), COMMIT]
    mine = contributed(PARTS[0]).numpy().data
    others = [lane(follower, rank) for rank, follower in enumerate(island.followers, 1)]
    ends = await asyncio.gather(lane(island.leader, 0, mine=mine), *others, return_exceptions=True)
    assert isinstance(ends[0], Trouble) and ends[0].kind is Kind.CUT
    for end in ends[1:]:
        assert isinstance(end, Trouble) and end.passing and "it is not to be had" in str(end)
    follower = asyncio.ensure_future(lane(island.followers[1], 2))
    first = await lane(island.leader, 0, mine=mine)  # what rank 1 has sent is here still
    check([first, await lane(island.followers[0], 1), await follower])
    assert island.script.brought == [PAYLOAD.numpy().tobytes()] * 2


async def test_what_was_computed_anew_is_not_mixed_with_what_was_before(
    island: Island, monkeypatch: pytest.MonkeyPatch
) -> None:
    island.script.ends = [Trouble(Kind.CUT, "it is not to be had"), COMMIT]
    before = [memoryview(bytes(len(contributed(part)))) for part in PARTS]
    ranks = (island.leader, *island.followers)
    lanes = [lane(ends, rank, mine=before[rank]) for rank, ends in enumerate(ranks)]
    assert all(isinstance(end, Trouble) for end in await asyncio.gather(*lanes, return_exceptions=True))
    attached, awaited = asyncio.Event(), island.leader._awaited

    async def watched(key: tuple[int, int, int]) -> Whole:
        whole = await awaited(key)
        attached.set()
        return whole

    monkeypatch.setattr(island.leader, "_awaited", watched)
    late = asyncio.ensure_future(lane(island.followers[0], 1, mine=before[1]))
    await within(DEADLINE, "a lane of what was before", attached.wait())
    anew = [asyncio.ensure_future(lane(ends, rank)) for rank, ends in enumerate(ranks) if rank != 1]
    with pytest.raises(Trouble, match="begins the round anew") as caught:
        await late
    assert caught.value.passing
    anew.insert(1, asyncio.ensure_future(lane(island.followers[0], 1)))
    check(await asyncio.gather(*anew))
    assert island.script.brought == [bytes(TABLE.nbytes), PAYLOAD.numpy().tobytes()]


async def test_what_is_of_no_rank_of_the_island_is_turned_away(island: Island) -> None:
    place = island.place
    strangers = [
        (FollowerRounds(replace(place, token="00" * 16), 1, LIMITS), "not that of this island"),
        (FollowerRounds(replace(place, run_digest="other"), 1, LIMITS), "takes part in another run"),
        (FollowerRounds(place, 3, LIMITS), "rank '3' of 3 sends no lane"),
        (FollowerRounds(place, 2, LIMITS), "the lane of rank 2 has 0 bytes"),
    ]
    ends = [asyncio.ensure_future(lane(island.leader, 0))]
    for stranger, words in strangers:
        with pytest.raises(Trouble, match=words) as caught:
            await lane(stranger, 1)
        assert caught.value.kind is Kind.REFUSED
        await stranger.close()
    island.script.ends = [COMMIT]
    ends += [asyncio.ensure_future(lane(one, rank)) for rank, one in enumerate(island.followers, 1)]
    check(await asyncio.gather(*ends))


@given(st.data())
def test_the_whole_is_final_as_far_as_every_lane_is(data: st.DataObject) -> None:
    whole = Whole(memoryview(bytearray(TABLE.nbytes)), LAYOUTS)
    lanes = [contributed(part).numpy().tobytes() for part in PARTS]
    uploads = {rank: LaneUpload(whole, rank, layout) for rank, layout in enumerate(LAYOUTS)}
    expected, breaks = PAYLOAD.numpy().tobytes(), 3
    while uploads:
        rank = data.draw(st.sampled_from(sorted(uploads)))
        upload, body = uploads[rank], lanes[rank]
        if breaks and data.draw(st.booleans()):  # its stream breaks, and it sends all of it again
            breaks -= 1
            uploads[rank] = LaneUpload(whole, rank, LAYOUTS[rank])
        elif upload.received == len(body):
            upload.feed(decode_frame(end_frame(payload_digest(body))))
            whole.complete(rank)
            del uploads[rank]
        else:
            size = data.draw(st.integers(1, 3)) * len(body) // 3
            chunk = body[upload.received : upload.received + size]
            upload.feed(decode_frame(encode_frame(CHUNK, chunk, offset=upload.received)))
        final = whole.filling.final
        assert bytes(whole.payload[:final]) == expected[:final]
        assert whole.filling.finished == (not uploads)
    assert bytes(whole.payload) == expected and whole.filling.final == len(expected)


@pytest.mark.parametrize(
    ("host", "where"),
    [
        ("127.0.0.1", "127.0.0.1:0"),
        ("localhost", "localhost:0"),
        ("::1", "[::1]:0"),
        ("gpu1.example.org", "0.0.0.0:0"),
        ("10.0.0.3", "0.0.0.0:0"),
        ("fd00::3", "[::]:0"),
    ],
)
def test_where_the_leader_listens(host: str, where: str) -> None:
    assert str(listening_for(host)) == where
