"""Nodes that join a run or come back to it, and how they get its state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.events import CatchUpPlanned, SnapshotBegun, SnapshotFailed
from coordinator.gathering import RETURN_SECONDS
from coordinator.newcomers import MAX_IDLE, MAX_REPLAY
from protos.refusal import Refused
from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import FakeNode, Site
from tests.coordinator.newcomer_rig import STATE, commit, forget
from tests.coordinator.state_rig import SharedState, donate, load

# ------------------------------------------------------------------------------------------------ replay


async def test_a_fresh_joiner_of_a_young_run_replays_it_from_the_start() -> None:
    site = Site(nodes=2, rounds=9, momentum=0.9)
    old = list(site.nodes)
    for _ in range(3):
        await site.play(old)
    joiner = site.add()
    assert not joiner.reply.needs_state, "its initial state is that of round 1"
    order, downloads = await joiner.replay()
    assert (order.first, order.count, order.frontier) == (0, 3, site.run.leases.frontier)
    committed = [download.commit for download in downloads]
    assert [commit.round for commit in committed if commit is not None] == [0, 1, 2]
    assert not any(commit.counted for commit in committed if commit is not None)
    await site.play(old)  # nobody waits for it
    joiner.ready(3, "state-3")
    await site.play(old)
    order = await joiner.opened(3)
    assert list(order.members) == ["node-0", "node-1", "node-2"] and order.epoch == 2
    await joiner.fetch(order)
    await joiner.fetch(await joiner.opened(4))
    order = await joiner.opened(5)
    assert order.lease_count == 4 and not order.result_ready
    assert joiner.node.since == 3 and all(node.node.since is None for node in old)


async def test_the_vote_of_a_newcomer_weighs_little_at_first() -> None:
    site = Site(nodes=2, rounds=20, momentum=0.9)
    old = list(site.nodes)
    await site.play(old)
    joiner = site.add()
    await site.play(old)  # one round behind: it takes its place at once
    for index in range(2):
        await joiner.fetch(await joiner.opened(index))
    weights = []
    for index in range(2, 11):
        orders = [await node.opened(index) for node in (*old, joiner)]
        exchanges = [
            n.send(o, random_payload(1, site.table)) for n, o in zip((*old, joiner), orders, strict=True)
        ]
        told = (await joiner.receive(exchanges[-1])).commit
        assert told is not None
        weights.append(tuple(told.weights))
    # 3, 4, ... gradients old, of a memory of ten
    assert weights[:5] == [(10, 10, 3), (5, 5, 2), (2, 2, 1), (5, 5, 3), (10, 10, 7)]
    assert weights[5:] == [(5, 5, 4), (10, 10, 9), (1, 1, 1), (1, 1, 1)]


async def test_a_long_absence_is_replayed_in_several_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.newcomers.MAX_REPLAY", 4)
    assert MAX_REPLAY > 4
    site = Site(nodes=2, rounds=20)
    old = list(site.nodes)
    for _ in range(9):
        await site.play(old)
    joiner = site.add()
    orders = []
    for _ in range(2):
        order, downloads = await joiner.replay()
        orders.append((order.first, order.count))
        assert len(downloads) == order.count
        joiner.ready(order.first + order.count, f"state-{order.first + order.count}")
    assert orders == [(0, 4), (4, 4)]
    await site.play(old)  # one round behind by then: it takes its place
    assert (await joiner.opened(8)).result_ready


async def test_who_replays_too_slowly_to_be_seated_goes_on_replaying() -> None:
    """Near enough when it says so, but not any more when the round ends."""
    site = Site(nodes=2, rounds=20)
    old = list(site.nodes)
    for _ in range(3):
        await site.play(old)
    joiner = site.add()
    await joiner.replay()
    for _ in range(2):
        await site.play(old)
    joiner.ready(3, "state-3")
    assert joiner.idle(), "two rounds behind: it waits for its place"
    await site.play(old)
    order, _ = await joiner.replay()
    assert (order.first, order.count) == (3, 3)
    joiner.ready(6, "state-6")
    await site.play(old)
    assert (await joiner.opened(6)).result_ready


async def test_who_was_cut_off_comes_back_under_its_name() -> None:
    site = Site(nodes=3, rounds=20)
    await site.play()
    victim = site.nodes.pop()
    victim.die()
    for _ in range(4):
        await site.play()
    assert site.run.registry.roster.members == ("node-0", "node-1")
    back = victim.again(round=1, state_digest="state-1")
    assert back.id == "node-2" and not back.reply.needs_state
    order, _ = await back.replay()
    assert (order.first, order.count) == (1, 4)
    back.ready(5, "state-5")
    await site.play()
    assert list((await back.opened(5)).members) == ["node-0", "node-1", "node-2"]
    assert back.node.since is None, "its momentum is as old as the run"
    names = [type(event).__name__ for event in site.events if getattr(event, "node", "") == "node-2"]
    assert [name for name in names if name.startswith("Node") and name != "NodeReported"] == [
        "NodeJoined",
        "NodeLeft",
        "NodeRejoined",
    ]


async def test_young_momentum_stays_young_when_its_node_comes_back() -> None:
    site = Site(nodes=2, rounds=20, momentum=0.99)
    old = list(site.nodes)
    await site.play(old)
    joiner = site.add()
    await site.play(old)
    assert joiner.node.since == 0
    joiner.die()
    assert joiner.again(round=1, state_digest="state-1").node.since == 0


async def test_who_claims_another_state_is_not_believed() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    assert FakeNode(site.hub, round=1, state_digest="lie").reply.needs_state
    assert not FakeNode(site.hub, round=1, state_digest="state-1").reply.needs_state


async def test_a_ready_with_less_than_was_ordered_is_no_offence() -> None:
    """The results could not be had: the node says what it holds, and is told again a moment later."""
    site = Site(nodes=2, rounds=9)
    old = list(site.nodes)
    for _ in range(6):
        await site.play(old)
    joiner = site.add()
    await joiner.replay()
    joiner.ready(2, "state-2")
    order, _ = await joiner.replay()
    assert (order.first, order.count) == (2, 4), "it goes on from there at once"
    joiner.ready(2, "state-2")
    assert joiner.idle(), "that was no progress: not at once"
    site.idle(1.0)
    order, _ = await joiner.replay()
    assert (order.first, order.count) == (2, 4)
    assert not site.run.counters


async def test_orders_that_come_to_nothing_come_to_an_end() -> None:
    site = Site(nodes=2, rounds=9)
    old = list(site.nodes)
    for _ in range(4):
        await site.play(old)
    joiner = site.add()
    for _ in range(MAX_IDLE + 1):
        await joiner.replay()
        joiner.ready(0, "s0")
        site.idle(1.0)
    assert "could not load the shared state" in (await joiner.stopped()).reason


async def test_a_stuck_newcomer_is_given_up_and_holds_nobody_up() -> None:
    site = Site(nodes=2, rounds=9)
    old = list(site.nodes)
    for _ in range(4):
        await site.play(old)
    joiner = site.add()
    assert joiner.node.state == "replaying"
    site.idle(40.0)
    site.hub.moved(joiner.node)  # bytes that are on their way are progress
    site.idle(40.0)
    assert site.run.registry.get(joiner.id) is not None
    site.idle(30.0)
    assert joiner.node.reason == "it has made no progress with replaying for 60 s"
    assert site.run.counters["stalled"] == 1
    await site.play(old)


async def test_a_joiner_that_dies_holds_nobody_up() -> None:
    site = Site(nodes=2, rounds=9)
    old = list(site.nodes)
    for _ in range(4):
        await site.play(old)
    joiner = site.add()
    joiner.die()
    await site.play(old)
    assert site.run.registry.roster.members == ("node-0", "node-1")


# --------------------------------------------------------------------------------------------- snapshots


async def make_snapshot(site: Site, donors: Sequence[FakeNode], state: SharedState = STATE) -> int:
    """Carry out the orders of a snapshot; returns its round."""
    rounds = {(await donate(site, donor, state)).round for donor in donors}
    assert len(rounds) == 1
    return rounds.pop()


async def test_a_stranger_waits_for_a_snapshot_while_the_run_goes_on() -> None:
    site = Site(nodes=2, rounds=20)
    old = list(site.nodes)
    await commit(site, old, "first")
    forget(site, 1)
    joiner = site.add(state_digest="other init")
    assert joiner.reply.needs_state and joiner.idle() and site.run.phase == "training"
    assert [event.action for event in site.told(CatchUpPlanned)] == ["wait"]
    await commit(site, old, STATE.digest)
    assert await make_snapshot(site, old) == 2
    order, data = await load(site, joiner)
    assert order.round == 2 and data == STATE.data and order.frontier == site.run.leases.frontier
    await commit(site, old, "third")
    joiner.ready(2, STATE.digest)
    await commit(site, old, "fourth")
    opened = await joiner.opened(2)
    assert opened.result_ready and list(opened.members) == ["node-0", "node-1", "node-2"]
    assert joiner.node.since == 2


async def test_a_kept_snapshot_is_loaded_and_the_rest_replayed() -> None:
    site = Site(nodes=2, rounds=50, snapshot_every=3)
    old = list(site.nodes)
    for digest in ("1", "2", STATE.digest):
        await commit(site, old, digest)
    assert await make_snapshot(site, old) == 3
    for index in range(3, 5):
        await commit(site, old, str(index + 1))
    forget(site, 3)
    await commit(site, old, "6")
    joiner = site.add(state_digest="other init")
    order, _ = await load(site, joiner)
    assert order.round == 3
    joiner.ready(3, STATE.digest)
    replayed, _ = await joiner.replay()
    assert (replayed.first, replayed.count) == (3, 3)
    joiner.ready(6, "6")
    assert [node.id for node in old] == [donor for donor in site.told(SnapshotBegun)[0].donors][::-1]


async def test_a_snapshot_that_fails_is_made_again_by_those_who_are_left() -> None:
    site = Site(nodes=3, rounds=50)
    old = list(site.nodes)
    await commit(site, old, "1")
    forget(site, 1)
    joiner = site.add(state_digest="other init")
    await commit(site, old, "2")
    donors = {donor for event in site.told(SnapshotBegun) for donor in event.donors}
    assert donors == {"node-0", "node-1", "node-2"}
    for node in old:
        message = await node.order()
        assert message is not None and message.WhichOneof("kind") == "donate"
    old[1].die()
    assert "node-1 left" in site.told(SnapshotFailed)[0].reason
    rest = [old[0], old[2]]
    await commit(site, rest, "3")  # too soon for another try
    assert len(site.told(SnapshotBegun)) == 1
    site.idle(6.0)
    await commit(site, rest, STATE.digest)
    assert await make_snapshot(site, rest) == 4
    order, _ = await load(site, joiner)
    assert order.round == 4


async def test_a_lagging_member_is_no_donor() -> None:
    site = Site(nodes=2, rounds=9)
    orders = await site.opened()
    site.nodes[0].send(orders[0], random_payload(0, site.table))
    site.idle(70.0)
    assert site.run.round == 1 and site.nodes[1].node.state == "lagging"
    site.nodes[0].report(0, "1")
    forget(site, 1)
    site.add(state_digest="other init")
    await commit(site, site.nodes[:1], "2")
    assert [event.donors for event in site.told(SnapshotBegun)] == [("node-0",)]


async def test_a_donor_with_a_deviating_state_is_not_believed() -> None:
    site = Site(nodes=3, rounds=9)
    old = list(site.nodes)
    await commit(site, old, "1")
    forget(site, 1)
    joiner = site.add(state_digest="other init")
    await commit(site, old, STATE.digest)
    evil = SharedState.of(8)
    with pytest.raises(Refused, match=f"digest '{evil.digest}', the nodes agreed on {STATE.digest}"):
        await donate(site, old[0], evil)
    assert site.told(SnapshotFailed) and joiner.idle()


# ------------------------------------------------------------------------------------------------ the end


async def test_who_joins_near_the_end_still_gets_the_final_state() -> None:
    site = Site(nodes=2, rounds=4)
    old = list(site.nodes)
    for _ in range(3):
        await site.play(old)
    joiner = site.add()
    await site.play(old)
    assert site.run.phase == "done" and joiner.node.state == "replaying"
    order, _ = await joiner.replay()
    joiner.ready(order.first + order.count, "state-3")
    order, _ = await joiner.replay()
    assert (order.first, order.count) == (3, 1)
    joiner.ready(4, "state-4")
    assert (await joiner.stopped()).done


async def test_who_waits_for_a_snapshot_at_the_end_is_sent_away() -> None:
    site = Site(nodes=2, rounds=3)
    old = list(site.nodes)
    await commit(site, old, "1")
    forget(site, 1)
    joiner = site.add(state_digest="other init")
    await commit(site, old, STATE.digest)
    await donate(site, old[0], STATE)  # and the other one is not that far yet
    orders = [await old[0].opened(2)]
    message = await old[1].order()
    assert message is not None and message.WhichOneof("kind") == "donate"
    orders.append(await old[1].opened(2))
    for node, order in zip(old, orders, strict=True):
        node.send(order, random_payload(2, site.table))
    assert site.run.phase == "done"
    stop = await joiner.stopped()
    assert stop.reason.startswith("all 3 rounds are committed") and not stop.done


# -------------------------------------------------------------------------------------- nobody for certain


async def test_when_nobody_else_is_left_a_claim_is_believed() -> None:
    """The digest was never agreed: the only one who could have told is gone."""
    site = Site(nodes=1, rounds=9)
    order = await site.nodes[0].opened()
    await site.nodes[0].receive(site.nodes[0].send(order, random_payload(0, site.table)))
    site.nodes[0].die()
    back = site.add(round=1, state_digest="unheard of")  # without its former secret
    assert back.reply.needs_state and site.run.phase == "gathering"
    site.idle(RETURN_SECONDS)
    assert (await back.opened(1)).members == [back.id]


async def test_a_claim_that_is_known_to_be_wrong_is_never_believed() -> None:
    site = Site(nodes=1, rounds=9)
    await site.play()
    site.nodes[0].die()
    forget(site, 1)
    back = site.add(round=1, state_digest="a lie")
    site.idle(RETURN_SECONDS)
    assert site.run.phase == "failed" and "nobody holds the shared state" in (await back.stopped()).reason
