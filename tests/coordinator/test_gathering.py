"""Who is waited for before rounds can go on, and for how long; the hub's tests have the ordinary cases."""

from __future__ import annotations

from typing import Any

from coordinator.gathering import BACK_SECONDS, RETURN_SECONDS
from coordinator.rounds import Policy
from tests.coordinator.coordinator_rig import FakeNode, Site

PATIENT = Policy(deadline=10.0, start_timeout=1000.0, quorum=0.6)


def members_back(site: Site) -> str:
    return site.run.reason.partition(": ")[2]


async def restarted(**plan: Any) -> tuple[Site, list[FakeNode]]:
    site = Site(nodes=3, rounds=9, **plan)
    await site.play()
    return site, site.restart()


async def test_those_who_are_back_are_counted_as_they_come_and_go() -> None:
    site, lost = await restarted()
    first = lost[0].again(site.hub, round=1, state_digest="state-1")
    assert members_back(site) == "1 of 3 members are back"
    first.die()
    assert members_back(site) == "0 of 3 members are back"
    for node in lost[1:]:
        node.again(site.hub, round=1, state_digest="state-1")
    assert members_back(site) == "2 of 3 members are back"
    first.again(site.hub, round=1, state_digest="state-1")
    assert site.run.phase == "training"


async def test_a_stranger_is_no_member_that_is_back() -> None:
    site, lost = await restarted()
    site.nodes = [node.again(site.hub, round=1, state_digest="state-1") for node in lost[:2]]
    stranger = site.add(round=1, state_digest="state-1")
    assert members_back(site) == "2 of 3 members are back"
    site.idle(BACK_SECONDS)
    assert site.run.registry.roster.members == ("node-0", "node-1", stranger.id), "but it is welcome"


async def test_the_grace_begins_with_the_first_and_is_not_begun_again_by_others() -> None:
    site, lost = await restarted(policy=PATIENT)
    site.nodes = [lost[0].again(site.hub, round=1, state_digest="state-1")]
    site.idle(BACK_SECONDS - 1.0)
    site.nodes.append(lost[1].again(site.hub, round=1, state_digest="state-1"))
    site.idle(1.0)
    assert site.run.registry.roster.members == ("node-0", "node-1")


async def test_who_has_said_goodbye_is_not_waited_for() -> None:
    site, lost = await restarted()
    site.nodes = [node.again(site.hub, round=1, state_digest="state-1") for node in lost[:2]]
    last = lost[2].again(site.hub, round=1, state_digest="another")
    assert members_back(site) == "2 of 3 members are back", "it has to load the common state first"
    last.leave("interrupted by its user")
    assert site.run.phase == "training"
    assert site.run.registry.roster.members == ("node-0", "node-1")


async def test_who_has_to_replay_first_is_waited_for_within_the_grace() -> None:
    site = Site(nodes=2, rounds=9)
    for _ in range(4):
        await site.play()
    lost = site.restart()
    site.nodes = [lost[0].again(site.hub, round=4, state_digest="state-4")]
    behind = lost[1].again(site.hub, round=0)
    site.nodes.append(behind)
    order, _ = await behind.replay()
    assert (order.first, order.count) == (0, 4) and site.run.phase == "gathering"
    behind.ready(4, "state-4")
    assert [order.round for order in await site.opened()] == [4, 4]


async def test_who_was_cut_off_may_come_back_for_a_while() -> None:
    waits_of_rounds = Policy(deadline=4.0, start_timeout=5.0, quorum=0.6)
    site = Site(nodes=2, rounds=9, policy=waits_of_rounds)
    await site.play()
    for node in site.nodes:
        node.die()
    site.timer.advance(RETURN_SECONDS - 1.0)
    assert site.run.phase == "gathering"
    site.timer.advance(1.0)
    assert site.run.phase == "failed" and "every node left before round 2" in site.run.reason


async def test_one_that_was_cut_off_is_waited_for_though_the_other_said_goodbye() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    site.nodes[0].leave("its work is done")
    site.nodes[1].die()
    assert site.run.phase == "gathering"
    back = site.nodes[1].again(round=1, state_digest="state-1")
    assert (await back.opened(1)).members == ["node-1"]


async def test_work_in_hand_that_cannot_be_is_not_believed() -> None:
    """Of another round, more than a node reads, or far beyond what the members can have been given."""
    for claim in ((0, 16, 4), (1, 12, 5), (1, 10_000, 4)):
        site, lost = await restarted()
        work = dict(zip(("lease_round", "lease_start", "lease_count"), claim, strict=True))
        site.nodes = [node.again(site.hub, round=1, state_digest="state-1", **work) for node in lost]
        orders = await site.opened()
        assert [(order.lease_start, order.lease_count) for order in orders] == [(12, 4), (16, 4), (20, 4)]


async def test_the_same_work_in_two_hands_is_given_to_one() -> None:
    site, lost = await restarted()
    work = {"lease_round": 1, "lease_start": 16, "lease_count": 4}
    site.nodes = [node.again(site.hub, round=1, state_digest="state-1", **work) for node in lost]
    orders = await site.opened()
    assert sorted((order.lease_start, order.lease_count) for order in orders) == [(12, 4), (16, 4), (20, 4)]
