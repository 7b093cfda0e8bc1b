"""The desk of a node: results that others fetch, and what is counted of them."""

from __future__ import annotations

from typing import Any

import pytest

from protos import atoll_pb2 as pb
from tests.node.peers.desk_rig import TABLES, Caller, Site, finished, order, payloads, slices, soon, until


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
