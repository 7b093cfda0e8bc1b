"""A run that goes on under a new coordinator, with whoever comes."""

from __future__ import annotations

import pytest

from protos import atoll_pb2 as pb
from protos.refusal import Refused
from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import FakeNode, Site, join_request, soon
from tests.coordinator.state_rig import SharedState, donate, load

STATE = SharedState.of(5)
OLD = {"round": 5, "state_digest": STATE.digest, "samples": 60}
OLDER = {"round": 3, "state_digest": "state-3", "samples": 36}


async def load_all(site: Site, donor: FakeNode, *joiners: FakeNode) -> None:
    """Everybody gets the state of round 5 from the donor."""
    await donate(site, donor, STATE)
    for joiner in joiners:
        order, data = await load(site, joiner)
        assert order.round == 5 and data == STATE.data
        assert site.run.phase == "syncing", "the first round waits for them"
        joiner.ready(5, STATE.digest)


async def test_all_nodes_resume() -> None:
    site = Site(nodes=3, present=0, rounds=7)
    for samples in (52, 60, 56):
        assert not site.add(**{**OLD, "samples": samples}).reply.needs_state
    orders = await site.opened()
    assert [order.round for order in orders] == [5, 5, 5]
    assert [order.lease_start for order in orders] == [60, 64, 68], "nothing is read twice"
    assert [order.frontier for order in orders] == [72, 72, 72]
    assert [order.evaluate for order in orders].count(True) == 0
    assert site.run.leases.trained == 0


@pytest.mark.parametrize("first", [True, False])
async def test_one_node_resumes_and_the_others_load(first: bool) -> None:
    """Whoever starts afresh, or with an older checkpoint, even of other weights, gets the latest state."""
    site = Site(nodes=3, present=0, rounds=7)
    claims = [OLD, {"state_digest": "other init"}, OLDER]
    nodes = [site.add(**claim) for claim in (claims if first else reversed(claims))]
    resumed, others = (nodes[0], nodes[1:]) if first else (nodes[2], nodes[:2])
    assert [node.reply.needs_state for node in others] == ([True, True] if first else [False, True])
    assert site.run.phase == "syncing" and site.run.round == 5
    await load_all(site, resumed, *others)
    orders = await site.opened([resumed, *others])
    assert [(o.round, o.frontier) for o in orders] == [(5, 72)] * 3
    assert sorted(o.lease_start for o in orders) == [60, 64, 68]
    for round_index in (5, 6):
        for node, order in zip([resumed, *others], orders, strict=True):
            node.abstain(order)
        for node in site.nodes:
            node.report(round_index, f"state-{round_index + 1}")
        if round_index == 5:
            orders = await site.opened([resumed, *others])
            assert [o.round for o in orders] == [6, 6, 6]
            assert [o.evaluate for o in orders].count(True) == 1, "it is the last round"
    assert (site.run.phase, site.hub.status().state_digest) == ("done", "state-7")
    assert [point.round for point in site.hub.status().curve] == [5, 6]


async def test_another_state_of_the_same_round_is_refused_with_both_digests() -> None:
    site = Site(nodes=3, present=0, rounds=7)
    first = site.add(**OLD)
    reason = rf"after 5 rounds is mine .* {STATE.digest} on node-0.*without --resume"
    with pytest.raises(Refused, match=reason):
        site.hub.join(join_request(site.table, **{**OLD, "state_digest": "mine"}), "")
    first.leave()  # and with it what it has said
    site.add(**{**OLD, "state_digest": "mine"})


async def test_who_comes_with_a_later_state_after_the_beginning_is_refused() -> None:
    site = Site(nodes=1, present=0, rounds=9)
    late = site.hub.join(join_request(site.table, **OLD), "")  # but its session opens too late
    site.add()
    await site.opened()
    for claim in (OLD, {**OLD, "round": 9}):
        with pytest.raises(Refused, match="the run has begun without it and has committed 0: to go on from"):
            site.hub.join(join_request(site.table, **claim), "")
    node = site.hub.node_of(late.session)
    outbox = site.hub.open_session(node)
    message = await soon(outbox.get())
    assert message is not None and "the run has begun without it" in message.stop.reason


async def test_more_nodes_than_are_waited_for() -> None:
    """The last ones take part in the next round: without loading, if they have resumed, too."""
    site = Site(nodes=2, present=0, rounds=9)
    site.add(**OLD), site.add(**OLD)
    third = site.add(**OLD)
    assert not third.reply.needs_state
    await site.play(site.nodes[:2])
    order = await third.opened(5)
    assert order.result_ready
    await third.receive(third.abstain(order, "catching up"))
    orders = [await third.opened(6), *await site.opened(site.nodes[:2])]
    assert sorted(o.lease_start for o in orders) == [68, 72, 76]
    assert {o.frontier for o in orders} == {80}


async def test_a_finished_run_is_evaluated_and_over() -> None:
    site = Site(nodes=2, present=0, rounds=5)
    nodes = [site.add(**OLD), site.add()]
    assert site.run.phase == "done"
    stops = [await node.stopped() for node in nodes]
    assert [(stop.done, stop.evaluate) for stop in stops] == [(True, True), (False, False)]
    assert "this node cannot be given the final state any more" in stops[1].reason


async def test_when_all_leave_before_a_commit_anybody_may_begin_again() -> None:
    site = Site(nodes=2, present=0, rounds=9)
    site.add(**OLD), site.add(**OLD)
    await site.opened()
    for node in site.nodes:
        node.leave()
    assert (site.run.phase, site.run.reason, site.run.round) == ("gathering", "0 of 2 nodes", 0)
    fresh = [site.add(**OLDER), site.add(**OLDER)]
    assert [(o.round, o.lease_start) for o in await site.opened(fresh)] == [(3, 36), (3, 40)]


async def test_when_the_only_holder_leaves_while_the_others_load() -> None:
    site = Site(nodes=2, present=0, rounds=9)
    holder, other = site.add(**OLD), site.add()
    assert site.run.phase == "syncing"
    holder.leave()
    assert (site.run.phase, site.run.begun, site.run.reason) == ("gathering", False, "1 of 2 nodes")
    again = site.add(**OLD)
    site.idle(6.0)  # after the snapshot that has failed
    await load_all(site, again, other)
    assert [order.round for order in await site.opened([again, other])] == [5, 5]


async def test_those_who_load_learn_how_far_the_run_has_read() -> None:
    site = Site(nodes=2, present=0, rounds=9)
    holder, other = site.add(**OLD), site.add()
    await donate(site, holder, STATE)
    message = await other.order()
    assert message is not None and message.WhichOneof("kind") == "load_state"
    assert message.load_state == pb.LoadState(snapshot="round-5-0", round=5, frontier=60)
    assert holder.node.in_session


async def test_those_who_load_at_the_start_vote_in_full() -> None:
    site = Site(nodes=2, present=0, rounds=9, momentum=0.9)
    holder, other = site.add(**OLD), site.add()
    await load_all(site, holder, other)
    await site.opened()
    assert holder.node.since is None and other.node.since is None


async def test_the_frontier_counts_who_may_still_take_a_lease() -> None:
    """A member that lags takes its samples when it has caught up: nobody else may think them unread."""
    site = Site(nodes=3, rounds=9)
    orders = await site.opened()
    late = site.nodes[2]
    for node, order in zip(site.nodes[:2], orders[:2], strict=True):
        node.send(order, random_payload(0, site.table))
    site.idle(10.0)
    assert site.run.round == 1 and late.node.state == "lagging"
    late.abstain(orders[2])
    orders, order = await site.opened(site.nodes[:2]), await late.opened(1)
    assert not order.result_ready
    assert order.lease_start + order.lease_count <= orders[0].frontier
