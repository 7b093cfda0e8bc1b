"""The hub with nodes that die, freeze, or are too slow, on a virtual clock."""

from __future__ import annotations

import pytest

from coordinator.rounds import Policy
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from protos.ring import RING_ROUNDS
from tests.coordinator.contribution_rig import abstain_frames, contribution_frames, random_payload
from tests.coordinator.coordinator_rig import Site, drain, join_request


@pytest.mark.parametrize("moment", ["before", "while", "after"])
async def test_a_member_dies(moment: str) -> None:
    site = Site()
    orders = await site.opened()
    victim, order = site.nodes[1], orders[1]
    frames = contribution_frames(order, site.table, random_payload(1, site.table), chunk=64)
    if moment == "while":
        victim.feed(*frames[:2])
    elif moment == "after":
        victim.feed(*frames)
    first = site.nodes[0].send(orders[0], random_payload(0, site.table))
    victim.die()
    last = site.nodes[2].send(orders[2], random_payload(2, site.table))
    survivors = [site.nodes[0], site.nodes[2]]
    commits = [(await n.receive(e)).commit for n, e in zip(survivors, (first, last), strict=True)]
    expected = ["node-0", "node-1", "node-2"] if moment == "after" else ["node-0", "node-2"]
    assert all(commit is not None and list(commit.voters) == expected for commit in commits)
    again = await site.opened(survivors)
    assert [(o.round, o.epoch, list(o.members)) for o in again] == [(1, 2, ["node-0", "node-2"])] * 2
    lost = moment != "after"
    assert again[0].lease_start == (4 if lost else 12)
    assert site.run.counters["broken-stream"] == (1 if moment == "while" else 0)
    assert site.run.leases.trained == (8 if lost else 12)


async def test_a_silent_member_lags_catches_up_and_is_back() -> None:
    site = Site(rounds=9)
    fast, slow = site.nodes[:2], site.nodes[2]
    orders = await site.opened()
    for node, order in zip(fast, orders, strict=False):
        node.send(order, random_payload(1, site.table))
    site.idle(9.0)
    assert site.run.round == 0
    site.idle(1.0)
    assert site.run.round == 1
    assert site.run.registry.nodes[slow.id].state == "lagging"
    for _ in range(2):  # the others go on without waiting
        await site.play(fast)
    assert site.run.round == 3 and site.run.registry.roster.epoch == 1

    late = slow.send(orders[2], random_payload(2, site.table))
    commit = (await slow.receive(late)).commit
    assert commit is not None and not commit.counted and commit.round == 0
    assert site.run.counters["late"] == 1
    for index in (1, 2):
        order = await slow.opened(index)
        assert order.result_ready and order.lease_count == 0
        fetched = (await slow.receive(slow.feed(*abstain_frames(order, "catching up")))).commit
        assert fetched is not None and fetched.round == index and not fetched.counted
        slow.report(index, f"state-{index + 1}")
    order = await slow.opened(3)
    assert not order.result_ready and order.lease_count == 4
    others = await site.opened(fast)
    slow.send(order, random_payload(2, site.table))
    for node, other in zip(fast, others, strict=True):
        node.send(other, random_payload(1, site.table))
    assert site.run.round == 4
    assert site.run.registry.nodes[slow.id].state == "active"
    assert site.run.results.get(3).voters == ("node-0", "node-1", "node-2")  # type: ignore[union-attr]
    assert site.run.registry.nodes[slow.id].missed == 3
    await site.opened()
    site.idle(5.0)
    assert site.run.round == 4  # and waited for again


async def test_what_comes_late_tells_how_long_to_wait() -> None:
    """Its end counts, whether it began before the round closed or after, but it counts once."""
    site = Site(nodes=2, rounds=20, policy=Policy(4.0, 60.0, 0.5))
    await site.play()  # the first one is no ordinary round
    orders = await site.opened()
    fast, slow = site.nodes
    frames = contribution_frames(orders[1], site.table, random_payload(0, site.table), chunk=64)
    under_way = slow.feed(*frames[:2])
    fast.send(orders[0], random_payload(0, site.table))
    site.idle(5.0)
    arrivals = site.run.training.deadlines._rounds
    assert site.run.round == 2 and arrivals[-1].missing == 1
    for frame in frames[2:]:
        under_way.feed(frame)
    assert (arrivals[-1].behind, arrivals[-1].missing) == ((0.0, 5.0), 0)
    await slow.receive(under_way)
    await slow.receive(slow.send(orders[1], random_payload(0, site.table)))
    assert (arrivals[-1].behind, arrivals[-1].missing) == ((0.0, 5.0), 0)


async def test_who_asks_for_a_result_is_not_late() -> None:
    site = Site(nodes=2, rounds=20, policy=Policy(4.0, 60.0, 0.5))
    await site.play()
    orders = await site.opened()
    site.nodes[0].send(orders[0], random_payload(0, site.table))
    site.idle(5.0)
    await site.nodes[1].receive(site.nodes[1].abstain(orders[1]))
    assert site.run.training.deadlines._rounds[-1].missing == 1


async def test_after_one_stumble_a_member_is_waited_for_again() -> None:
    """Equal nodes: without the wait it would be late by the same span in every round from then on."""
    site = Site(rounds=9)
    orders = await site.opened()
    for node, order in zip(site.nodes[:2], orders, strict=False):
        node.send(order, random_payload(0, site.table))
    site.idle(11.0)  # the third misses the deadline by a second
    late = site.nodes[2].send(orders[2], random_payload(0, site.table))
    await site.nodes[2].receive(late)
    orders = await site.opened()
    assert [order.round for order in orders] == [1, 1, 1]
    for node, order in zip(site.nodes[:2], orders, strict=False):
        node.send(order, random_payload(0, site.table))
    site.idle(1.0)
    assert site.run.round == 1
    site.nodes[2].send(orders[2], random_payload(0, site.table))
    assert site.run.results.get(1).voters == ("node-0", "node-1", "node-2")  # type: ignore[union-attr]


async def test_what_comes_after_the_commit_leaves_the_next_round_alone() -> None:
    """The rows of a round are used again in the next one, after a departure even by other nodes."""
    site = Site(nodes=3)
    nodes = site.nodes
    orders = await site.opened()
    payload = random_payload(7, site.table)
    frames = contribution_frames(orders[2], site.table, payload, chunk=64)
    late = nodes[2].feed(*frames[:2])
    active = site.hub.run.active
    assert active is not None
    row = active.members[nodes[2].id].row
    for node, order in zip(nodes[:2], orders, strict=False):
        node.send(order, random_payload(1, site.table))
    site.idle(11.0)
    assert site.hub.run.round == 1
    row[:] = 0xA5  # somebody else's contribution to round 1
    for frame in frames[2:]:
        late.feed(frame)
    assert (row == 0xA5).all()
    commit = (await nodes[2].receive(late)).commit
    assert commit is not None and not commit.counted
    assert not site.hub.run.counters["broken-stream"]


async def test_a_member_that_is_too_slow_costs_ever_fewer_deadlines() -> None:
    site = Site(nodes=2, rounds=200, policy=Policy(10.0, 60.0, 0.51))
    slow = site.nodes[1]
    waited = []
    order = await slow.opened()
    for index in range(100):
        site.nodes[0].send(await site.nodes[0].opened(index), random_payload(0, site.table))
        if site.run.round == index:
            waited.append(index)
            site.idle(70.0)
        # It comes after the commit, is served, and is given the next round.
        await slow.receive(slow.send(order, random_payload(0, site.table)))
        order = await slow.opened(index + 1)
    assert waited == [0, 1, 3, 7, 15, 31, 63]


async def test_without_quorum_the_round_waits_longer() -> None:
    site = Site()
    orders = await site.opened()
    site.nodes[0].send(orders[0], random_payload(0, site.table))
    site.idle(69.0)
    assert site.run.round == 0
    assert "less than the quorum of 2" in site.hub.status().reason
    site.idle(1.0)
    assert site.run.round == 1
    assert site.run.results.get(0).voters == ("node-0",)  # type: ignore[union-attr]


async def test_three_missed_heartbeats_are_a_departure() -> None:
    site = Site(policy=Policy(1000.0, 2000.0, 0.6))
    orders = await site.opened()
    exchanges = [
        node.send(order, random_payload(1, site.table))
        for node, order in zip(site.nodes[:2], orders, strict=False)
    ]
    site.idle(14.0, silent=[site.nodes[2]])
    assert site.run.round == 0
    site.idle(2.0, silent=[site.nodes[2]])
    assert site.run.round == 1
    commit = (await site.nodes[0].receive(exchanges[0])).commit
    assert commit is not None and "left: node-2" in commit.reason
    assert site.nodes[2].node.reason == "no heartbeat for 15 s"
    assert await site.nodes[2].order() is None  # its stream is ended


async def test_a_stopped_coordinator_does_not_blame_the_nodes() -> None:
    site = Site()
    site.timer.oversleep(120.0)
    assert len(site.run.registry.nodes) == 3
    site.timer.advance(14.0)
    assert len(site.run.registry.nodes) == 3
    site.timer.advance(6.0)
    assert len(site.run.registry.nodes) == 0


async def test_who_joins_but_opens_no_session_is_forgotten() -> None:
    site = Site(nodes=1)
    reply = site.hub.join(join_request(site.table), "")
    site.idle(70.0)
    with pytest.raises(Refused, match="never opened its session"):
        site.hub.node_of(reply.session)


async def test_a_full_outbox_is_a_departure() -> None:
    site = Site(nodes=2, rounds=10**6)
    sleeper = site.nodes[1]
    while site.run.registry.get(sleeper.id) is not None:
        order = await site.nodes[0].opened()
        site.nodes[0].send(order, random_payload(0, site.table))
        if site.run.registry.get(sleeper.id) is not None:
            wanted = pb.RoundOpen(round=order.round, epoch=order.epoch)
            sleeper.send(wanted, random_payload(1, site.table))  # delivers, but does not read orders
    assert sleeper.node.reason == "it does not read its orders"
    assert order.round < 100


async def test_who_falls_behind_the_ring_joins_again_and_replays() -> None:
    site = Site(rounds=100)
    fast, slow = site.nodes[:2], site.nodes[2]
    orders = await site.opened()
    for node, order in zip(fast, orders, strict=False):
        node.send(order, random_payload(1, site.table))
    site.idle(10.0)
    for _ in range(RING_ROUNDS):
        await site.play(fast)
    exchange = slow.send(orders[2], random_payload(1, site.table))
    assert exchange.refusal is not None and exchange.refusal.kind == "fell-behind"
    assert (
        exchange.refusal.code == "UNAUTHENTICATED"
        and "the session of node-2 has ended" in exchange.refusal.text
    )
    assert "only the results since round 2 are kept" in exchange.refusal.text
    assert await slow.order() is None
    again = slow.again(round=0)
    assert again.id == slow.id and not again.reply.needs_state
    order, downloads = await again.replay()
    assert (order.first, order.count) == (0, RING_ROUNDS + 1)
    assert [download.commit.round for download in downloads if download.commit] == list(
        range(RING_ROUNDS + 1)
    )
    again.ready(RING_ROUNDS + 1, f"state-{RING_ROUNDS + 1}")
    await site.play(fast)  # without waiting for it
    assert (await again.opened(RING_ROUNDS + 1)).result_ready


async def test_a_reader_that_stalls_is_cut_off() -> None:
    site = Site()
    orders = await site.opened()
    exchanges = [n.send(o, random_payload(0, site.table)) for n, o in zip(site.nodes, orders, strict=True)]
    interrupted = []
    exchanges[0].on_close = lambda: interrupted.append(True)
    for node, exchange in zip(site.nodes[1:], exchanges[1:], strict=True):
        await node.receive(exchange)
    site.idle(61.0)
    assert interrupted and site.run.counters["stalled"] == 1
    with pytest.raises(Refused, match="node-0 has not read its result for 60 s") as refused:
        await drain(exchanges[0])
    assert refused.value.code == "DEADLINE_EXCEEDED"
