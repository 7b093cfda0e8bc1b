"""Who reduces the slices that travel between nodes: those that can be called, and do it in time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from coordinator.events import NodeLeft, RoundCommitted, TopologyMade
from coordinator.mesh import DETOUR_ROUNDS
from coordinator.sliced_round import SlicedRound
from protos import atoll_pb2 as pb
from tests.coordinator.contribution_rig import random_payload, voted_table
from tests.coordinator.coordinator_rig import Site, eventually
from tests.coordinator.sliced_rig import NAMES, TABLE, Member, Reef


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
