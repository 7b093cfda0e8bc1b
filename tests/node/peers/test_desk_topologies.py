"""The desk of a node as the slices and the samples of a round change."""

from __future__ import annotations

import asyncio

from optim.slices import Slice
from protos import atoll_pb2 as pb
from tests.node.peers.desk_rig import (
    TABLES,
    Site,
    at_the_hub,
    digest_of,
    idle,
    order,
    payloads,
    slices,
    soon,
    until,
)


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
