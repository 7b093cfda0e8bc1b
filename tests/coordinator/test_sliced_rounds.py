"""Rounds whose slices travel between nodes, as the coordinator sees them: news come in, a commit goes out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import xxhash

from coordinator.events import NodeLeft, RoundCommitted, TopologyMade
from coordinator.mesh import DETOUR_ROUNDS
from coordinator.sliced_round import SlicedRound
from protos import atoll_pb2 as pb
from protos.refusal import Refused
from tests.coordinator.coordinator_rig import (
    FakeNode,
    Site,
    abstain_frames,
    contribution_frames,
    eventually,
    random_payload,
    voted_table,
)

TABLE = voted_table(64)
NAMES = ["node-0", "node-1", "node-2"]


class Member(FakeNode):
    """A node that talks about slices."""

    topology: pb.Topology
    reduces: pb.Reduce | None = None

    async def next(self) -> pb.CoordinatorMessage:
        """The next order that is none of the mesh's."""
        while True:
            message = await self.order()
            assert message is not None
            kind = message.WhichOneof("kind")
            if kind == "topology":
                self._revise(message.topology)
            elif kind == "reduce":
                self.reduces = message.reduce
            else:
                return message

    async def opened(self, round_index: int | None = None) -> pb.RoundOpen:
        message = await self.next()
        assert message.WhichOneof("kind") == "round_open", message
        assert round_index is None or message.round_open.round == round_index
        self.drain()
        return message.round_open

    async def committed(self) -> pb.Commit:
        message = await self.next()
        assert message.WhichOneof("kind") == "committed", message
        return message.committed

    def drain(self) -> None:
        """Take what the mesh has sent since."""
        waiting = self.outbox._messages
        while waiting and waiting[0].WhichOneof("kind") in ("topology", "reduce"):
            message = waiting.popleft()
            if message.HasField("topology"):
                self._revise(message.topology)
            else:
                self.reduces = message.reduce

    def _revise(self, message: pb.Topology) -> None:
        if message.since:
            assert message.since == self.topology.number, "it differs from what this node was told last"
            nodes = {node.node: node for node in self.topology.nodes if node.node not in message.gone}
            nodes.update((node.node, node) for node in message.nodes)
            tables = self.topology.tables if message.same_tables else message.tables
            message = pb.Topology(number=message.number, nodes=list(nodes.values()), tables=tables)
        self.topology = message

    def slices(self) -> Sequence[pb.SliceOf]:
        return self.topology.tables[0].slices if self.topology.tables else []

    def say(self, **kind: Any) -> None:
        self.hub.message(self.node, pb.NodeMessage(**kind).SerializeToString())

    def news(self, index: int, arrived: Sequence[str], *, made: bool = False, **fields: Any) -> None:
        self.drain()
        order = self.reduces
        assert order is not None
        digest, differing = (bytes([index + 1]) * 16, [index] * len(order.voters)) if made else (b"", [])
        values: dict[str, Any] = {
            "round": order.round,
            "topology": self.topology.number,
            "slice": index,
            "arrived": arrived,
            "leases": [self._lease(name) for name in arrived],
            "attempt": order.attempt,
            "digest": digest,
            "differing": differing,
            "compared": 100 if made else 0,
        }
        self.say(slice_news=pb.SliceNews(**{**values, **fields}))

    def _lease(self, name: str) -> pb.Lease:
        """What the coordinator takes a node to work on."""
        active = self.hub.run.active
        member = active.members.get(name) if active is not None else None
        if member is None or member.lease is None:
            return pb.Lease()
        return pb.Lease(start=member.lease.start, count=member.lease.count)

    def holds(self, round_index: int, slices: int) -> None:
        whole = xxhash.xxh3_128(b"".join(bytes([index + 1]) * 16 for index in range(slices))).digest()
        self.say(holding=pb.Holding(round=round_index, topology=self.topology.number, digest=whole))


class Reef(Site):
    """A run whose slices travel between its nodes."""

    nodes: list[Member]  # type: ignore[assignment]

    def __init__(self, count: int = 3, **plan: Any) -> None:
        super().__init__(count, present=0, table=TABLE, transport=plan.pop("transport", "direct"), **plan)
        for index in range(count):
            self.join(f"10.0.0.{index + 1}:4601")

    def join(self, direct: str = "", **changes: Any) -> Member:
        node = Member(self.hub, endpoint=pb.Endpoint(direct=direct), **changes)
        self.nodes.append(node)
        return node

    def by(self, name: str) -> Member:
        return next(node for node in self.nodes if node.id == name)

    async def begin(self, round_index: int = 0) -> list[pb.RoundOpen]:
        return [await node.opened(round_index) for node in self.nodes]

    def reduce(self, *, made: bool = True, voters: Sequence[str] | None = None) -> None:
        """All reducers tell that the contributions of ``voters`` are there."""
        names = [node.id for node in self.nodes] if voters is None else list(voters)
        for index, part in enumerate(self.nodes[0].slices()):
            self.by(part.reducer).news(index, names, made=made)

    async def finish(self, round_index: int) -> list[pb.Commit]:
        self.reduce()
        for node in self.nodes:
            node.holds(round_index, len(node.slices()))
        commits = [await node.committed() for node in self.nodes]
        for node in self.nodes:
            node.report(round_index, f"state-{round_index + 1}")
        return commits


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


async def test_a_coordinator_that_stood_still_reads_before_it_blames_a_reducer() -> None:
    reef = Reef(heartbeat=1000.0)
    await reef.begin()
    for index in (0, 2):
        reef.nodes[index].news(index, [node.id for node in reef.nodes], made=True)
    reef.timer.oversleep(30.0)
    reef.nodes[0].drain()
    assert "node-1" in {part.reducer for part in reef.nodes[0].slices()}
    reef.timer.advance(6.0)
    reef.nodes[0].drain()
    assert "node-1" not in {part.reducer for part in reef.nodes[0].slices()}


async def test_a_link_that_is_said_to_carry_nothing_counts_as_unknown() -> None:
    site = Site(2, present=0, table=TABLE, transport="direct")
    nodes = [
        Member(site.hub, endpoint=pb.Endpoint(direct=f"10.0.0.{i}:1", uplink=rate, downlink=rate))
        for i, rate in enumerate((5e-324, 1e6))
    ]
    for node in nodes:
        assert (await node.opened(0)).topology


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


async def test_the_slices_of_a_reducer_that_leaves_go_to_others_within_the_round() -> None:
    reef = Reef()
    await reef.begin()
    bounds = [(part.start, part.end) for part in reef.nodes[0].slices()]
    number = reef.run.mesh.number
    reef.reduce()
    reef.nodes[1].die()
    gone = reef.nodes.pop(1)
    for node in reef.nodes:
        node.drain()
    parts = reef.nodes[0].slices()
    assert [(part.start, part.end) for part in parts] == bounds and reef.run.mesh.number > number
    assert gone.id not in {part.reducer for part in parts}
    assert parts[0].reducer == "node-0" and parts[2].reducer == "node-2"
    # What the other two have stays; the slice that was moved needs its contributions anew.
    reef.reduce(made=False, voters=["node-0", "node-2"])
    reef.reduce(voters=["node-0", "node-2"])
    for node in reef.nodes[:2]:
        node.holds(0, 3)
    commits = [await node.committed() for node in reef.nodes]
    assert list(commits[0].voters) == ["node-0", "node-2"]
    assert gone.id not in {part.reducer for part in commits[0].slices}
    (left,) = reef.told(NodeLeft)
    assert left.node == gone.id


async def test_news_of_a_slice_that_was_taken_away_are_void() -> None:
    reef = Reef()
    await reef.begin()
    before = reef.run.mesh.number
    trouble = pb.SliceTrouble(round=0, slice=1, topology=before, reason="all dials failed")
    reef.nodes[2].say(slice_trouble=trouble)
    stale = pb.SliceNews(round=0, topology=before, slice=1, arrived=["node-0"], attempt=99, digest=b"x" * 16)
    active = reef.run.active
    assert isinstance(active, SlicedRound)
    assert not active.news("node-1", stale)
    for node in reef.nodes:
        node.drain()
    taker = reef.nodes[0].slices()[1].reducer
    assert taker != "node-1" and not active.news(taker, stale)
    assert "instead of node-1" in reef.told(TopologyMade)[-1].reason
    reef.reduce()
    reef.nodes[1].holds(0, 3)
    assert len(reef.told(RoundCommitted)) == 1


async def test_a_frozen_reducer_loses_its_slices() -> None:
    reef = Reef(heartbeat=1000.0)
    await reef.begin()
    for index in (0, 2):
        reef.nodes[index].news(index, [node.id for node in reef.nodes], made=True)
    reef.timer.advance(6.0)
    reef.nodes[0].drain()
    assert "node-1" not in {part.reducer for part in reef.nodes[0].slices()}


async def test_a_failed_reducer_gets_no_slice_for_some_rounds() -> None:
    reef = Reef(rounds=40)
    await reef.begin()
    reef.nodes[1].news(1, [], failed="out of memory")
    reef.nodes[0].drain()
    assert [part.reducer for part in reef.nodes[0].slices()].count("node-1") == 0
    rounds_without = 0
    for round_index in range(12):
        await reef.finish(round_index)
        await reef.begin(round_index + 1)
        rounds_without += "node-1" not in {part.reducer for part in reef.nodes[0].slices()}
    assert 4 <= rounds_without < 12


async def test_without_anybody_who_can_be_reached_the_round_goes_by_the_hub() -> None:
    reef = Site(2, present=0, table=TABLE, transport="direct")
    nodes = [Member(reef.hub, endpoint=pb.Endpoint()) for _ in range(2)]
    orders = [await node.opened() for node in nodes]
    assert {order.topology for order in orders} == {0}
    exchanges = [
        node.send(order, random_payload(i, TABLE))
        for i, (node, order) in enumerate(zip(nodes, orders, strict=True))
    ]
    assert (await nodes[0].receive(exchanges[0])).commit is not None


@pytest.mark.parametrize("transport", ["direct", "auto"])
async def test_an_island_of_ranks_is_a_node_like_others(transport: str) -> None:
    site = Site(2, present=0, table=TABLE, transport=transport)
    one = Member(site.hub, endpoint=pb.Endpoint(direct="10.0.0.1:1"))
    two = Member(site.hub, ranks=2, endpoint=pb.Endpoint(direct="10.0.0.2:1"))
    assert (await one.opened()).topology and (await two.opened()).topology
    assert site.told(TopologyMade)[-1].reducers == ("node-0", "node-1")


@pytest.mark.parametrize("transport", ["direct", "auto"])
async def test_a_node_that_takes_no_part_makes_everybody_use_the_hub(transport: str) -> None:
    site = Site(2, present=0, table=TABLE, transport=transport)
    one = Member(site.hub, endpoint=pb.Endpoint(direct="10.0.0.1:1"))
    two = Member(site.hub)
    assert (await one.opened()).topology == 0 and (await two.opened()).topology == 0
    (made,) = site.told(TopologyMade)
    assert made.reducers == () and "node-1: deals with nobody but the coordinator" in made.reason
    assert site.hub.status().ways == f"{transport}: {made.reason}"


async def test_the_coordinator_reduces_everything_or_nothing() -> None:
    """One node that can be called takes all slices: of M contributions M - 1 pass its link, at the
    coordinator all M would. Without any, the coordinator takes them."""
    site = Site(3, present=0, table=TABLE, transport="direct")
    nodes = [Member(site.hub, endpoint=pb.Endpoint(direct=where)) for where in ("10.0.0.1:1", "", "")]
    assert all([(await node.opened(0)).topology for node in nodes])
    assert {part.reducer for part in nodes[0].slices()} == {"node-0"}
    assert site.told(TopologyMade)[-1].reducers == ("node-0",)


async def test_a_newcomer_costs_each_of_many_nodes_one_entry() -> None:
    """What 100 nodes are sent when another one comes: not 100 times the whole topology."""
    reef = Reef(100)
    await reef.begin()
    sent: list[pb.Topology] = []

    def count(node: Any, message: pb.CoordinatorMessage) -> None:
        if message.HasField("topology"):
            sent.append(message.topology)
        send(node, message)

    send, reef.run.send = reef.run.send, count  # type: ignore[method-assign]
    late = reef.join("10.0.0.200:4601")
    sizes = sorted(message.ByteSize() for message in sent)
    assert len(sizes) == 101 and sizes[-1] > 5_000, "the newcomer is told everything"
    assert sum(sizes[:-1]) < 100 * 120, sum(sizes[:-1])
    for node in (reef.nodes[0], late):
        node.drain()
    assert {peer.node for peer in late.topology.nodes} == {node.id for node in reef.nodes}
    assert [peer.node for peer in reef.nodes[0].topology.nodes] == [node.id for node in reef.nodes]
    told = {peer.node: peer for peer in reef.nodes[0].topology.nodes}
    heard = {peer.node: peer for peer in late.topology.nodes}
    assert told[late.id].call_token == heard["node-0"].accept_token != b""
    assert reef.nodes[0].slices() == late.slices()
    reef.nodes.pop().die()
    sent.clear()
    reef.hub.message(
        reef.nodes[3].node, pb.NodeMessage(endpoint=pb.Endpoint(direct=":9")).SerializeToString()
    )
    reef.join("10.0.0.201:4601")
    assert [list(message.gone) for message in sent[:-1]] == [[late.id]] * 100
    assert [len(message.nodes) for message in sent[:-1]] == [2] * 100, "the newcomer and who has moved"
    assert sum(message.ByteSize() for message in sent[:-1]) < 100 * 220


async def test_an_announcement_keeps_the_detours_of_ways_that_stay() -> None:
    reef = Reef(3)
    await reef.begin()
    mesh = reef.run.mesh
    for index in (1, 2):
        reef.nodes[index].say(detour=pb.Detour(node="node-0", reason="directly: refused"))
    assert mesh.way("node-1", "node-0") == "tunnel"
    reef.nodes[0].say(endpoint=pb.Endpoint(direct="10.0.0.1:4601", uplink=1e6, downlink=1e6))
    assert mesh.way("node-1", "node-0") == mesh.way("node-2", "node-0") == "tunnel"
    reef.nodes[0].say(endpoint=pb.Endpoint(direct="10.0.0.1:4700", uplink=1e6, downlink=1e6))
    assert mesh.way("node-1", "node-0") == "direct", "there is another way now"


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


async def test_an_address_is_tried_before_the_first_round() -> None:
    site = Site(2, present=0, table=TABLE, transport="direct")
    answers: dict[str, asyncio.Future[str]] = {}

    async def dial(address: str, certificate: bytes) -> str:
        answers[address] = asyncio.get_running_loop().create_future()
        return await answers[address]

    site.run.mesh.dial = dial
    nodes = [Member(site.hub, endpoint=pb.Endpoint(direct=where)) for where in (":4601", "reef.example:7")]
    await eventually(lambda: len(answers) == 2, "two addresses that are tried")
    assert sorted(answers) == ["127.0.0.1:4601", "reef.example:7"]
    assert site.run.phase == "syncing" and "node-0, node-1" in site.run.reason
    answers["127.0.0.1:4601"].set_result("")
    answers["reef.example:7"].set_result("connecting timed out")
    orders = [await node.opened(0) for node in nodes]
    assert all(order.topology for order in orders)
    assert {part.reducer for part in nodes[0].slices()} == {"node-0"}
    assert [peer.direct for peer in nodes[0].topology.nodes] == ["127.0.0.1:4601", ""]
    site.hub.close()


async def test_an_address_that_did_not_answer_is_tried_again_without_waiting() -> None:
    site = Site(1, present=0, table=TABLE, transport="direct", rounds=3)
    answers: list[asyncio.Future[str]] = []

    async def dial(address: str, certificate: bytes) -> str:
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    site.run.mesh.dial = dial
    node = Member(site.hub, endpoint=pb.Endpoint(direct=":4601"))
    await eventually(lambda: bool(answers), "an address that is tried")
    assert site.run.mesh.settling == "node-0"
    answers[0].set_result("connecting timed out")
    assert (await node.opened(0)).topology == 0
    for count, uplink in enumerate((1e6, 2e6), 2):
        node.say(endpoint=pb.Endpoint(direct=":4601", uplink=uplink))
        await eventually(partial(_has, answers, count), "another attempt")
    assert not site.run.mesh.settling
    await eventually(answers[1].cancelled, "the end of the attempt before")
    answers[2].set_result("")
    await eventually(lambda: bool(site.run.mesh.reached), "an answer")
    assert site.run.mesh.reached == [("127.0.0.1:4601", b"")]
    site.hub.close()


def _has(answers: Sequence[object], count: int) -> bool:
    return len(answers) == count


async def test_a_hidden_node_of_the_swarm_reduces_nothing_in_the_first_round_either() -> None:
    site = Site(3, present=0, table=TABLE, transport="auto")
    tried: list[str] = []

    async def dial(address: str, certificate: bytes) -> str:
        tried.append(address)
        return "" if address == "10.0.0.1:1" else "connecting timed out"

    async def knock(places: Sequence[str]) -> str:
        tried.extend(places)
        return "" if "10.0.0.2:4701" in places else "connecting timed out"

    site.run.mesh.dial, site.run.mesh.knock = dial, knock
    nodes = [
        Member(
            site.hub,
            endpoint=pb.Endpoint(
                direct=f"10.0.0.{index}:1",
                swarm=f"Qm{index}",
                swarm_addresses=[f"/ip4/10.0.0.{index}/tcp/4701/p2p/Qm{index}"],
            ),
        )
        for index in (1, 2, 3)
    ]
    assert site.run.phase == "syncing" and "node-2" in site.run.reason, "it is tried before the first round"
    for node in nodes:
        await node.opened(0)
    assert sorted(tried) == [f"10.0.0.{index}:{port}" for index in (1, 2, 3) for port in (1, 4701)]
    assert {part.reducer for part in nodes[0].slices()} == {"node-0", "node-1"}


async def test_links_that_differ_make_slices_that_differ() -> None:
    site = Site(3, present=0, table=voted_table(4096), transport="direct")
    ends = [
        pb.Endpoint(direct=f"10.0.0.{i}:1", uplink=rate, downlink=rate)
        for i, rate in enumerate((1e6, 1e6, 1e5))
    ]
    nodes = [Member(site.hub, endpoint=end) for end in ends]
    for node in nodes:
        await node.opened(0)
    sizes = {part.reducer: part.end - part.start for part in nodes[0].slices()}
    assert sizes.get("node-2", 0) < sizes["node-0"] / 2


async def test_who_is_called_through_the_coordinator_by_most_reduces_no_more() -> None:
    reef = Reef(rounds=100)
    await reef.begin()
    reef.nodes[0].say(detour=pb.Detour(node="node-2", reason="connecting timed out"))
    reef.nodes[0].say(detour=pb.Detour(node="node-0"))
    await reef.finish(0)
    await reef.begin(1)
    assert {part.reducer for part in reef.nodes[0].slices()} == set(NAMES)
    reef.nodes[1].say(detour=pb.Detour(node="node-2", reason="connecting timed out"))
    await reef.finish(1)
    await reef.begin(2)
    assert {part.reducer for part in reef.nodes[0].slices()} == {"node-0", "node-1"}
    await reef.finish(2)
    for round_index in range(3, DETOUR_ROUNDS + 4):  # then they are asked to try again
        await reef.begin(round_index)
        await reef.finish(round_index)
    assert {part.reducer for part in reef.nodes[0].slices()} == set(NAMES)
