"""A coordinator that is gone, another that goes on with its journal, and rounds that are slow to be kept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.events import JournalTrouble, RoundCommitted, RunResumed
from coordinator.gathering import BACK_SECONDS
from coordinator.journal import JournalError, MemoryJournal
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from tests.coordinator.coordinator_rig import (
    FakeNode,
    HeldJournal,
    Site,
    contribution_frames,
    join_request,
    random_payload,
    soon,
)

ROUNDS, NODES, AT = 5, 3, 2  # the coordinator dies in the third round
POINTS = ("before the orders", "with the orders", "one in", "one in parts", "two in", "all in")


def payload(site: Site, node: int, round_index: int) -> bytes:
    return random_payload(100 * round_index + node, site.table)


def work(order: pb.RoundOpen | None) -> dict[str, Any]:
    """What a node that was given this order has in hand."""
    if order is None:
        return {}
    return {
        "lease_round": order.round,
        "lease_start": order.lease_start,
        "lease_count": order.lease_count,
        "samples": order.frontier,
    }


def digest(round_index: int) -> str:
    return f"state-{round_index + 1}"


async def whole_round(site: Site, orders: Sequence[pb.RoundOpen], ledger: list[tuple[Any, ...]]) -> None:
    """All nodes deliver, receive and report; their leases and the result go into the ledger."""
    exchanges = [
        node.send(order, payload(site, i, order.round))
        for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True))
    ]
    for node, order, exchange in zip(site.nodes, orders, exchanges, strict=True):
        download = await node.receive(exchange)
        commit = download.commit
        assert commit is not None and commit.counted and list(commit.voters) == [n.id for n in site.nodes]
        ledger.append((order.round, node.id, order.lease_start, order.lease_count, commit.payload_digest))
        node.report(order.round, digest(order.round))


async def undisturbed() -> list[tuple[Any, ...]]:
    site, ledger = Site(nodes=NODES, rounds=ROUNDS), []  # type: ignore[var-annotated]
    for _ in range(ROUNDS):
        await whole_round(site, await site.opened(), ledger)
    return ledger


async def back(site: Site, lost: Sequence[FakeNode], claims: Sequence[dict[str, Any]]) -> list[pb.RoundOpen]:
    """All nodes join again, the last one first."""
    found = [
        node.again(site.hub, **claim) for node, claim in zip(reversed(lost), reversed(claims), strict=True)
    ]
    site.nodes = found[::-1]
    assert [node.id for node in site.nodes] == [node.id for node in lost]
    return await site.opened()


@pytest.mark.parametrize("point", POINTS)
async def test_a_restart_at_any_point_of_a_round_changes_nothing(point: str) -> None:
    site, ledger = Site(nodes=NODES, rounds=ROUNDS), []  # type: ignore[var-annotated]
    for _ in range(AT):
        await whole_round(site, await site.opened(), ledger)
    orders = await site.opened() if point != "before the orders" else [None] * NODES
    sent = {"one in": 1, "one in parts": 0, "two in": 2, "all in": NODES}.get(point, 0)
    for i, order in enumerate(orders[:sent]):
        assert order is not None
        site.nodes[i].send(order, payload(site, i, AT))
    if point == "one in parts":
        assert orders[0] is not None
        frames = contribution_frames(orders[0], site.table, payload(site, 0, AT), chunk=64)
        site.nodes[0].feed(*frames[:2])
    kept = point == "all in"  # and nobody has heard of it
    lost = site.restart()
    assert (site.run.phase, site.run.round) == ("gathering", AT + kept)
    assert site.told(RunResumed)[0].members == ("node-0", "node-1", "node-2")
    claims = [{"round": AT, "state_digest": digest(AT - 1), **work(order)} for order in orders]
    if not kept:
        again = await back(site, lost, claims)
        assert all(new == old for new, old in zip(again, orders, strict=True) if old is not None)
        await whole_round(site, again, ledger)
    else:
        again = await back(site, lost, claims)
        for node, order, before in zip(site.nodes, again, orders, strict=True):
            commit = (await node.fetch(order)).commit
            assert commit is not None and commit.counted, "its payload of before"
            ledger.append((AT, node.id, *_lease(before), commit.payload_digest))
            node.report(AT, digest(AT))
    for _ in range(AT + 1, ROUNDS):
        await whole_round(site, await site.opened(), ledger)
    assert ledger == await undisturbed()
    assert site.run.phase == "done" and site.run.leases.trained == site.run.leases.frontier == 60


def _lease(order: pb.RoundOpen | None) -> tuple[int, int]:
    assert order is not None
    return order.lease_start, order.lease_count


@pytest.mark.parametrize("holders", [c for n in range(1, 3) for c in itertools.combinations(range(3), n)])
async def test_those_with_work_in_hand_keep_it_and_the_others_take_the_rest(holders: tuple[int, ...]) -> None:
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    orders = await site.opened()
    lost = site.restart()
    claims = [
        {"round": 1, "state_digest": "state-1", **(work(order) if i in holders else {})}
        for i, order in enumerate(orders)
    ]
    again = await back(site, lost, claims)
    assert [_lease(again[i]) for i in holders] == [_lease(orders[i]) for i in holders]
    assert sorted(map(_lease, again)) == sorted(map(_lease, orders))
    await whole_round(site, again, [])
    assert site.run.leases.trained == 24 and not site.run.leases.returned


async def test_a_snapshot_that_is_due_waits_for_the_round_in_hand() -> None:
    """A node that is asked for its state instead takes that round for lost, with what it has computed."""
    site = Site(nodes=NODES, rounds=ROUNDS, snapshot_every=2)
    await site.play()
    await site.play()
    for node in site.nodes:
        message = await node.order()
        assert message is not None and message.donate.round == 2
    orders = await site.opened()
    lost = site.restart()  # and no part of that snapshot has come
    claims = [{"round": 2, "state_digest": "state-2", **work(order)} for order in orders]
    again = await back(site, lost, claims)
    assert again == orders
    for i, (node, order) in enumerate(zip(site.nodes, again, strict=True)):
        node.send(order, payload(site, i, 2))
    for node in site.nodes:
        message = await node.order()
        assert message is not None and message.donate.round == 3


async def test_samples_that_had_returned_are_read_after_a_restart() -> None:
    site = Site(nodes=NODES, rounds=ROUNDS)
    orders = await site.opened()
    site.nodes[1].abstain(orders[1])
    for i in (0, 2):
        site.nodes[i].send(orders[i], payload(site, i, 0))
    lost = site.restart()
    again = await back(site, lost, [{"round": 0}] * 3)
    for node, order in zip(site.nodes, again, strict=True):
        await node.fetch(order)
    assert [_lease(order) for order in await site.opened()] == [(4, 4), (12, 4), (16, 4)]


async def test_a_second_restart_still_knows_the_nodes() -> None:
    """Each time by secrets that the coordinator before has given out."""
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    for _ in range(3):
        orders = await site.opened()
        lost = site.restart()
        claims = [{"round": 1, "state_digest": "state-1", **work(order)} for order in orders]
        found = await back(site, lost, claims)
        assert list(map(_lease, found)) == list(map(_lease, orders))
        for node, order in zip(site.nodes, found, strict=True):
            node.outbox._messages.appendleft(pb.CoordinatorMessage(round_open=order))
    site.nodes[0].die()  # and with one that was given out in the middle of a round
    site.nodes[0] = site.nodes[0].again(round=1, state_digest="state-1", **work(orders[0]))
    lost = site.restart()
    assert [n.id for n in (node.again(site.hub, round=1, state_digest="state-1") for node in lost)] == [
        "node-0",
        "node-1",
        "node-2",
    ]


async def test_a_restart_before_the_first_round_still_knows_who_was_back() -> None:
    """By secrets that no journal has seen, and by one that its node has never been given."""
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    orders = await site.opened()
    lost = site.restart()
    claims = [{"round": 1, "state_digest": "state-1", **work(order)} for order in orders]
    site.nodes = [lost[i].again(site.hub, **claims[i]) for i in (0, 1)]
    assert "2 of 3 members are back" in site.run.reason
    unheard = [site.restart()[0], *lost[1:]]
    found = await back(site, unheard, claims)
    assert list(map(_lease, found)) == list(map(_lease, orders))


async def test_a_secret_is_good_for_one_session() -> None:
    site = Site(nodes=2, rounds=ROUNDS)
    await site.play()
    old = site.nodes[0]
    new = old.again(round=1, state_digest="state-1")
    assert new.id == old.id and new.reply.session != old.reply.session
    with pytest.raises(Refused, match="session"):
        site.hub.node_of(old.reply.session)
    stranger = FakeNode(site.hub, former="made-up")
    assert stranger.id == "node-2" and not stranger.reply.session.startswith("made")


# --------------------------------------------------------------------------------------------- who comes back


async def test_while_nobody_comes_it_waits() -> None:
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    site.restart()
    site.timer.advance(100_000.0)
    assert site.run.phase == "gathering"
    assert site.run.reason == "going on after 1 rounds: 0 of 3 members are back"


async def test_who_comes_and_goes_ends_nothing() -> None:
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    lost = site.restart()
    lost[0].again(site.hub, round=1, state_digest="state-1").die()
    site.timer.advance(100_000.0)
    assert site.run.phase == "gathering"
    assert lost[1].again(site.hub, round=1, state_digest="state-1").id == "node-1"


async def test_after_the_grace_it_goes_on_with_those_who_are_back() -> None:
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    orders = await site.opened()
    lost = site.restart()
    site.nodes = [lost[i].again(site.hub, round=1, state_digest="state-1", **work(orders[i])) for i in (0, 2)]
    site.idle(BACK_SECONDS - 1)
    assert site.run.phase == "gathering" and "2 of 3 members are back" in site.run.reason
    site.idle(1.0)
    again = await site.opened()
    assert [_lease(order) for order in again] == [_lease(orders[0]), _lease(orders[2])]
    assert list(again[0].members) == ["node-0", "node-2"]
    late = lost[1].again(site.hub, round=1, state_digest="state-1", **work(orders[1]))
    for node, order in zip(site.nodes, again, strict=True):
        node.send(order, payload(site, 0, 1))
    order = await late.opened(1)
    assert order.result_ready and list(order.members) == ["node-0", "node-2", "node-1"]
    await late.fetch(order)
    rest = await site.opened()
    assert _lease(orders[1]) in [_lease(order) for order in rest], "what it had is read by another"


async def test_who_is_back_with_another_state_is_not_waited_for_but_loads() -> None:
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    lost = site.restart()
    site.nodes = [node.again(site.hub, round=1, state_digest="state-1") for node in lost[:2]]
    wrong = lost[2].again(site.hub, round=1, state_digest="bad")
    assert wrong.reply.needs_state
    site.nodes.append(wrong)
    site.idle(BACK_SECONDS)
    assert site.run.phase == "training" and wrong.node.waits
    assert site.run.registry.roster.members == ("node-0", "node-1") and wrong.node.state == "joining"


async def test_strangers_alone_replay_and_go_on() -> None:
    site = Site(nodes=2, rounds=9)
    for _ in range(4):
        await site.play()
    site.restart()
    stranger = site.add()
    assert stranger.id == "node-2", "the names of those who were here are not given away"
    order, _ = await stranger.replay()
    assert (order.first, order.count) == (0, 4)
    stranger.ready(4, "state-4")
    site.idle(BACK_SECONDS)
    assert (await stranger.opened(4)).members == ["node-2"]


async def test_a_run_that_had_ended_gives_the_last_result_and_ends() -> None:
    site = Site(nodes=2, rounds=1)
    orders = await site.opened()
    for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True)):
        node.send(order, payload(site, i, 0))
    lost = site.restart()
    site.nodes = [node.again(site.hub, round=0) for node in lost]
    for node in site.nodes:
        download = await node.fetch(await node.opened(0))
        assert download.commit is not None and download.commit.counted
        stop = await node.stopped()
        assert stop.done and stop.reason == "all 1 rounds are committed"
        node.leave(stop.reason)
    assert site.run.phase == "done" and site.run.finished.is_set()


async def test_a_run_that_had_ended_waits_for_nobody_for_ever() -> None:
    site = Site(nodes=2, rounds=1)
    await site.play()
    site.restart()
    site.timer.advance(BACK_SECONDS)
    assert site.run.phase == "done"
    site.timer.advance(site.run.plan.stall)
    assert site.run.finished.is_set()


async def test_a_coordinator_that_ended_as_the_run_began_lets_it_begin_again() -> None:
    site = Site(nodes=2, present=0)
    journal = site.journal
    site.add(), site.add()
    journal.rosters.clear()
    site.restart()
    assert not site.run.begun and site.run.reason == "0 of 2 nodes"
    site.add(), site.add()
    assert [_lease(order) for order in await site.opened()] == [(0, 4), (4, 4)]


async def test_a_journal_that_has_lost_its_tail_goes_on_from_the_nodes() -> None:
    """The disk lied: the last two rounds are gone, and the nodes hold them."""
    site = Site(nodes=NODES, rounds=9)
    for _ in range(3):
        await site.play()
    orders = await site.opened()
    for index in (1, 2):
        del site.journal.rounds[index]
    site.journal.next = 1
    lost = site.restart()
    assert site.run.round == 1
    claim = {"round": 3, "state_digest": "state-3"}
    site.nodes = [lost[i].again(site.hub, **claim, **work(orders[i])) for i in (0, 1)]
    behind = lost[2].again(site.hub, round=1, state_digest="state-1")
    again = await site.opened()
    assert [order.round for order in again] == [3, 3]
    assert [_lease(order) for order in again] == [_lease(orders[0]), _lease(orders[1])]
    assert (
        "the journal ends after 1 rounds, nodes hold the state after 3" in site.told(JournalTrouble)[0].text
    )
    assert behind.node.state == "joining" and behind.node.waits, "results of two rounds are nowhere"
    for i, (node, order) in enumerate(zip(site.nodes, again, strict=True)):
        node.send(order, payload(site, i, 3))
    assert site.run.round == 4 and site.journal.next == 4
    for node in site.nodes:  # the one that is behind needs their state
        message = await node.order()
        assert message is not None and message.donate.round == 4


async def test_who_is_ahead_after_the_grace_loads_what_the_others_have() -> None:
    site = Site(nodes=2, rounds=9)
    for _ in range(3):
        await site.play()
    del site.journal.rounds[2]
    site.journal.next = 2
    lost = site.restart()
    site.nodes = [lost[0].again(site.hub, round=2, state_digest="state-2")]
    site.idle(BACK_SECONDS)
    await site.opened()
    late = lost[1].again(site.hub, round=3, state_digest="state-3")
    assert late.reply.needs_state and late.node.state == "joining"
    with pytest.raises(Refused, match="the run has begun without it"):
        site.hub.join(join_request(site.table, round=3, state_digest="state-3"), "")


# ------------------------------------------------------------------------------------------ slow to be kept


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
    for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True)):
        node.send(order, payload(site, i, 0))
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
    for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True)):
        node.send(order, payload(site, i, 0))
    for node in site.nodes:
        node.die()
    journal.write()
    assert (site.run.round, site.run.phase) == (1, "gathering")
    back_again = site.nodes[1].again(round=0, **work(orders[1]))
    await back_again.fetch(await back_again.opened(0))
    assert _lease(await back_again.opened(1)) == (8, 4)


async def test_a_journal_that_fails_suspends_the_run_and_announces_nothing() -> None:
    journal = HeldJournal()
    site = Site(nodes=2, rounds=9, journal=journal)
    orders = await site.opened()
    exchanges = [
        node.send(order, payload(site, i, 0))
        for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True))
    ]
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
    exchanges = [
        node.send(order, payload(site, i, 0))
        for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True))
    ]
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


# ----------------------------------------------------------------------------------- cut off for a moment


async def test_a_member_that_was_cut_off_for_a_moment_has_its_seat_and_its_samples_again() -> None:
    site = Site(nodes=2, rounds=9)
    orders = await site.opened()
    frames = contribution_frames(orders[1], site.table, payload(site, 1, 0), chunk=64)
    site.nodes[1].feed(*frames[:2])
    site.nodes[1].die()
    back_again = site.nodes[1].again(**work(orders[1]))
    order = await back_again.opened(0)
    assert back_again.id == "node-1" and order == orders[1], "the payload that it has in hand still fits"
    first = site.nodes[0].send(orders[0], payload(site, 0, 0))
    second = back_again.send(order, payload(site, 1, 0))
    commits = [(await n.receive(e)).commit for n, e in ((site.nodes[0], first), (back_again, second))]
    assert [commit.counted for commit in commits if commit is not None] == [True, True]
    assert site.run.leases.trained == 8 and site.run.registry.roster.epoch == 1


async def test_a_payload_that_had_arrived_counts_once() -> None:
    site = Site(nodes=3, rounds=9)
    orders = await site.opened()
    site.nodes[1].send(orders[1], payload(site, 1, 0))
    site.nodes[1].die()
    back_again = site.nodes[1].again(**work(orders[1]))
    order = await back_again.opened(0)
    assert order == orders[1]
    twice = back_again.send(order, payload(site, 1, 0))
    assert site.run.counters["duplicate"] == 1
    for i in (0, 2):
        site.nodes[i].send(orders[i], payload(site, i, 0))
    commit = (await back_again.receive(twice)).commit
    assert commit is not None and commit.counted and list(commit.voters) == ["node-0", "node-1", "node-2"]
    assert site.run.leases.trained == 12
    assert (await back_again.opened(1)).lease_count == 4


async def test_a_session_that_is_still_open_is_replaced_and_its_end_takes_nobody_with_it() -> None:
    """The node has noticed that its connection is gone before the coordinator has."""
    site = Site(nodes=2, rounds=9)
    orders = await site.opened()
    old = site.nodes[1]
    stream = old.feed(*contribution_frames(orders[1], site.table, payload(site, 1, 0), chunk=64)[:2])
    new = old.again(**work(orders[1]))
    assert new.id == old.id and stream.refusal is not None and old.node.reason == "it has joined again"
    with pytest.raises(Refused, match="join again"):
        site.hub.node_of(old.reply.session)
    assert await new.opened(0) == orders[1]
    stream.broke()  # now the coordinator notices too
    site.hub.close_session(old.node, "its session broke off")
    assert site.run.registry.get("node-1") is new.node and new.node.in_session
    new.send(orders[1], payload(site, 1, 0))
    site.nodes[0].send(orders[0], payload(site, 0, 0))
    assert site.run.results.get(0).voters == ("node-0", "node-1")  # type: ignore[union-attr]


async def test_a_member_that_is_back_with_another_weight_waits_for_the_next_round() -> None:
    site = Site(nodes=2, rounds=9)
    orders = await site.opened()
    site.nodes[1].die()
    heavy = site.nodes[1].again(weight=3, **work(orders[1]))
    assert heavy.idle()
    site.nodes[0].send(orders[0], payload(site, 0, 0))
    await heavy.fetch(await heavy.opened(0))
    orders = [await site.nodes[0].opened(1), await heavy.opened(1)]
    heavy.send(orders[1], payload(site, 1, 1))
    site.nodes[0].send(orders[0], payload(site, 0, 1))
    assert list(site.run.results.get(1).facts.weights) == [1, 3]  # type: ignore[union-attr]


async def test_an_unknown_former_session_gives_a_new_name() -> None:
    site = Site(nodes=2, rounds=9)
    assert FakeNode(site.hub, former="made up").id == "node-2"
