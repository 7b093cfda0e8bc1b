"""The desk of a node: contributions, attempts, commits, and its own slices."""

from __future__ import annotations

import numpy as np
import pytest

from protos import wire
from protos.buckets import BucketTable
from protos.upload import end_frame
from tests.coordinator.contribution_rig import voted_table
from tests.node.peers.desk_rig import (
    TABLES,
    Site,
    at_the_hub,
    chunk,
    delivered,
    digest_of,
    idle,
    order,
    payloads,
    slices,
    soon,
    until,
    upload_frames,
)

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


# ------------------------------------------------------------------------------------------- the rig


def test_the_hubs_bytes_are_those_of_the_rig() -> None:
    """What these tests compare with is the definition, where it is simple."""
    table: BucketTable = voted_table(3)
    rows = payloads(table, 3)
    bits = [np.unpackbits(np.frombuffer(row, np.uint8)) for row in rows]
    assert at_the_hub(table, rows) == np.packbits(sum(bit.astype(int) for bit in bits) >= 2).tobytes()
