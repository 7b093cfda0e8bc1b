"""The hub with fake nodes and a virtual clock: admission and rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from protos import atoll_pb2 as pb
from protos import wire
from protos.refusal import Refused
from protos.ring import RING_ROUNDS
from tests.coordinator.contribution_rig import random_payload, schedule, slow_tally, voted_table
from tests.coordinator.coordinator_rig import FakeNode, Site, join_request, soon


def ids(nodes: Sequence[FakeNode]) -> list[str]:
    return [node.id for node in nodes]


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


async def test_a_thousand_rounds_do_not_grow() -> None:
    site = Site(nodes=2, rounds=1000, table=voted_table(1))
    for _ in range(1000):
        await site.play()
    assert len(site.hub.status().curve) == 512
    assert site.hub.status().curve[-1].tokens == 1000 * 16
    assert sum(site.run.results.get(i) is not None for i in range(1000)) == RING_ROUNDS
    assert len(site.timer._alarms) < 2200  # cancelled ones of the virtual clock; one a round
    assert not site.run.leases.held and not site.run.leases.returned
