"""A coordinator that is gone, and another that goes on with its journal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.events import JournalTrouble, RunResumed
from coordinator.gathering import BACK_SECONDS
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from tests.coordinator.contribution_rig import contribution_frames
from tests.coordinator.coordinator_rig import FakeNode, Site, join_request
from tests.coordinator.restart_rig import back, lease_of, payload, send_all, work

ROUNDS, NODES, AT = 5, 3, 2  # the coordinator dies in the third round
POINTS = ("before the orders", "with the orders", "one in", "one in parts", "two in", "all in")


def digest(round_index: int) -> str:
    return f"state-{round_index + 1}"


async def whole_round(site: Site, orders: Sequence[pb.RoundOpen], ledger: list[tuple[Any, ...]]) -> None:
    """All nodes deliver, receive and report; their leases and the result go into the ledger."""
    exchanges = send_all(site, orders)
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
            ledger.append((AT, node.id, *lease_of(before), commit.payload_digest))
            node.report(AT, digest(AT))
    for _ in range(AT + 1, ROUNDS):
        await whole_round(site, await site.opened(), ledger)
    assert ledger == await undisturbed()
    assert site.run.phase == "done" and site.run.leases.trained == site.run.leases.frontier == 60


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
    assert [lease_of(again[i]) for i in holders] == [lease_of(orders[i]) for i in holders]
    assert sorted(map(lease_of, again)) == sorted(map(lease_of, orders))
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
    send_all(site, again)
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
    assert [lease_of(order) for order in await site.opened()] == [(4, 4), (12, 4), (16, 4)]


async def test_a_second_restart_still_knows_the_nodes() -> None:
    """Each time by secrets that the coordinator before has given out."""
    site = Site(nodes=NODES, rounds=ROUNDS)
    await site.play()
    for _ in range(3):
        orders = await site.opened()
        lost = site.restart()
        claims = [{"round": 1, "state_digest": "state-1", **work(order)} for order in orders]
        found = await back(site, lost, claims)
        assert list(map(lease_of, found)) == list(map(lease_of, orders))
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
    assert list(map(lease_of, found)) == list(map(lease_of, orders))


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
    assert [lease_of(order) for order in again] == [lease_of(orders[0]), lease_of(orders[2])]
    assert list(again[0].members) == ["node-0", "node-2"]
    late = lost[1].again(site.hub, round=1, state_digest="state-1", **work(orders[1]))
    for node, order in zip(site.nodes, again, strict=True):
        node.send(order, payload(site, 0, 1))
    order = await late.opened(1)
    assert order.result_ready and list(order.members) == ["node-0", "node-2", "node-1"]
    await late.fetch(order)
    rest = await site.opened()
    assert lease_of(orders[1]) in [lease_of(order) for order in rest], "what it had is read by another"


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
    send_all(site, orders)
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
    assert [lease_of(order) for order in await site.opened()] == [(0, 4), (4, 4)]


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
    assert [lease_of(order) for order in again] == [lease_of(orders[0]), lease_of(orders[1])]
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
