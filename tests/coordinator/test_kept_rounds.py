"""Rounds that are slow to be kept, or are not kept: nothing is announced before."""

from __future__ import annotations

import pytest

from coordinator.events import JournalTrouble, RoundCommitted
from coordinator.journal import JournalError, MemoryJournal
from protos.refusal import Refused
from tests.coordinator.coordinator_rig import HeldJournal, Site, join_request, soon
from tests.coordinator.restart_rig import back, lease_of, payload, send_all, work


async def test_nothing_is_announced_before_it_is_kept() -> None:
    journal = HeldJournal()
    site = Site(nodes=2, rounds=9, journal=journal)
    orders = await site.opened()
    first = site.nodes[0].send(orders[0], payload(site, 0, 0))
    second = site.nodes[1].send(orders[1], payload(site, 1, 0))
    assert len(journal.pending) == 1 and site.run.round == 0
    for exchange in (first, second):
        while exchange._delivery is not None and (frame := exchange._delivery.next()) is not None:
            assert not exchange.served, "the COMMIT"
            assert frame
    assert not site.told(RoundCommitted) and all(node.idle() for node in site.nodes)
    again = site.nodes[0].send(orders[0], payload(site, 0, 0))  # a repetition is late, and served
    assert site.run.counters["late"] == 1
    site.timer.advance(10.0)
    assert site.run.round == 0 and not journal.rounds
    journal.write()
    assert site.run.round == 1 and journal.next == 1
    download = await site.nodes[0].receive(again)
    assert download.commit is not None and download.commit.counted
    assert [order.round for order in await site.opened()] == [1, 1]


async def test_members_may_leave_and_come_back_while_a_round_is_being_kept() -> None:
    journal = HeldJournal()
    site = Site(nodes=3, rounds=9, journal=journal)
    orders = await site.opened()
    send_all(site, orders)
    gone, cut = site.nodes[0], site.nodes[1]
    gone.leave("it has to go")
    cut.die()
    back_again = cut.again(round=0, **work(orders[1]))
    assert back_again.id == "node-1" and back_again.idle(), "no seat in a round that is decided"
    journal.write()
    assert site.run.results.get(0).voters == ("node-0", "node-1", "node-2")  # type: ignore[union-attr]
    assert site.run.registry.roster.members == ("node-1", "node-2")
    download = await back_again.fetch(await back_again.opened(0))
    assert download.commit is not None and download.commit.counted
    assert (await back_again.opened(1)).lease_count == 4
    assert site.run.leases.trained == 12 and set(site.run.leases.held) == {"node-1", "node-2"}


async def test_a_lagging_member_that_catches_up_meanwhile_takes_no_lease_of_a_round_that_is_decided() -> None:
    journal = HeldJournal()
    journal.held = False
    site = Site(nodes=3, rounds=9, journal=journal)
    orders = await site.opened()
    for i in (0, 1):
        site.nodes[i].send(orders[i], payload(site, i, 0))
    site.idle(10.0)
    journal.held = True
    again = await site.opened(site.nodes[:2])
    for i in (0, 1):
        site.nodes[i].send(again[i], payload(site, i, 1))
    assert site.run.round == 1 and len(journal.pending) == 1
    slow = site.nodes[2]
    await slow.receive(slow.send(orders[2], payload(site, 2, 0)))
    assert slow.idle() and site.run.leases.held == {}
    journal.write()
    await slow.fetch(await slow.opened(1))
    assert (await slow.opened(2)).lease_count == 4
    assert len(site.run.leases.held) == 3


async def test_when_all_leave_while_a_round_is_being_kept_it_is_kept() -> None:
    journal = HeldJournal()
    site = Site(nodes=2, rounds=9, journal=journal)
    orders = await site.opened()
    send_all(site, orders)
    for node in site.nodes:
        node.die()
    journal.write()
    assert (site.run.round, site.run.phase) == (1, "gathering")
    back_again = site.nodes[1].again(round=0, **work(orders[1]))
    await back_again.fetch(await back_again.opened(0))
    assert lease_of(await back_again.opened(1)) == (8, 4)


async def test_a_journal_that_fails_suspends_the_run_and_announces_nothing() -> None:
    journal = HeldJournal()
    site = Site(nodes=2, rounds=9, journal=journal)
    orders = await site.opened()
    exchanges = send_all(site, orders)
    journal.write(JournalError("no space left in /somewhere: free some"))
    assert (site.run.phase, site.run.round) == ("suspended", 0)
    assert site.run.finished.is_set() and "no space left" in site.run.reason
    assert site.told(JournalTrouble) == [JournalTrouble("no space left in /somewhere: free some", fatal=True)]
    assert all(node.idle() for node in site.nodes), "they are told nothing, and hold"
    for exchange in exchanges:
        with pytest.raises(Refused, match="this coordinator is stopping, another one goes on") as refused:
            while await soon(exchange.next_frame()) is not None:
                assert not exchange.served
        assert refused.value.code == "UNAVAILABLE"
    with pytest.raises(Refused) as refused:
        site.hub.join(join_request(site.table), "")
    assert refused.value.code == "UNAVAILABLE"


async def test_a_round_that_is_kept_only_after_the_suspension_is_announced_by_the_next_coordinator() -> None:
    journal = HeldJournal()
    site = Site(nodes=2, rounds=9, journal=journal)
    orders = await site.opened()
    exchanges = send_all(site, orders)
    site.hub.suspend("SIGTERM")
    journal.write()
    assert site.run.round == 0 and not site.told(RoundCommitted)
    with pytest.raises(Refused, match="stopping"):
        while await soon(exchanges[0].next_frame()) is not None:
            assert not exchanges[0].served
    journal.held = False
    lost = site.restart()
    assert site.run.round == 1
    again = await back(site, lost, [{"round": 0, **work(order)} for order in orders])
    for node, order in zip(site.nodes, again, strict=True):
        assert (await node.fetch(order)).commit.counted  # type: ignore[union-attr]
    assert [order.round for order in await site.opened()] == [1, 1]


async def test_a_defect_between_rounds_is_told_rather_than_left_standing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(nodes=1, rounds=9)
    order = await site.nodes[0].opened()

    def broken() -> bool:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(site.run.newcomers, "seat", broken)
    site.nodes[0].send(order, payload(site, 0, 0))
    assert site.run.phase == "suspended" and "ZeroDivisionError('a defect')" in site.run.reason
    assert isinstance(site.journal, MemoryJournal) and site.journal.next == 1, "the round is kept"
