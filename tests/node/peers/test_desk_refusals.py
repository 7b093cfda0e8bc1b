"""What a desk does not take, and what it lets others take of its node."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from node.exchange.trouble import Trouble
from optim.slices import Slice, slice_pieces, units
from protos import wire
from protos.upload import end_frame
from tests.node.peers.desk_rig import (
    DEADLINE,
    TABLES,
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


async def open_site(**limits: Any) -> Site:
    site = Site(**limits)
    site.topology()
    site.desk.reduce(order("abc"))
    return site


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"token": b"token of b in 1"}, "bad-token"),
        ({"token": b""}, "bad-token"),
        ({"sender": "stranger"}, "bad-token"),
        ({"sender": "me", "token": b"token of me in 1"}, "bad-token"),
        ({"run_digest": "another"}, "join-refused"),
        ({"protocol": wire.PROTOCOL + 1}, "join-refused"),
        ({"index": 1}, "wrong-slice"),
        ({"nbytes": 64}, "truncated"),
        ({"nbytes": 1 << 60}, "oversized"),
    ],
)
async def test_hellos(changes: dict[str, Any], kind: str) -> None:
    site = await open_site()
    caller = await site.begin(**{"sender": "a", **changes})
    assert await caller.refused() == kind
    assert not site.desk._rows.nbytes and not site.desk._open
    assert bool(site.told) == (kind in ("truncated", "oversized")), "only of members that prove who they are"


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\xff" * 40,
        chunk(b"x"),
        wire.encode_frame(wire.HEADER, b"\xff\xff\xff"),
        wire.encode_frame(wire.HEADER, b""),
    ],
)
async def test_first_messages_that_are_no_hello(message: bytes) -> None:
    site = await open_site()
    caller = (await site.call(message)).listen()
    assert await caller.refused() == "bad-frame"


async def test_a_stream_that_says_nothing() -> None:
    site = await open_site(hello=0.01)
    assert await (await site.call()).listen().refused() == "truncated"
    ended = await site.call()
    await ended.stream.end()
    assert await ended.listen().refused() == "truncated"


N = TABLES["mixed"].nbytes
GOOD = payloads(TABLES["mixed"], 1)[0]
BAD = bytearray(GOOD)
BAD[64 + 40 : 64 + 44] = np.array([np.nan], "<f4").tobytes()


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([chunk(GOOD[64:], 64)], "out-of-order"),
        ([chunk(GOOD[:64]), chunk(GOOD[:64])], "out-of-order"),
        ([chunk(GOOD), chunk(b"\0", N)], "oversized"),
        ([chunk(b"")], "bad-frame"),
        ([chunk(GOOD[:64]), end_frame(wire.payload_digest(GOOD[:64]))], "truncated"),
        ([chunk(GOOD), end_frame(wire.payload_digest(GOOD[1:]))], "bad-digest"),
        ([wire.encode_frame(wire.COMMIT)], "bad-frame"),
        ([b"\xff" * 30], "bad-frame"),
        ([chunk(bytes(BAD))], "not-finite"),
        ([chunk(GOOD[:100]), None], "truncated"),
    ],
)
async def test_contributions(frames: list[bytes | None], kind: str) -> None:
    site = await open_site()
    caller = await site.begin("a")
    for frame in frames:
        await (caller.stream.end() if frame is None else caller.say(frame))
    assert await caller.refused() == kind
    (refusal,) = site.news.refused
    assert (refusal.node, refusal.kind) == ("a", kind) and refusal.reason
    assert len(site.said) == 1
    again = await site.begin("a")
    assert await again.refused() == kind, "who was refused is not waited for, and not taken"
    rows = payloads(site.table, 3)
    site.desk.reduce(order("bc", attempt=2))
    others = [await site.send(name, row) for name, row in zip("bc", rows[1:], strict=True)]
    await until(lambda: all(other.digest for other in others))
    assert others[0].result == at_the_hub(site.table, rows[1:])
    assert [one.node for one in site.news.refused] == ["a"]


async def test_what_comes_behind_the_end_of_a_contribution_takes_nothing_back() -> None:
    site = await open_site()
    caller = await site.send("a", GOOD)
    await caller.say(chunk(b"more", N))
    assert await caller.refused() == "bad-frame"
    assert not any(news.refused for news in site.told)
    rows = payloads(site.table, 3)
    others = [await site.send(name, row) for name, row in zip("bc", rows[1:], strict=True)]
    await until(lambda: all(other.digest for other in others))
    assert next(iter(site.news.arrived)) == "a" and not site.news.refused


async def test_values_of_a_slice_are_checked_where_they_lie_in_the_table() -> None:
    table = TABLES["coded"]
    site = Site(table)
    finest = units(table, slice_pieces(table))
    parts = [Slice(u.start, u.end, u.out_start, u.out_end) for u in finest]
    site.topology(parts)
    site.desk.reduce(order("abc"))
    row = bytearray(payloads(table, 1)[0])
    place = table.offsets[[bucket.name for bucket in table.buckets].index("m")]
    row[place + 400 : place + 404] = np.array([np.inf], "<f4").tobytes()
    for index, part in enumerate(parts):
        caller = await site.send("a", bytes(row), index)
        if part.start <= place + 400 < part.end:
            assert await caller.refused() == "not-finite"
        else:
            await idle()
            assert caller.refusal is None


# ------------------------------------------------------------------------------------------- bounds


async def test_who_is_ahead_of_everything_waits_only_so_long() -> None:
    site = Site(wait=0.01)
    site.parts = slices(site.table, 1)
    assert await (await site.begin("a")).refused() == "wrong-round"
    site.topology()
    assert await (await site.begin("a")).refused() == "wrong-round"
    site.desk.reduce(order("a"))
    assert await (await site.begin("a", topology=2)).refused() == "wrong-round"
    assert await (await site.begin("a", round_index=1)).refused() == "wrong-round"
    assert not site.desk._strangers and not site.desk._open


@pytest.mark.parametrize("what", ["nothing", "a topology to come"])
async def test_strangers_keep_nobody_out(what: str) -> None:
    site = await open_site(strangers=3)
    ahead = site.hello("stranger", topology=9, token=b"guessed")
    for _ in range(20):
        await site.call(None if what == "nothing" else ahead)
        await idle()
    assert len(site.desk._strangers) == 3
    callers = [await site.send(name, row) for name, row in zip("abc", payloads(site.table, 3), strict=True)]
    await until(lambda: site.told and site.news.digest)
    assert all(caller.digest for caller in callers)
    assert len(site.desk._strangers) <= 3
    site.desk.close()


async def test_who_gives_way_and_who_is_refused_hold_nothing_any_more() -> None:
    site = await open_site(strangers=2, linger=DEADLINE)
    silent = [await site.call() for _ in range(2)]
    wrong = [await site.call(site.hello("a", token=b"wrong")) for _ in range(2)]  # who read no refusal
    await until(lambda: all(caller.served.done() for caller in silent))
    await until(lambda: len(site.desk._strangers) == 2)
    await site.begin("b")
    await until(lambda: wrong[0].served.done() and len(site.desk._streams) == 1)
    assert not wrong[1].served.done()


async def test_how_many_streams_a_node_has_open_is_bounded() -> None:
    site = await open_site(streams=2)
    site.topology(slices(TABLES["mixed"], 4, 3), number=2)
    kept = [await site.begin("a", index, topology=2) for index in range(2)]
    await until(lambda: len(site.desk._streams) == 2)
    assert await (await site.begin("a", 2, topology=2)).refused() == "overloaded"
    await site.begin("b", 2, topology=2)
    await until(lambda: len(site.desk._streams) == 3)
    kept[0].die()
    await soon(kept[0].served)
    await site.begin("a", 2, topology=2)
    await until(lambda: len(site.desk._streams) == 4 - 1)


async def test_how_much_a_node_fetches_at_a_time_is_bounded() -> None:
    site = await open_site(fetches=1)
    site.desk.shelf.put(0, site.commit(GOOD), GOOD)
    slow = await site.call(site.fetching("a", 0, N))
    await until(lambda: site.desk._fetches == {"a": 1})
    assert await (await site.call(site.fetching("a", 0, N))).listen().refused() == "overloaded"
    other = (await site.call(site.fetching("b", 0, N))).listen()
    await soon(other.served)
    assert other.result == GOOD
    slow.listen()
    await soon(slow.served)
    assert slow.result == GOOD and not site.desk._fetches


async def test_a_fetch_by_somebody_unknown_waits_for_the_topology_that_names_it() -> None:
    site = await open_site()
    site.desk.shelf.put(0, site.commit(GOOD), GOOD)
    hello = site.fetching("newcomer", 0, N, token=site.token("newcomer", 2))
    caller = (await site.call(hello)).listen()
    await until(lambda: len(site.desk._strangers) == 1)
    site.names.append("newcomer")
    site.topology(number=2)
    await soon(caller.served)
    assert caller.result == GOOD
    assert await (await site.call(site.fetching("a", 0, N, token=b"wrong"))).listen().refused() == "bad-token"


async def test_memory_is_taken_for_announced_contributions_alone_and_given_back() -> None:
    site = await open_site()
    rows = site.desk._rows
    callers = [await site.begin(name) for name in "abc"]
    await until(lambda: len(site.desk._streams) == 3)
    assert rows.nbytes == 0
    payload = payloads(site.table, 3)
    for caller, row in zip(callers, payload, strict=True):
        await caller.say(*upload_frames(row))
    await until(lambda: site.told)
    for round_index in (0, 1):
        site.desk.committed(site.commit(at_the_hub(site.table, payload), round_index))
        assert rows.nbytes == 3 * N
        site.desk.reduce(order("abc", round_index=round_index + 1))
    assert rows.nbytes == 3 * N
    await site.begin("a", round_index=2)
    await until(lambda: rows.nbytes == 2 * N)
    parts = slices(TABLES["mixed"], 4, 3)
    site.topology(parts, ["b"] * len(parts), number=2)
    assert rows.nbytes == 0, "no slice of that size is this node's any more"


async def test_ignored_bytes_are_bounded() -> None:
    site = await open_site()
    await site.send("a", GOOD)
    await until(lambda: site.desk._streams)
    await idle()
    again = await site.begin("a")
    await idle()
    with pytest.raises(Trouble):
        for _ in range(40):
            await again.say(chunk(bytes(wire.CHUNK_BYTES)))
    assert again.refusal is not None and again.refusal.kind == "oversized"


async def test_refusals_are_said_now_and_then() -> None:
    site = await open_site()
    for passed, said in ((0.0, 1), (1.0, 1), (10.0, 2)):
        site.time += passed
        await (await site.begin("a", token=b"wrong")).refused()
        assert len(site.said) == said
    assert "token" in site.said[0]


async def test_closing_ends_everything() -> None:
    site = await open_site()
    callers = [await site.begin("a"), await site.begin("b", round_index=1)]
    await until(lambda: site.desk._streams and len(site.desk._open) == 2)
    site.desk.close()
    site.desk.close()
    assert [await caller.refused() for caller in callers] == ["broken-stream"] * 2
    assert await (await site.begin("c")).refused() == "broken-stream"
    assert not site.desk._open
