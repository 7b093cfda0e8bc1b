"""Rounds whose slices travel between nodes, as the coordinator sees them: news come in, a commit goes out."""

from __future__ import annotations

import math
from typing import Any

import pytest

from coordinator.events import RoundCommitted
from coordinator.sliced_round import SlicedRound
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from tests.coordinator.contribution_rig import abstain_frames, contribution_frames, random_payload
from tests.coordinator.coordinator_rig import Site
from tests.coordinator.sliced_rig import NAMES, TABLE, Member, Reef


async def test_a_round_between_nodes() -> None:
    reef = Reef(rounds=2)
    orders = await reef.begin()
    assert {order.topology for order in orders} == {reef.run.mesh.number}
    parts = reef.nodes[0].slices()
    assert [part.reducer for part in parts] == NAMES
    assert (parts[0].start, parts[-1].end) == (0, TABLE.nbytes)
    assert all(node.reduces is not None and node.reduces.voters == NAMES for node in reef.nodes)
    commits = await reef.finish(0)
    reef.nodes[0].report(0, "state-1", bytes_up=10**9)
    status = reef.hub.status()
    assert status.ways.startswith("direct: 3 reduce") and status.nodes[0].bytes_up == 10**9
    assert all(commit.counted and commit.nbytes == 0 for commit in commits)
    assert [part.digest for part in commits[0].slices] == [bytes([index]) * 16 for index in (1, 2, 3)]
    assert [part.reducer for part in commits[0].slices] == NAMES
    assert commits[0].slices[-1].out_end == TABLE.result_nbytes
    assert list(commits[0].holders) == NAMES
    assert commits[1].agreement == pytest.approx(1 - (0 + 1 + 2) / 300)
    kept = reef.journal.rounds[0]
    assert kept.payload == b"" and [part.reducer for part in kept.record.slices] == [
        "node-0",
        "node-1",
        "node-2",
    ]
    assert kept.record.nbytes == TABLE.result_nbytes
    await reef.begin(1)
    await reef.finish(1)
    assert reef.run.phase == "done" and len(reef.told(RoundCommitted)) == 2
    for node in reef.nodes:
        message = await node.next()
        assert message.WhichOneof("kind") == "stop" and message.stop.done


async def test_every_pair_has_its_own_tokens() -> None:
    reef = Reef()
    await reef.begin()
    calls = {(node.id, peer.node): peer.call_token for node in reef.nodes for peer in node.topology.nodes}
    accepts = {(peer.node, node.id): peer.accept_token for node in reef.nodes for peer in node.topology.nodes}
    others = {pair for pair in calls if pair[0] != pair[1]}
    assert len(others) == 6 and all(calls[pair] == accepts[pair] for pair in others)
    assert len({calls[pair] for pair in others}) == 6 and all(len(calls[pair]) == 16 for pair in others)
    assert {peer.node: peer.direct for peer in reef.nodes[0].topology.nodes}["node-2"] == "10.0.0.3:4601"


async def test_nothing_is_committed_before_a_second_node_holds_it() -> None:
    reef = Reef(2)
    await reef.begin()
    reef.reduce()
    assert not reef.told(RoundCommitted)
    reef.nodes[0].holds(0, 2)  # if it were lost now, what it has reduced would be as well
    assert not reef.told(RoundCommitted)
    reef.nodes[1].say(holding=pb.Holding(round=0, digest=b"x" * 16))
    assert not reef.told(RoundCommitted)
    reef.nodes[1].holds(0, 2)
    assert len(reef.told(RoundCommitted)) == 1


async def test_one_that_reduces_nothing_may_be_the_only_one_to_hold_the_whole() -> None:
    site = Site(3, present=0, table=TABLE, transport="direct")
    nodes = [
        Member(site.hub, endpoint=pb.Endpoint(direct=where)) for where in ("10.0.0.1:1", "10.0.0.2:1", "")
    ]
    for node in nodes:
        await node.opened(0)
    assert [part.reducer for part in nodes[0].slices()] == ["node-0", "node-1"]
    for index in (0, 1):
        nodes[index].news(index, NAMES, made=True)
    assert not site.told(RoundCommitted)
    nodes[2].holds(0, 2)
    assert len(site.told(RoundCommitted)) == 1


async def test_a_voter_that_waits_for_the_commit_holds_nobody_up() -> None:
    reef = Reef(2)
    await reef.begin()
    reef.reduce()
    reef.nodes[0].holds(0, 2)
    assert not reef.told(RoundCommitted)
    reef.nodes[1].say(abstention=pb.Abstention(round=0, reason="it has given its streams up"))
    assert list((await reef.nodes[0].committed()).voters) == ["node-0", "node-1"]


async def test_who_is_no_member_of_the_round_abstains_in_vain() -> None:
    reef = Reef()
    await reef.begin()
    reef.join("10.0.0.9:1").say(abstention=pb.Abstention(round=0, reason="of another session"))
    reef.nodes.pop()
    await reef.finish(0)
    assert reef.run.phase == "training" and len(reef.told(RoundCommitted)) == 1


async def test_a_round_that_nobody_can_reduce_ends_the_run() -> None:
    reef = Reef(2)
    await reef.begin()
    reef.nodes[1].news(1, [], failed="out of memory")
    assert reef.run.active is not None
    reef.nodes[0].news(0, [], failed="likewise")
    assert reef.run.phase == "failed" and "node-0 cannot reduce it: likewise" in reef.run.reason


async def test_the_only_member_keeps_the_slices_that_it_cannot_reach() -> None:
    reef = Reef(1)
    await reef.begin()
    for _ in range(2):
        reef.nodes[0].drain()
        number = reef.nodes[0].topology.number
        reef.nodes[0].say(slice_trouble=pb.SliceTrouble(round=0, slice=0, topology=number, reason="busy"))
    reef.reduce()
    assert (await reef.nodes[0].committed()).counted


async def test_a_member_that_reaches_nobody_and_is_not_reached_is_left_out_at_last() -> None:
    reef = Reef()
    await reef.begin()
    active = reef.run.active
    assert isinstance(active, SlicedRound)
    complaints = 0
    while active.members["node-2"].pending:
        for node in reef.nodes:
            node.drain()
        reducers = [part.reducer for part in reef.nodes[0].slices()]
        other = next((name for name in reducers if name != "node-2"), "")
        trouble = pb.SliceTrouble(
            round=0,
            slice=reducers.index(other or "node-2"),
            topology=reef.nodes[0].topology.number,
            reason="no way is left",
        )
        reef.nodes[2 if other else 0].say(slice_trouble=trouble)
        complaints += 1
        assert complaints < 12
    assert active.members["node-0"].pending and active.members["node-1"].pending
    for node in reef.nodes:
        node.drain()
    reef.reduce(voters=["node-0", "node-1"])
    for node in reef.nodes[:2]:
        node.holds(0, 3)
    commit = await reef.nodes[2].committed()
    assert list(commit.voters) == ["node-0", "node-1"] and not commit.counted


async def test_a_result_that_nobody_else_receives_is_not_waited_for() -> None:
    site = Site(2, present=0, table=TABLE, transport="direct")
    nodes = [Member(site.hub, endpoint=pb.Endpoint(direct=where)) for where in ("10.0.0.1:1", "")]
    for node in nodes:
        await node.opened(0)
    nodes[0].news(0, ["node-0"])
    nodes[1].say(abstention=pb.Abstention(round=0, reason="loss is nan"))
    nodes[0].news(0, ["node-0"], made=True)
    assert list((await nodes[1].committed()).voters) == ["node-0"]


async def test_a_single_node_reduces_alone() -> None:
    reef = Reef(1)
    await reef.begin()
    reef.reduce()
    assert (await reef.nodes[0].committed()).counted


async def test_a_member_that_abstains_and_one_that_is_refused() -> None:
    reef = Reef()
    await reef.begin()
    attempt = reef.nodes[0].reduces.attempt  # type: ignore[union-attr]
    reef.nodes[1].say(abstention=pb.Abstention(round=0, reason="loss is nan"))
    reef.nodes[0].drain()
    assert reef.nodes[0].reduces.voters == ["node-0", "node-2"]  # type: ignore[union-attr]
    assert reef.nodes[0].reduces.attempt > attempt  # type: ignore[union-attr]
    refusal = pb.SliceRefusal(node="node-2", kind="not-finite", reason="NaN")
    reef.nodes[0].news(0, ["node-0"], refused=[refusal])
    for index, part in enumerate(reef.nodes[0].slices()):
        reef.by(part.reducer).news(index, ["node-0"], made=True)
    reef.nodes[0].holds(0, 3)
    commits = [await node.committed() for node in reef.nodes]
    assert [commit.counted for commit in commits] == [True, False, False]
    assert list(commits[0].voters) == ["node-0"] and "abstained" in commits[0].reason
    await reef.begin(1)


async def test_an_old_attempt_does_not_count() -> None:
    reef = Reef()
    await reef.begin()
    reef.reduce(made=False)
    old = reef.nodes[0].reduces.attempt  # type: ignore[union-attr]
    reef.nodes[2].die()
    reef.nodes.pop()
    for index in (0, 1):
        reef.nodes[index].news(index, ["node-0", "node-1"], made=True, attempt=old, differing=[0, 0, 0])
    assert not reef.told(RoundCommitted)


async def test_what_was_made_of_other_samples_does_not_count() -> None:
    reef = Reef(2)
    opened = await reef.begin()
    for node, lease in zip(reef.nodes, opened, strict=True):
        assert node.reduces is not None
        assert node.reduces.leases[opened.index(lease)].start == lease.lease_start
    others = [pb.Lease(start=lease.lease_start + 1000, count=lease.lease_count) for lease in opened]
    for index, part in enumerate(reef.nodes[0].slices()):
        reef.by(part.reducer).news(index, NAMES[:2], leases=others)
    active = reef.run.active
    assert active is not None and all(member.pending for member in active.members.values())
    for index, part in enumerate(reef.nodes[0].slices()):
        reef.by(part.reducer).news(index, NAMES[:2], leases=others[:1])  # makes no sense
    assert all(member.pending for member in active.members.values())
    reef.reduce(made=False)
    assert not any(member.pending for member in active.members.values())


async def test_a_payload_for_a_sliced_round_is_refused_and_its_commit_can_be_asked_for() -> None:
    reef = Reef()
    orders = await reef.begin()
    frames = contribution_frames(orders[0], TABLE, random_payload(0, TABLE))
    exchange = reef.nodes[0].feed(*frames)
    with pytest.raises(Refused, match="travel between nodes"):
        await exchange.next_frame()
    asking = reef.nodes[1].feed(*abstain_frames(orders[1], "asking"))
    reef.reduce()
    for node in reef.nodes[:2]:
        node.holds(0, 3)
    download = await reef.nodes[1].receive(asking)
    assert download.commit is not None and len(download.commit.slices) == 3 and download.commit.counted


async def test_a_late_member_goes_on_with_its_report() -> None:
    reef = Reef(rounds=5)
    await reef.begin()
    fast = reef.nodes[:2]
    for index, part in enumerate(reef.nodes[0].slices()):
        reef.by(part.reducer).news(index, ["node-0", "node-1"])
    reef.idle(11.0)  # the deadline passes
    for node in reef.nodes:
        node.drain()
    for index, part in enumerate(reef.nodes[0].slices()):
        reef.by(part.reducer).news(index, ["node-0", "node-1"], made=True)
    for node in reef.nodes[:2]:
        node.holds(0, 3)
    for node in fast:
        assert (await node.committed()).round == 0
        await node.opened(1)
    late = reef.nodes[2]
    assert not (await late.committed()).counted
    late.drain()
    assert late.idle()
    late.report(0, "state-1")
    order = await late.opened(1)
    assert order.lease_count and not order.result_ready and order.topology


async def test_facts_outlast_the_coordinator() -> None:
    reef = Reef(rounds=5)
    await reef.begin()
    await reef.finish(0)
    await reef.begin(1)
    lost = reef.restart()
    ahead = [
        Member(
            reef.hub,
            former=node.reply.session,
            round=1,
            state_digest="state-1",
            endpoint=pb.Endpoint(direct="10.0.0.9:1"),
        )
        for node in lost[:2]
    ]
    behind = Member(
        reef.hub, former=lost[2].reply.session, round=0, state_digest="s0", endpoint=pb.Endpoint()
    )
    assert [node.id for node in (*ahead, behind)] == NAMES
    message = await behind.next()
    assert message.round_open.result_ready and message.round_open.round == 0
    download = await behind.fetch(message.round_open)
    assert download.commit is not None and len(download.commit.slices) == 3
    assert set(download.commit.holders) == {"node-0", "node-1", "node-2"}


async def test_a_member_that_comes_back_keeps_its_seat_only_with_the_same_work() -> None:
    reef = Reef(rounds=5)
    orders = await reef.begin()
    lease = orders[2]
    node = reef.nodes.pop()
    node.die()
    changes = {"former": node.reply.session, "endpoint": pb.Endpoint(), "state_digest": "s0"}
    again = Member(
        reef.hub, **changes, lease_round=0, lease_start=lease.lease_start, lease_count=lease.lease_count
    )
    order = await again.opened(0)
    assert (order.lease_start, order.lease_count) == (lease.lease_start, lease.lease_count)
    again.die()
    other = Member(reef.hub, **{**changes, "former": again.reply.session})
    other.drain()
    assert other.idle()  # it waits for the next round
    assert math.isnan(reef.run.history.agreement)


async def test_nonsense_about_slices_is_counted_or_ignored() -> None:
    reef = Reef()
    await reef.begin()
    active = reef.run.active
    assert isinstance(active, SlicedRound)
    node = reef.nodes[0]
    wrong: list[tuple[int, dict[str, Any]]] = [(7, {}), (1, {}), (0, {"round": 3})]
    for index, fields in wrong:
        node.news(index, ["node-0"], **fields)
    node.news(0, ["stranger"])
    node.news(0, [], made=True, digest=b"short")
    node.news(0, [], made=True, differing=[1])
    node.say(slice_trouble=pb.SliceTrouble(round=0, slice=9, reason="x"))
    node.say(endpoint=pb.Endpoint(direct="x" * 1000))
    node.say(endpoint=pb.Endpoint(direct="a:1", uplink=-1.0))
    assert not reef.told(RoundCommitted) and reef.run.counters["bad-message"] == 2
    await reef.finish(0)
