"""The end of a run at the hub: all leave, the last round, a stop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from coordinator.gathering import RETURN_SECONDS
from protos.refusal import Refused
from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import FakeNode, Site, drain, join_request, soon


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
