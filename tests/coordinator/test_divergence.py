"""Nodes that have left the common state of a run: who is right, and how the others get back to it."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.events import DigestAgreed, NodeDeviated
from coordinator.newcomers import MAX_FAILURES
from protos import atoll_pb2 as pb
from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import FakeNode, Site
from tests.coordinator.newcomer_rig import STATE, commit
from tests.coordinator.state_rig import SharedState, donate, load


async def deviate(site: Site, node: FakeNode, others: Sequence[FakeNode], digest: str) -> None:
    """One round after which one node holds something else."""
    everybody = [node, *others]
    orders = [await one.opened() for one in everybody]
    for one, order in zip(everybody, orders, strict=True):
        one.send(order, random_payload(order.round, site.table))
    for one, order in zip(everybody, orders, strict=True):
        one.report(order.round, "bad" if one is node else digest)


async def opened_behind_a_donation(site: Site, node: FakeNode, state: SharedState) -> pb.RoundOpen:
    """A donor's orders at a round's beginning."""
    await donate(site, node, state)
    return await node.opened()


async def test_a_node_that_deviates_is_told_to_load_and_is_back_afterwards() -> None:
    site = Site(nodes=3, rounds=50)
    bad, good = site.nodes[1], [site.nodes[0], site.nodes[2]]
    await deviate(site, bad, good, "1")
    assert site.run.counters["digest-mismatch"] == 1
    (event,) = site.told(NodeDeviated)
    assert (event.node, event.round, event.digest, event.agreed, event.times) == ("node-1", 0, "bad", "1", 1)
    assert "2 of 3 nodes hold 1, not node-1 (bad)" in event.reason
    order = await bad.opened(1)  # from before it was known
    ignored = bad.send(order, random_payload(1, site.table))
    await commit(site, good, STATE.digest)
    assert (site.run.round, site.run.registry.roster.members) == (2, ("node-0", "node-2"))
    assert site.run.results.get(1).voters == ("node-0", "node-2")  # type: ignore[union-attr]
    told = (await bad.receive(ignored)).commit
    assert told is not None and not told.counted
    orders = [await opened_behind_a_donation(site, node, STATE) for node in good]
    assert order.lease_start in [one.lease_start for one in orders], "its samples are read by another"
    loaded, _ = await load(site, bad)
    assert loaded.round == 2
    bad.ready(2, STATE.digest)
    for node, one in zip(good, orders, strict=True):
        node.send(one, random_payload(2, site.table))
    assert list((await bad.opened(2)).members) == ["node-0", "node-2", "node-1"]
    # What it had told of the rounds before is not held against it again.
    good[1].die()
    assert site.run.counters["digest-mismatch"] == 1 and bad.node.state == "lagging"


async def test_between_two_the_lowest_slot_is_right() -> None:
    site = Site(nodes=2)
    await deviate(site, site.nodes[1], site.nodes[:1], "a")
    assert "1 of 2 nodes hold a, not node-1 (bad)" in site.told(NodeDeviated)[0].reason
    assert site.nodes[1].node.state == "joining" and site.nodes[0].node.state == "active"


async def test_a_deviant_that_is_left_alone_does_not_decide_what_is_right() -> None:
    site = Site(nodes=3, rounds=50)
    orders = await site.opened()
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, random_payload(0, site.table))
    site.nodes[0].report(0, "bad")
    for node in site.nodes[1:]:
        node.die()  # unheard
    assert not site.run.history.digest_after(0) and not site.told(DigestAgreed)


async def test_nor_does_one_whose_fellow_voters_are_gone_before_the_commit() -> None:
    site = Site(nodes=3, rounds=50)
    orders = await site.opened()
    for node, order in zip(site.nodes[1:], orders[1:], strict=True):
        node.send(order, random_payload(0, site.table))
        node.die()
    site.nodes[0].send(orders[0], random_payload(0, site.table))
    site.nodes[0].report(0, "bad")
    assert site.run.round == 1 and not site.run.history.digest_after(0)


async def test_a_deviant_whose_reports_come_late_is_told_once() -> None:
    """It has told of two rounds before its order to load reaches it."""
    site = Site(nodes=3, rounds=50)
    bad, good = site.nodes[1], [site.nodes[0], site.nodes[2]]
    orders = await site.opened()
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, random_payload(0, site.table))
    orders = await site.opened()
    for node, order in zip(site.nodes, orders, strict=True):
        node.send(order, random_payload(1, site.table))
    for index in range(2):
        for node in good:
            node.report(index, f"state-{index + 1}")
    bad.report(0, "bad")
    bad.report(1, "worse")
    assert site.run.counters["digest-mismatch"] == 1 and len(site.told(NodeDeviated)) == 1


async def test_the_third_time_a_deviant_is_sent_away() -> None:
    site = Site(nodes=3, rounds=50)
    bad, good = site.nodes[1], [site.nodes[0], site.nodes[2]]
    await deviate(site, bad, good, "1")
    await bad.opened(1)
    await commit(site, good, STATE.digest)
    orders = [await opened_behind_a_donation(site, node, STATE) for node in good]
    for times in range(2, MAX_FAILURES + 1):
        await load(site, bad)
        bad.ready(2, "garbled")
        assert site.run.counters["digest-mismatch"] == times
    stop = await bad.stopped()
    assert f"digest garbled, the common one {STATE.digest}; it has happened 3 times" in stop.reason
    assert not stop.done
    for node, order in zip(good, orders, strict=True):
        node.send(order, random_payload(2, site.table))
    assert site.run.round == 3, "and nobody is held up"
