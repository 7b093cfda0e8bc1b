"""Replays of results: the same bytes that the rounds had, whole or by lane, from ring and journal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import coordinator.replay
from coordinator.delivery import Delivery
from coordinator.journal import Kept, Loaded, MemoryJournal, RoundRecord
from coordinator.replay import first_kept, replay
from coordinator.result import Result, ResultRing
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable, TableSchedule
from protos.lane_layout import LaneLayout
from protos.refusal import Refused
from protos.wire import COMMIT, decode_frame, payload_digest
from tests.coordinator.contribution_rig import Download, mixed_table, schedule, voted_table

TABLES = schedule(mixed_table(), voted_table())


class Watched(MemoryJournal):
    """Tells what was loaded, and loads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[int] = []
        self.lost: set[int] = set()
        self.from_round = 0

    def first_kept(self, end: int) -> int:
        return min(end, max(self.from_round, super().first_kept(end)))

    def load(self, round_index: int, done: Loaded) -> None:
        self.loads.append(round_index)
        done(None if round_index in self.lost else self.rounds.get(round_index))


class Past:
    """A run of ``rounds`` rounds; the last ``ring`` results are in memory too."""

    def __init__(self, rounds: int = 6, ring: int = 2, tables: TableSchedule = TABLES) -> None:
        self.tables = tables
        self.journal = Watched()
        self.ring = ResultRing()
        self.rounds = rounds
        self.payloads = []
        for index in range(rounds):
            nbytes = tables.of(index).result_nbytes if index != 2 else 0  # a round without voters
            payload = np.random.default_rng(index).bytes(nbytes)
            voters = ("a", "b") if nbytes else ()
            record = RoundRecord(
                round=index,
                epoch=3,
                voters=voters,
                weights=(1, 2) if nbytes else (),
                casting=index % 2 if nbytes else 0,
                nbytes=nbytes,
                digest=payload_digest(payload) if nbytes else "",
                reason=f"reason {index}",
                agreement=(0.75, 0.5) if nbytes else (),
                trained=tuple((node, 0, 1) for node in voters),
                frontier=0,
                returned=(),
            )
            self.payloads.append(payload)
            self.journal.commit(record, [memoryview(payload)], None, lambda error: None)
            if index >= rounds - ring:
                self.ring.put(Result.of(Kept(record, payload)))

    def frames(self, first: int, count: int, *, node: str = "a", **changes: Any) -> Any:
        request = pb.ResultsRequest(first=first, count=count, **changes)
        return replay(
            request,
            node,
            tables=self.tables,
            ring=self.ring,
            journal=self.journal,
            committed=self.rounds,
        )

    async def downloads(self, first: int, count: int, **changes: Any) -> list[Download]:
        found = [Download(self.tables.result_nbytes)]
        async for message in self.frames(first, count, **changes):
            found[-1].add(message)
            if found[-1].commit is not None:
                found.append(Download(self.tables.result_nbytes))
        assert not found.pop().received
        return found


@pytest.mark.parametrize("ring", [1, 3, 6])
@pytest.mark.parametrize("node", ["a", "b", "c"])
async def test_every_round_comes_as_it_was(ring: int, node: str) -> None:
    past = Past(ring=ring)
    downloads = await past.downloads(0, 6, node=node)
    for index, (download, payload) in enumerate(zip(downloads, past.payloads, strict=True)):
        commit = download.commit
        assert commit is not None
        assert bytes(download.payload[: download.received]) == payload
        assert (commit.round, commit.epoch, commit.reason) == (index, 3, f"reason {index}")
        assert commit.counted == (node != "c" and index != 2)
        if commit.counted:
            assert (list(commit.voters), list(commit.weights)) == (["a", "b"], [1, 2])
            assert commit.agreement == (0.75 if node == "a" else 0.5)
    assert past.journal.loads == list(range(6 - ring))


async def test_ring_and_journal_give_the_same_frames() -> None:
    memory, disk = Past(ring=6), Past(ring=0)
    one = [frame async for frame in memory.frames(0, 6)]
    other = [frame async for frame in disk.frames(0, 6)]
    assert one == other and disk.journal.loads == list(range(6)) and not memory.journal.loads


async def test_a_part_of_the_rounds() -> None:
    commits = [download.commit for download in await Past().downloads(3, 2)]
    assert [commit.round for commit in commits if commit is not None] == [3, 4]


def lanes(*buckets: tuple[BucketTable, list[int]]) -> list[pb.LaneBuckets]:
    return [pb.LaneBuckets(table_digest=table.digest, buckets=held) for table, held in buckets]


async def test_lanes_are_cut_as_in_an_exchange() -> None:
    past = Past()
    mixed, voted = TABLES.tables
    for held in ([0, 2], [1], []):
        wanted = lanes((mixed, held), (voted, []))
        for index, download in enumerate(await past.downloads(0, 6, part=True, lanes=wanted)):
            table = TABLES.of(index)
            layout = LaneLayout(table, held if table is mixed else [])
            payload = past.payloads[index]
            expected = b"".join(payload[start:end] for start, end in layout.down.bounds)
            assert bytes(download.payload[: download.received]) == expected
            live = Delivery(Result.of(past.journal.rounds[index]), layout, "a")
            frames = []
            while (frame := live.next()) is not None:
                frames.append(frame)
            assert download.commit == pb.Commit.FromString(bytes(decode_frame(frames[-1]).body))


async def test_all_lanes_together_are_the_whole() -> None:
    past = Past()
    mixed, voted = TABLES.tables
    first = await past.downloads(0, 1, part=True, lanes=lanes((mixed, [0]), (voted, [])))
    second = await past.downloads(0, 1, part=True, lanes=lanes((mixed, [1, 2]), (voted, [0])))
    parts = [bytes(part.payload[: part.received]) for part in (*first, *second)]
    assert b"".join(parts) == past.payloads[0]


MIXED, VOTED = TABLES.tables
BAD: list[tuple[dict[str, Any], str]] = [
    ({"first": 0, "count": 0}, "of 0 rounds"),
    ({"first": 0, "count": 7}, "6 are committed"),
    ({"first": 6, "count": 1}, "6 are committed"),
    ({"first": 1 << 63, "count": 1 << 63}, "are committed"),
    ({"first": 0, "count": 1, "lanes": lanes((MIXED, [0]))}, "may not name buckets"),
    ({"first": 0, "count": 1, "part": True}, "names no lane of table"),
    ({"first": 0, "count": 2, "part": True, "lanes": lanes((MIXED, [0]))}, "names no lane of table"),
    ({"first": 0, "count": 1, "part": True, "lanes": lanes((MIXED, [0]), (MIXED, [1]))}, "two lanes"),
    ({"first": 0, "count": 1, "part": True, "lanes": lanes((MIXED, [3]))}, "names bucket 3"),
    ({"first": 0, "count": 1, "part": True, "lanes": lanes((MIXED, [1, 0]))}, "the order is the table's"),
    ({"first": 0, "count": 1, "part": True, "lanes": lanes((MIXED, [1, 1]))}, "the order is the table's"),
]


@pytest.mark.parametrize(("request_", "words"), BAD, ids=[f"{i} {words}" for i, (_, words) in enumerate(BAD)])
def test_requests_that_cannot_be_met(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        Past().frames(**request_)


async def test_a_table_whose_turn_does_not_come_needs_no_lane() -> None:
    (download,) = await Past().downloads(1, 1, part=True, lanes=lanes((VOTED, [0])))
    assert download.received == VOTED.result_nbytes


def test_what_is_kept_no_more() -> None:
    past = Past(ring=2)
    past.journal.from_round = 3
    assert first_kept(past.ring, past.journal, 6) == 3
    with pytest.raises(Refused, match=r"only the results since round 4 are kept: load a snapshot") as refused:
        past.frames(2, 1)
    assert (refused.value.kind, refused.value.code) == ("fell-behind", "NOT_FOUND")
    past.frames(3, 3)
    past.journal.from_round = 6  # the ring still has the last two
    assert first_kept(past.ring, past.journal, 6) == 4
    past.frames(4, 2)


async def test_a_result_that_is_lost_ends_the_stream_after_those_before_it() -> None:
    past = Past()
    past.journal.lost = {2}
    received = []
    with pytest.raises(Refused, match="the result of round 3 is gone or damaged"):
        async for message in past.frames(0, 6):
            received.append(decode_frame(message).kind)
    assert received.count(COMMIT) == 2


async def test_one_result_is_read_ahead() -> None:
    past = Past(ring=0)
    frames = past.frames(0, 6)
    async for message in frames:
        round_index = None
        if decode_frame(message).kind == COMMIT:
            round_index = pb.Commit.FromString(bytes(decode_frame(message).body)).round
        if round_index is not None:
            assert past.journal.loads == list(range(min(6, round_index + 2)))


async def test_large_results_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.replay, "AHEAD_BYTES", TABLES.result_nbytes - 1)
    past = Past(ring=0)
    large = [index for index in range(6) if TABLES.of(index).result_nbytes == TABLES.result_nbytes]
    seen = -1
    async for message in past.frames(0, 6):
        frame = decode_frame(message)
        if frame.kind == COMMIT:
            seen = pb.Commit.FromString(bytes(frame.body)).round
            ahead = 1 if seen + 1 < 6 and seen + 1 not in large else 0
            assert past.journal.loads == list(range(seen + 1 + ahead))
    assert seen == 5
