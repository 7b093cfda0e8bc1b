"""Members that were cut off for a moment and come back by their former sessions."""

from __future__ import annotations

import pytest

from protos.refusal import Refused
from tests.coordinator.contribution_rig import contribution_frames
from tests.coordinator.coordinator_rig import FakeNode, Site
from tests.coordinator.restart_rig import payload, work


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
