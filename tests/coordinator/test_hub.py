"""The hub with fake nodes and a virtual clock: admission, rounds, faults, newcomers, the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from coordinator.exchange import Exchange
from coordinator.gathering import RETURN_SECONDS
from coordinator.rounds import Policy
from protos import atoll_pb2 as pb
from protos import wire
from protos.refusal import Refused
from protos.ring import RING_ROUNDS
from tests.coordinator.coordinator_rig import (
    FakeNode,
    Site,
    abstain_frames,
    contribution_frames,
    join_request,
    random_payload,
    schedule,
    slow_tally,
    soon,
    voted_table,
)


def ids(nodes: Sequence[FakeNode]) -> list[str]:
    return [node.id for node in nodes]


# ------------------------------------------------------------------------------------------- gathering


async def test_the_run_begins_when_enough_nodes_are_here() -> None:
    site = Site(nodes=2, present=1)
    assert (site.run.phase, site.run.reason) == ("gathering", "1 of 2 nodes")
    site.nodes.pop().leave()
    assert site.run.reason == "0 of 2 nodes"
    site.add()
    assert site.run.phase == "gathering"
    site.add()
    orders = await site.opened()
    assert [order.round for order in orders] == [0, 0]
    assert orders[0].epoch == 1 and list(orders[0].members) == ids(site.nodes)
    assert site.run.phase == "training"


async def test_waiting_for_nodes_ends_after_the_start_timeout() -> None:
    site = Site(nodes=3, present=0)
    site.timer.advance(1000.0)
    assert site.run.phase == "gathering"  # nobody is here: nobody waits
    site.add(), site.add()
    site.idle(59.0)
    assert site.run.phase == "gathering"
    site.idle(1.0)
    assert site.run.phase == "failed"
    stop = await site.nodes[0].stopped()
    assert not stop.done and "only 2 of 3 nodes came within 60 s" in stop.reason


async def test_the_first_node_defines_data_and_initial_state() -> None:
    site = Site(nodes=2, present=0)
    hub = site.hub
    first = FakeNode(hub, data_digest="d1", state_digest="i1")
    assert hub.get_run(pb.GetRunRequest(protocol=wire.PROTOCOL)).data_digest == "d1"
    for change, both in (({"data_digest": "d2"}, ("d1", "d2")), ({"state_digest": "i2"}, ("i1", "i2"))):
        with pytest.raises(Refused) as refused:
            hub.join(join_request(site.table, **{"data_digest": "d1", "state_digest": "i1", **change}), "")
        assert refused.value.code == "FAILED_PRECONDITION"
        assert all(value in refused.value.text for value in both)
    assert hub.run.counters["join-refused"] == 2
    first.leave()  # and with it what it defined
    FakeNode(hub, data_digest="d2", state_digest="i2")


async def test_get_run() -> None:
    site = Site()
    reply = site.hub.get_run(pb.GetRunRequest(protocol=wire.PROTOCOL))
    assert (reply.run_file, reply.run_digest, reply.table_digest) == (
        "[run]\n",
        "run-digest",
        schedule(site.table).digest,
    )
    with pytest.raises(Refused, match=f"protocol 7, the coordinator protocol {wire.PROTOCOL}"):
        site.hub.get_run(pb.GetRunRequest(protocol=7))


async def test_a_second_session_is_refused() -> None:
    site = Site()
    with pytest.raises(Refused, match="has a session already") as refused:
        site.hub.open_session(site.nodes[0].node)
    assert (refused.value.kind, refused.value.code) == ("second-session", "ALREADY_EXISTS")
    assert len(await site.opened()) == 3


async def test_an_unknown_or_ended_session() -> None:
    site = Site()
    with pytest.raises(Refused, match="unknown or has ended") as refused:
        site.hub.node_of("made up")
    assert refused.value.code == "UNAUTHENTICATED"
    secret = site.nodes[0].reply.session
    site.nodes[0].die()
    with pytest.raises(Refused, match="join again"):
        site.hub.node_of(secret)


# ------------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
async def test_a_whole_run(nodes: int) -> None:
    site = Site(nodes=nodes, rounds=5)
    for index in range(5):
        commits = await site.play(seed=10 * index)
        votes = [np.frombuffer(random_payload(10 * index + i, site.table), np.uint8) for i in range(nodes)]
        expected = slow_tally(votes, casting=index % nodes).tobytes()
        assert all(commit.payload_digest == wire.payload_digest(expected) for commit in commits)
        assert all(commit.counted and list(commit.voters) == ids(site.nodes) for commit in commits)
        assert commits[0].casting == index % nodes
    for node in site.nodes:
        stop = await node.stopped()
        assert stop.done and stop.reason == "all 5 rounds are committed" and not stop.evaluate
        node.leave(stop.reason)
    await soon(site.run.finished.wait())
    status = site.hub.status()
    assert (status.phase, status.round, status.state_digest) == ("done", 5, "state-5")
    assert [point.round for point in status.curve] == [0, 1, 2, 3, 4]
    assert status.curve[-1].tokens == 5 * 8 * nodes
    assert site.run.leases.trained == site.run.leases.frontier == 5 * nodes * 4
    assert not status.counters


async def test_leases_and_evaluation_travel_with_the_order() -> None:
    site = Site(nodes=2, rounds=4, evaluate_every=2, batch=5)
    seen = []
    for _ in range(4):
        orders = await site.opened()
        seen.append([(o.lease_start, o.lease_count, o.evaluate) for o in orders])
        for node, order in zip(site.nodes, orders, strict=True):
            node.send(order, random_payload(1, site.table))
    assert seen == [
        [(0, 5, False), (5, 5, False)],
        [(10, 5, True), (15, 5, False)],
        [(20, 5, False), (25, 5, False)],
        [(30, 5, False), (35, 5, True)],
    ]


async def test_an_abstention_is_not_waited_for_and_its_samples_return() -> None:
    site = Site()
    orders = await site.opened()
    exchange = site.nodes[1].abstain(orders[1], "loss is nan")
    others = [site.nodes[i].send(orders[i], random_payload(i, site.table)) for i in (0, 2)]
    commit = (await site.nodes[1].receive(exchange)).commit
    assert commit is not None and not commit.counted and math.isnan(commit.agreement)
    assert list(commit.voters) == [site.nodes[0].id, site.nodes[2].id]
    assert "abstained: node-1" in commit.reason
    for node, other in zip(site.nodes[::2], others, strict=True):
        assert (await node.receive(other)).commit is not None
    again = await site.opened()
    assert [o.lease_start for o in again] == [4, 12, 16]  # the abstainer's samples come first
    status = {node.node: node for node in site.hub.status().nodes}
    assert (status["node-1"].abstained, status["node-1"].missed, status["node-1"].state) == (1, 1, "active")


async def test_when_all_abstain_only_the_schedule_moves() -> None:
    site = Site(nodes=2)
    orders = await site.opened()
    exchanges = [node.abstain(order) for node, order in zip(site.nodes, orders, strict=True)]
    for node, exchange in zip(site.nodes, exchanges, strict=True):
        download = await node.receive(exchange)
        assert download.commit is not None
        assert (download.commit.nbytes, list(download.commit.voters), download.received) == (0, [], 0)
    assert [o.round for o in await site.opened()] == [1, 1]


async def test_weights_decide() -> None:
    site = Site(nodes=3, present=0)
    nodes = [site.add(weight=weight) for weight in (5, 2, 2)]
    payloads = [random_payload(i, site.table) for i in range(3)]
    exchanges = [node.send(await node.opened(), p) for node, p in zip(nodes, payloads, strict=True)]
    download = await nodes[1].receive(exchanges[1])
    assert bytes(download.payload) == payloads[0]
    assert download.commit is not None and list(download.commit.weights) == [5, 2, 2]


# ------------------------------------------------------------------------------------------- faults


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


REFUSALS: dict[str, Any] = {
    "garbage": (lambda f: [b"\xff" * 40], "bad-frame"),
    "empty": (lambda f: [b""], "bad-frame"),
    "no header": (lambda f: f[1:], "bad-frame"),
    "two headers": (lambda f: [f[0], f[0]], "bad-frame"),
    "frame after the end": (lambda f: [*f[:1], f[1], f[1]], "out-of-order"),
    "out of order": (lambda f: [f[0], f[2], f[1], f[3]], "out-of-order"),
    "oversized": (lambda f: [*f[:3], wire.encode_frame(wire.CHUNK, b"x", offset=128)], "oversized"),
    "no end": (lambda f: f[:3], "truncated"),
    "end too soon": (lambda f: [f[0], f[1], f[3]], "truncated"),
    "only a header": (lambda f: f[:1], "truncated"),
    "nothing": (lambda f: [], "truncated"),
    "bad digest": (lambda f: [*f[:3], wire.encode_frame(wire.END, b"")], "bad-digest"),
}


async def drain(exchange: Exchange) -> None:
    while await soon(exchange.next_frame()) is not None:
        pass


@pytest.mark.parametrize("case", list(REFUSALS))
async def test_a_bad_contribution_is_refused_and_the_round_commits(case: str) -> None:
    change, kind = REFUSALS[case]
    site = Site()
    orders = await site.opened()
    good = site.nodes[0].send(orders[0], random_payload(0, site.table))
    frames = contribution_frames(orders[1], site.table, random_payload(1, site.table), chunk=64)
    bad = site.nodes[1].feed(*change(frames))
    bad.ended()
    assert bad.refusal is not None and bad.refusal.kind == kind
    assert site.run.counters == {kind: 1}
    if bad.result is not None:
        with pytest.raises(Refused):
            await drain(bad)
    site.nodes[2].send(orders[2], random_payload(2, site.table))
    commit = (await site.nodes[0].receive(good)).commit
    assert commit is not None and list(commit.voters) == ["node-0", "node-2"]
    assert "refused: node-1" in commit.reason
    # The refused node fetches the result and takes part in the next round.
    fetch = site.nodes[1].feed(*abstain_frames(orders[1], "it was refused"))
    assert (await site.nodes[1].receive(fetch)).commit == commit_for(commit, False)
    await site.play()
    assert site.run.results.get(1).voters == ("node-0", "node-1", "node-2")  # type: ignore[union-attr]


def commit_for(commit: pb.Commit, counted: bool) -> pb.Commit:
    other = pb.Commit()
    other.CopyFrom(commit)
    other.counted = counted
    other.agreement = math.nan
    return other


HEADERS: dict[str, Any] = {
    "wrong-table": {"table_digest": "other"},
    "oversized": {"nbytes": 2**50},
    "truncated": {"nbytes": 64},
    "bad-weight": {"weight": 2},
    "wrong-round": {"round": 9},
    "wrong epoch": {"epoch": 9},
}


@pytest.mark.parametrize("case", list(HEADERS))
async def test_a_bad_header_is_refused_and_the_round_commits(case: str) -> None:
    site = Site()
    orders = await site.opened()
    bad = site.nodes[1].send(orders[1], random_payload(1, site.table), **HEADERS[case])
    assert bad.refusal is not None
    assert site.run.counters == {case.replace(" epoch", "-round"): 1}
    for i in (0, 2):
        site.nodes[i].send(orders[i], random_payload(i, site.table))
    assert site.run.results.get(0).voters == ("node-0", "node-2")  # type: ignore[union-attr]


async def test_a_duplicate_is_ignored_and_served() -> None:
    site = Site()
    orders = await site.opened()
    first = site.nodes[0].send(orders[0], random_payload(0, site.table))
    second = site.nodes[0].send(orders[0], random_payload(7, site.table))
    assert first.refusal is not None and first.refusal.code == "ABORTED"
    assert site.run.counters == {"replaced-stream": 1, "duplicate": 1}
    for i in (1, 2):
        site.nodes[i].send(orders[i], random_payload(i, site.table))
    download = await site.nodes[0].receive(second)
    assert download.commit is not None and download.commit.counted
    votes = [np.frombuffer(random_payload(i, site.table), np.uint8) for i in range(3)]
    assert bytes(download.payload) == slow_tally(votes, casting=0).tobytes()
    # And after the commit, from the ring.
    third = site.nodes[0].send(orders[0], random_payload(7, site.table))
    assert (await site.nodes[0].receive(third)).commit == download.commit
    assert site.run.counters["duplicate"] == 2


async def test_an_open_stream_is_replaced_by_a_new_one() -> None:
    site = Site()
    orders = await site.opened()
    frames = contribution_frames(orders[0], site.table, random_payload(0, site.table), chunk=64)
    old = site.nodes[0].feed(*frames[:2])
    new = site.nodes[0].send(orders[0], random_payload(5, site.table))
    old.feed(frames[2])  # still under way
    old.broke()
    assert site.nodes[0].node.exchanges == [new]
    for i in (1, 2):
        site.nodes[i].send(orders[i], random_payload(i, site.table))
    assert (await site.nodes[0].receive(new)).commit.counted  # type: ignore[union-attr]


async def test_a_stranger_to_the_round_is_refused() -> None:
    site = Site()
    orders = await site.opened()
    newcomer = site.add()
    exchange = newcomer.send(orders[0], random_payload(0, site.table))
    assert exchange.refusal is not None and exchange.refusal.kind == "not-a-member"
    site.nodes.remove(newcomer)
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, random_payload(0, site.table))
    assert site.run.round == 1


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


# ------------------------------------------------------------------------------------------- digests


async def finish_round(site: Site, digests: Sequence[str]) -> None:
    orders = await site.opened()
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, random_payload(0, site.table))
    for node, order, digest in zip(site.nodes, orders, digests, strict=True):
        node.report(order.round, digest)


async def test_a_deviation_in_the_last_round_is_counted() -> None:
    site = Site(rounds=1)
    await finish_round(site, ["good", "good", "bad"])
    assert site.run.counters["digest-mismatch"] == 1
    assert (site.hub.status().phase, site.hub.status().state_digest) == ("done", "good")
    assert (await site.nodes[2].stopped()).done


async def test_messages_that_make_no_sense_are_counted() -> None:
    site = Site()
    await site.play()
    for message in (
        b"\xff\xff",
        pb.NodeMessage(leave=pb.Leave(reason="x" * (65 << 10))).SerializeToString(),
        b"",
        pb.NodeMessage(report=pb.Report(round=7)).SerializeToString(),
        pb.NodeMessage(report=pb.Report(round=0, tokens=2**63)).SerializeToString(),
        pb.NodeMessage(report=pb.Report(round=0, state_digest="x" * 129)).SerializeToString(),
    ):
        site.hub.message(site.nodes[0].node, message)
    assert site.run.counters["bad-message"] == 6
    site.nodes[0].ready(0, "")  # of a member: an answer that came too late
    assert site.run.counters["bad-message"] == 6
    assert len(site.run.registry.nodes) == 3


# ------------------------------------------------------------------------------------------- the end


async def test_when_all_leave_before_the_first_commit_the_run_gathers_again() -> None:
    site = Site(nodes=2)
    await site.opened()
    for node in site.nodes:
        node.die()
    assert (site.run.phase, site.run.reason, site.run.round) == ("gathering", "0 of 2 nodes", 0)
    fresh = [FakeNode(site.hub, data_digest="other", state_digest="other") for _ in range(2)]
    orders = await site.opened(fresh)
    assert [o.lease_start for o in orders] == [0, 4]
    assert orders[0].epoch > 1


async def test_when_all_say_goodbye_the_run_has_failed() -> None:
    site = Site(nodes=2)
    await site.play()
    for node in site.nodes:
        node.leave("interrupted by its user")
    assert site.run.phase == "failed"
    assert "nobody holds the shared state" in site.run.reason
    assert site.run.finished.is_set()


async def test_when_all_are_cut_off_the_run_waits_for_one_to_come_back() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    for node in site.nodes:
        node.die()
    assert site.run.phase == "gathering" and "every node left before round 2" in site.run.reason
    back = site.nodes[1].again(round=1, state_digest="state-1")
    assert back.id == "node-1"
    assert (await back.opened(1)).members == ["node-1"]


async def test_when_all_are_cut_off_a_stranger_may_replay_what_is_kept() -> None:
    site = Site(nodes=2, rounds=9)
    for _ in range(3):
        await site.play()
    for node in site.nodes:
        node.die()
    stranger = FakeNode(site.hub)
    order, _ = await stranger.replay()
    assert (order.first, order.count) == (0, 3) and "1 catching up" in site.run.reason
    stranger.ready(3, "state-3")
    assert (await stranger.opened(3)).members == [stranger.id]


async def test_when_all_are_cut_off_the_first_one_back_goes_on_with_its_samples() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    orders = await site.opened()
    for node in site.nodes:
        node.die()
    work = {"lease_round": 1, "lease_start": orders[1].lease_start, "lease_count": orders[1].lease_count}
    back = site.nodes[1].again(round=1, state_digest="state-1", **work)
    order = await back.opened(1)
    assert (order.lease_start, order.lease_count) == (orders[1].lease_start, orders[1].lease_count)
    await back.receive(back.send(order, random_payload(0, site.table)))
    assert (await back.opened(2)).lease_start == orders[0].lease_start, "the other's samples come next"


async def test_when_nobody_comes_back_the_run_has_failed() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    for node in site.nodes:
        node.die()
    site.timer.advance(RETURN_SECONDS)
    assert site.run.phase == "failed" and site.run.finished.is_set()
    with pytest.raises(Refused, match="the run has ended: every node left"):
        site.hub.join(join_request(site.table), "")


async def test_the_last_evaluation_passes_to_another_if_its_node_has_left() -> None:
    site = Site(nodes=3, rounds=1)
    orders = await site.opened()
    chosen = next(i for i, order in enumerate(orders) if order.evaluate)
    site.nodes[chosen].die()
    rest = [node for i, node in enumerate(site.nodes) if i != chosen]
    for node in rest:
        node.send(orders[site.nodes.index(node)], random_payload(0, site.table))
    for node in rest:
        node.report(0, "state-1")
    stops = [await node.stopped() for node in rest]
    assert [stop.evaluate for stop in stops].count(True) == 1
    rest[0].report(0, "state-1", evaluated=True, validation_loss=1.5, bits_per_byte=2.5, tokens=0)
    point = site.hub.status().curve[-1]
    assert (point.validation_loss, point.bits_per_byte, point.tokens) == (1.5, 2.5, 16)


async def test_stopping_tells_the_nodes_and_ends_their_streams() -> None:
    site = Site()
    orders = await site.opened()
    exchange = site.nodes[0].send(orders[0], random_payload(0, site.table))
    site.hub.stop("SIGINT")
    for node in site.nodes:
        stop = await node.stopped()
        assert (stop.done, stop.reason) == (False, "SIGINT")
    with pytest.raises(Refused, match="SIGINT") as refused:
        await drain(exchange)
    assert refused.value.code == "UNAVAILABLE"
    for node in site.nodes:
        node.leave()
    await soon(site.run.finished.wait())


async def test_a_contribution_that_arrives_after_the_stop_is_told_why() -> None:
    site = Site()
    orders = await site.opened()
    site.hub.stop("maintenance")
    with pytest.raises(Refused, match="the run has ended: maintenance") as refused:
        await drain(site.nodes[0].send(orders[0], random_payload(0, site.table)))
    assert refused.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("at", ["before the commit", "after it"])
async def test_who_is_cut_off_in_the_last_round_is_given_what_it_lacks(at: str) -> None:
    site = Site(nodes=2, rounds=1)
    orders = await site.opened()
    site.nodes[1].send(orders[1], random_payload(0, site.table))
    if at == "before the commit":
        site.nodes[1].die()
    first = site.nodes[0].send(orders[0], random_payload(0, site.table))
    if at == "after it":
        site.nodes[1].die()
    await site.nodes[0].receive(first)
    assert (await site.nodes[0].stopped()).done
    site.nodes[0].leave()
    assert site.run.phase == "done" and not site.run.finished.is_set(), "one of them lacks the last result"
    with pytest.raises(Refused, match="the run has ended"):
        site.hub.join(join_request(site.table), "")  # a stranger comes too late
    back = site.nodes[1].again(round=0)
    order, downloads = await back.replay()
    assert (order.first, order.count) == (0, 1)
    assert downloads[0].commit is not None and downloads[0].commit.counted
    back.ready(1, "state-1")
    assert (await back.stopped()).done
    back.leave()
    assert site.run.finished.is_set()


async def test_who_is_cut_off_in_the_last_round_is_not_waited_for_for_ever() -> None:
    site = Site(nodes=2, rounds=1)
    orders = await site.opened()
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, random_payload(0, site.table))
    site.nodes[0].leave()
    site.nodes[1].die()
    assert not site.run.finished.is_set()
    site.timer.advance(site.run.plan.stall)
    assert site.run.finished.is_set()


async def test_who_does_not_leave_after_a_stop_is_dropped() -> None:
    site = Site(nodes=1, rounds=1)
    order = await site.nodes[0].opened()
    site.nodes[0].send(order, random_payload(0, site.table))
    assert site.run.phase == "done" and not site.run.finished.is_set()
    site.timer.advance(65.0)
    assert site.run.finished.is_set()


async def test_a_thousand_rounds_do_not_grow() -> None:
    site = Site(nodes=2, rounds=1000, table=voted_table(1))
    for _ in range(1000):
        await site.play()
    assert len(site.hub.status().curve) == 512
    assert site.hub.status().curve[-1].tokens == 1000 * 16
    assert sum(site.run.results.get(i) is not None for i in range(1000)) == RING_ROUNDS
    assert len(site.timer._alarms) < 2200  # cancelled ones of the virtual clock; one a round
    assert not site.run.leases.held and not site.run.leases.returned
