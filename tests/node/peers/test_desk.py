"""The desk of a node: contributions, attempts, topologies, commits and fetches."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import BucketTable
from protos.upload import end_frame
from tests.coordinator.coordinator_rig import voted_table
from tests.node.peers.desk_rig import (
    TABLES,
    Caller,
    Site,
    at_the_hub,
    chunk,
    idle,
    order,
    payloads,
    slices,
    soon,
    until,
    upload_frames,
)


def digest_of(result: bytes) -> bytes:
    return bytes.fromhex(wire.payload_digest(result))


async def delivered(site: Site, rows: list[bytes], voters: str = "abc", **changes: Any) -> list[Caller]:
    return [await site.send(name, row, **changes) for name, row in zip(voters, rows, strict=False)]


async def finished(site: Site, rows: list[bytes], round_index: int = 0) -> bytes:
    """A committed round of one slice."""
    site.desk.reduce(order("abc", round_index=round_index))
    callers = await delivered(site, rows, round_index=round_index)
    await until(lambda: site.told and site.news.round == round_index and site.news.digest)
    result = at_the_hub(site.table, rows, round_index=round_index)
    site.desk.committed(site.commit(result, round_index))
    for caller in callers:
        await soon(caller.served)
    return result


# ------------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("name", sorted(TABLES))
async def test_a_round_of_several_slices(name: str) -> None:
    site, table = Site(TABLES[name]), TABLES[name]
    site.topology(slices(table, 4, 2))
    rows = payloads(table, 3)
    site.desk.reduce(order("abc"))
    callers = {
        (sender, index): await site.send(sender, row, index)
        for sender, row in zip("abc", rows, strict=True)
        for index in range(len(site.parts))
    }
    result = at_the_hub(table, rows)
    await until(lambda: sum(bool(news.digest) for news in site.told) == len(site.parts))
    for news in site.told:
        part = site.parts[news.slice]
        assert (news.round, news.topology, news.attempt) == (0, 1, 1)
        assert news.digest == digest_of(result[part.out_start : part.out_end])
        assert sorted(news.arrived) == ["a", "b", "c"] and not news.refused and not news.failed
    await until(lambda: all(caller.digest for caller in callers.values()))
    assert not any(caller.ended for caller in callers.values())
    site.desk.committed(site.commit(result))
    for (_, index), caller in callers.items():
        await soon(caller.served)
        part = site.parts[index]
        assert caller.ended and caller.result == result[part.out_start : part.out_end]
    site.desk.close()


async def test_results_come_down_while_contributions_go_up() -> None:
    site = Site(TABLES["voted"])
    site.topology()
    rows = payloads(site.table, 3)
    site.desk.reduce(order("abc"))
    callers = [await site.begin(name) for name in "abc"]
    half = site.table.nbytes // 2 // 64 * 64
    for caller, row in zip(callers, rows, strict=True):
        await caller.say(chunk(row[:half]))
    await until(lambda: all(len(caller.result) > half // 2 for caller in callers))
    assert at_the_hub(site.table, rows).startswith(bytes(callers[0].result))


async def test_other_voters_after_a_part_of_the_result_has_gone_out() -> None:
    site = Site(TABLES["voted"])
    site.topology()
    rows = payloads(site.table, 3)
    site.desk.reduce(order("abc"))
    first, second, slow = [await site.begin(name) for name in "abc"]
    await first.say(*upload_frames(rows[0], 4096))
    await second.say(*upload_frames(rows[1], 4096))
    await slow.say(chunk(rows[2][:9600]))
    await until(lambda: first.result and slow.result)
    site.desk.reduce(order("ab", attempt=2))
    await until(lambda: first.digest and second.digest and slow.digest)
    assert first.restarts == slow.restarts == 1
    assert first.result == slow.result == at_the_hub(site.table, rows[:2])
    assert (site.news.attempt, site.news.digest) == (2, digest_of(first.result))
    await slow.say(chunk(rows[2][9600:], 9600), end_frame(wire.payload_digest(rows[2])))
    site.desk.reduce(order("abc", attempt=3))  # it was not too late after all
    await until(lambda: first.restarts == 2 and first.digest)
    assert first.result == at_the_hub(site.table, rows) and site.news.attempt == 3


async def test_a_sender_that_dies_may_come_again() -> None:
    site = Site(TABLES["voted"])
    site.topology()
    rows = payloads(site.table, 2)
    site.desk.reduce(order("ab"))
    whole = await site.send("a", rows[0])
    dying = await site.begin("b")
    await dying.say(chunk(rows[1][:9600]))
    await until(lambda: whole.result)
    dying.die()
    await soon(dying.served)
    assert not site.told
    await site.send("b", rows[1])
    await until(lambda: whole.digest)
    assert whole.restarts == 1 and whole.result == at_the_hub(site.table, rows)


async def test_a_whole_contribution_outlives_its_stream() -> None:
    site = Site()
    site.topology()
    rows = payloads(site.table, 2)
    site.desk.reduce(order("ab", tell=True))
    gone = await site.send("a", rows[0])
    await until(lambda: list(site.news.arrived) == ["a"])
    gone.die()
    await soon(gone.served)
    other = await site.send("b", rows[1])
    await until(lambda: other.digest)
    assert other.result == at_the_hub(site.table, rows)


async def test_a_repeated_contribution_is_ignored_and_answered() -> None:
    site = Site()
    site.topology()
    rows = payloads(site.table, 2)
    site.desk.reduce(order("ab", tell=True))
    first = await site.send("a", rows[0])
    await until(lambda: site.told and list(site.news.arrived) == ["a"])
    again = await site.send("a", bytes(site.table.nbytes))
    assert await first.refused() == "replaced-stream"
    await site.send("b", rows[1])
    await until(lambda: again.digest)
    assert again.result == at_the_hub(site.table, rows)
    assert len(site.told) == 3  # the order, a, the result


async def test_a_second_stream_takes_over_from_an_unfinished_one() -> None:
    site = Site(TABLES["voted"])
    site.topology()
    rows = payloads(site.table, 1)
    site.desk.reduce(order("a"))
    first = await site.begin("a")
    await first.say(chunk(bytes(9600)))
    await until(lambda: first.result)
    second = await site.send("a", rows[0])
    assert await first.refused() == "replaced-stream"
    await until(lambda: second.digest)
    assert second.result == rows[0]


async def test_a_late_contribution_is_told_to_fetch() -> None:
    site = Site()
    site.topology()
    rows = payloads(site.table, 3)
    site.desk.reduce(order("ab"))
    slow = await site.begin("c")
    await slow.say(chunk(rows[2][:64]))
    await delivered(site, rows[:2], "ab")
    await until(lambda: site.told)
    result = at_the_hub(site.table, rows[:2])
    site.desk.committed(site.commit(result))
    await slow.say(chunk(rows[2][64:], 64))  # nobody wants it any more
    await soon(slow.served)
    assert slow.ended and slow.result == result
    late = await site.begin("c")
    assert await late.refused() == "late"


async def test_a_slow_receiver_gets_the_rest_behind_the_commit_and_holds_up_nobody() -> None:
    site = Site(voted_table(4096))
    site.topology()
    rows = payloads(site.table, 3)
    site.desk.reduce(order("abc"))
    callers = [await site.call(site.hello(name)) for name in "abc"]
    for caller in callers[:2]:
        caller.listen()
    for caller, row in zip(callers, rows, strict=True):
        await caller.say(*upload_frames(row, 8192))  # c reads nothing yet
    await until(lambda: all(caller.digest for caller in callers[:2]))
    result = at_the_hub(site.table, rows)
    site.desk.committed(site.commit(result))
    for caller in callers[:2]:
        await soon(caller.served)
    await idle()
    assert not callers[2].served.done()
    callers[2].listen()
    await soon(callers[2].served)
    assert callers[2].result == result
    site.desk.close()


async def test_a_receiver_that_never_reads_is_cut_off_with_the_next_commit() -> None:
    site = Site(voted_table(4096), linger=0.01)
    site.topology()
    stuck = await site.call(site.hello("a"))
    row = payloads(site.table, 1)[0]
    site.desk.reduce(order("a"))
    await stuck.say(*upload_frames(row, 8192))
    await until(lambda: site.told)
    site.desk.committed(site.commit(row))
    site.desk.reduce(order("a", round_index=1))
    await idle()
    assert not stuck.served.done()
    caller = await site.send("a", row, round_index=1)
    await until(lambda: caller.digest)
    site.desk.committed(site.commit(row, 1))
    await soon(stuck.served)
    site.desk.close()


async def test_memory_moves_on_with_the_commit_of_its_own_result_only() -> None:
    table = TABLES["coded"]
    results = []
    for good in (True, False):
        site = Site(table)
        site.topology()
        rows = payloads(table, 3)
        site.desk.reduce(order("abc"))
        callers = await delivered(site, rows)
        await until(lambda site=site: site.told)
        result = at_the_hub(table, rows)
        site.desk.committed(site.commit(result if good else bytes(len(result))))
        for caller in callers:
            await soon(caller.served)
            assert (caller.refusal is None) == good
        assert bool(site.desk.memory.arrays()) == good
        results.append(result)
        site.desk.close()


# ------------------------------------------------------------------------------------------- topologies


async def test_a_topology_in_the_middle_of_a_round() -> None:
    site = Site(TABLES["voted"])
    parts = slices(site.table, 3, 1)
    assert len(parts) == 3
    site.topology(parts, ["me", "me", "a"])
    rows = payloads(site.table, 2)
    site.desk.reduce(order("ab", tell=True))
    stays = [await site.send(name, row, 0) for name, row in zip("ab", rows, strict=True)]
    goes = await site.send("a", rows[0], 1)
    await until(lambda: stays[0].digest and any(news.slice == 1 and news.arrived for news in site.told))
    site.told.clear()
    site.topology(parts, ["me", "a", "me"], number=2)
    assert await goes.refused() == "wrong-slice"
    assert [(news.topology, news.slice, bool(news.digest)) for news in site.told] == [
        (2, 0, True),
        (2, 2, False),
    ]
    site.desk.reduce(order("ab", attempt=2, topology=2))
    for name, row in zip("ab", rows, strict=True):
        await site.send(name, row, 2, topology=2)
    await until(lambda: site.news.digest and site.news.slice == 2)
    result = at_the_hub(site.table, rows)
    assert stays[0].restarts == 0 and stays[0].result == result[: parts[0].out_end]
    assert site.news.digest == digest_of(result[parts[2].out_start :])
    assert [news.attempt for news in site.told if news.slice == 0 and news.digest] == [1, 2]


async def test_streams_of_the_topology_before_find_a_slice_that_stays() -> None:
    site = Site(TABLES["voted"])
    parts = slices(site.table, 3, 1)
    site.topology(parts, ["me", "a", "b"])
    site.topology(parts, ["me", "b", "a"], number=2)
    site.desk.reduce(order("ab", topology=2))
    rows = payloads(site.table, 2)
    old, new = await site.send("a", rows[0], 0, topology=1), await site.send("b", rows[1], 0, topology=2)
    await until(lambda: old.digest and new.digest)
    gone = await site.begin("a", 1, topology=1)
    assert await gone.refused() == "wrong-slice"
    site.topology(parts, ["me", "b", "a"], number=3)
    ancient = await site.begin("a", 0, topology=1, token=site.token("a", 3))
    assert await ancient.refused() == "wrong-slice"


async def test_what_comes_before_topology_and_order_waits_for_them() -> None:
    site = Site()
    site.parts = slices(site.table, 1)
    rows = payloads(site.table, 2)
    early = asyncio.ensure_future(site.send("a", rows[0]))
    await idle()
    assert not site.desk._streams
    site.topology()
    await idle()
    assert not site.desk._streams
    site.desk.reduce(order("ab"))
    caller = await soon(early)
    ahead = asyncio.ensure_future(site.send("b", rows[1], topology=2))
    await idle()
    assert not caller.result
    site.topology(number=2)
    await soon(ahead)
    await until(lambda: caller.digest)
    assert caller.result == at_the_hub(site.table, rows)


async def test_an_order_that_comes_before_its_topology() -> None:
    site = Site()
    site.desk.reduce(order("a"))
    site.topology()
    row = payloads(site.table, 1)[0]
    caller = await site.send("a", row)
    await until(lambda: caller.digest)
    assert caller.result == row


async def test_a_slice_between_no_pieces_is_told() -> None:
    site = Site()
    whole = slices(site.table, 1)[0]
    site.topology([Slice(0, 96, 0, 96), Slice(96, whole.end, 96, whole.out_end)], ["me", "a"])
    site.desk.reduce(order("a"))
    assert "does not lie between pieces" in site.news.failed


async def test_a_contribution_of_other_samples_takes_the_place_of_the_former_one() -> None:
    """The sender was given another lease by a coordinator that was started again."""
    site = Site()
    site.topology()
    former, mine, other = payloads(site.table, 3)
    site.desk.reduce(order("ab"))
    old = await site.send("a", former)
    await site.send("b", other)
    await until(lambda: site.told and site.news.digest and old.digest)
    leases = [pb.Lease(start=8, count=1), pb.Lease(start=0, count=1)]
    site.desk.reduce(order("ab", attempt=2, leases=leases, tell=True))
    await idle()
    assert not site.news.digest, "the coordinator is not told that it is there"
    assert dict(zip(site.news.arrived, (one.start for one in site.news.leases), strict=True)) == {
        "a": 0,
        "b": 0,
    }
    new = await site.send("a", mine, lease=8)
    await until(lambda: new.digest and site.news.digest)
    assert new.result == at_the_hub(site.table, [mine, other])
    assert [one.start for one in site.news.leases] == [0, 8] and list(site.news.arrived) == ["b", "a"]


async def test_other_samples_that_come_before_their_order_are_kept_for_it() -> None:
    site = Site()
    site.topology()
    former, mine, other = payloads(site.table, 3)
    site.desk.reduce(order("ab"))
    await site.send("a", former)
    new = await site.send("a", mine, lease=8)
    await site.send("b", other)
    await idle()
    assert not new.digest
    leases = [pb.Lease(start=8, count=1), pb.Lease(start=0, count=1)]
    site.desk.reduce(order("ab", attempt=2, leases=leases))
    await until(lambda: new.digest)
    assert new.result == at_the_hub(site.table, [mine, other]) and site.news.attempt == 2


async def test_no_voter_has_a_whole_result_taken_back() -> None:
    """The coordinator would take its reducer for a liar."""
    site = Site()
    site.topology()
    former, mine, other = payloads(site.table, 3)
    site.desk.reduce(order("ab"))
    callers = [await site.send("a", former), await site.send("b", other)]
    await until(lambda: site.told and site.news.digest and all(caller.digest for caller in callers))
    told = len(site.told)
    again = await site.begin("a", lease=8)
    assert await again.refused() == "wrong-round"
    site.desk.reduce(order("ab", attempt=2))
    assert site.news.digest == digest_of(at_the_hub(site.table, [former, other]))
    assert len(site.told) == told + 1 and not any(caller.restarts for caller in callers)
    leases = [pb.Lease(start=8, count=1), pb.Lease(start=0, count=1)]
    site.desk.reduce(order("ab", attempt=3, leases=leases))
    new = await site.send("a", mine, lease=8)
    await until(lambda: new.digest)
    assert new.result == at_the_hub(site.table, [mine, other])


async def test_a_refusal_is_of_the_samples_that_were_refused() -> None:
    site = Site()
    site.topology()
    mine = payloads(site.table, 1)[0]
    site.desk.reduce(order("a"))
    assert await (await site.begin("a", nbytes=1)).refused() == "truncated"
    assert [one.node for one in site.news.refused] == ["a"]
    site.desk.reduce(order("a", attempt=2, leases=[pb.Lease(start=8, count=1)], tell=True))
    assert not site.news.refused
    new = await site.send("a", mine, lease=8)
    await until(lambda: new.digest)


async def test_news_are_told_again_with_every_order() -> None:
    site = Site()
    site.topology()
    site.desk.reduce(order("a"))
    await site.send("a", payloads(site.table, 1)[0])
    await until(lambda: site.told)
    before = site.told.copy()
    site.desk.reduce(order("a"))  # the coordinator has not got it
    assert site.told == [before[0], before[0]]


# ------------------------------------------------------------------------------------------- own slices


async def test_the_nodes_own_stream_needs_no_token_and_is_not_counted() -> None:
    site = Site()
    site.parts = slices(site.table, 1)
    row = payloads(site.table, 1)[0]
    caller = await site.begin("me", token=b"", local=True)  # before its name is known to the desk
    site.topology()
    site.desk.reduce(order(["me"]))
    await caller.say(*upload_frames(row))
    await until(lambda: caller.digest)
    assert caller.result == row
    assert not any(site.meter.counts().values())


async def test_bytes_are_counted_by_kind() -> None:
    site = Site()
    site.topology()
    rows = payloads(site.table, 3)
    result = await finished(site, rows)
    counts = site.meter.counts()
    assert 0 < counts["down", "contribution"] - 3 * site.table.nbytes < 3 * 400
    assert 0 < counts["up", "result"] - 3 * len(result) < 3 * 200
    assert not counts["up", "state"] and not counts["down", "result"]
    await finished(site, rows, 1)
    before = site.meter.counts()
    site.desk.shelf.put(0, site.commit(result), result)
    for round_index, kind in ((1, "result"), (0, "state")):
        fetch = (await site.call(site.fetching("a", 0, len(result), round_index))).listen()
        await soon(fetch.served)
        after = site.meter.counts()
        assert after["up", kind] - before["up", kind] > len(result)  # type: ignore[index]
        before = after


# ------------------------------------------------------------------------------------------- fetches


async def fetch(site: Site, start: int, end: int, round_index: int = 0, **changes: Any) -> Caller:
    return (await site.call(site.fetching("c", start, end, round_index, **changes))).listen()


@pytest.mark.parametrize("where", ["shelf", "slices"])
async def test_ranges_of_a_result(where: str) -> None:
    site = Site(TABLES["voted"])
    site.topology(slices(site.table, 3, 1))
    rows = payloads(site.table, 1)
    nbytes = site.table.result_nbytes
    if where == "shelf":
        site.desk.shelf.put(0, pb.Commit(), rows[0])
    else:
        site.desk.reduce(order("a"))
        for index in range(3):
            await site.send("a", rows[0], index)
        await until(lambda: sum(bool(news.digest) for news in site.told) == 3)
    inner = site.parts[1]
    for start, end in (
        (0, nbytes),
        (inner.out_start, inner.out_end),
        (5, 6),
        (inner.out_start - 3, nbytes - 1),
    ):
        caller = await fetch(site, start, end)
        await soon(caller.served)
        assert caller.ended and caller.digest and caller.result == rows[0][start:end]
        assert caller.first == start


@pytest.mark.parametrize(
    ("start", "end", "kind"),
    [(0, 0, "bad-transfer"), (5, 4, "bad-transfer"), (0, 10**9, "bad-transfer"), (0, 64, "not-kept")],
)
async def test_ranges_that_are_not_here(start: int, end: int, kind: str) -> None:
    site = Site()
    site.topology()
    assert await (await fetch(site, start, end)).refused() == kind


async def test_a_finished_slice_can_be_fetched_until_the_next_commit() -> None:
    site = Site()
    site.topology()
    rows = payloads(site.table, 3)
    result = await finished(site, rows)
    site.desk.reduce(order("abc", round_index=1))
    caller = await fetch(site, 0, len(result))
    await soon(caller.served)
    assert caller.result == result
    site.desk.committed(pb.Commit(round=1))
    assert await (await fetch(site, 0, len(result))).refused() == "not-kept"


async def test_an_uncommitted_result_stays_when_the_next_round_opens() -> None:
    """The commit's announcement was lost with the session."""
    site = Site()
    site.topology()
    row = payloads(site.table, 1)[0]
    site.desk.reduce(order("a"))
    await site.send("a", row)
    await until(lambda: site.told)
    site.desk.reduce(order("a", round_index=1))
    caller = await fetch(site, 0, len(row))
    await soon(caller.served)
    assert caller.result == row
    site.desk.reduce(order("a", round_index=0, attempt=9))  # of the past
    assert site.news.attempt == 1


def test_the_hubs_bytes_are_those_of_the_rig() -> None:
    """What these tests compare with is the definition, where it is simple."""
    table: BucketTable = voted_table(3)
    rows = payloads(table, 3)
    bits = [np.unpackbits(np.frombuffer(row, np.uint8)) for row in rows]
    assert at_the_hub(table, rows) == np.packbits(sum(bit.astype(int) for bit in bits) >= 2).tobytes()
