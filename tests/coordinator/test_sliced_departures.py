"""Nodes with which results of rounds are lost: what is left to go on with, and who is told to do what."""

from __future__ import annotations

import pytest

from coordinator.events import CatchUpPlanned, TopologyMade
from coordinator.journal import MemoryJournal
from coordinator.mesh import COUNT_BITS, Mesh
from coordinator.replay import first_kept
from coordinator.result import Result, ResultRing
from protos import atoll_pb2 as pb
from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import Site
from tests.coordinator.sliced_rig import TABLE, Member, Reef


async def played(rounds: int, count: int = 3) -> Reef:
    """A run that has committed so many rounds, and has the next one open."""
    reef = Reef(count, rounds=20)
    await reef.begin()
    for index in range(rounds):
        await reef.finish(index)
        await reef.begin(index + 1)
    return reef


def all_die(reef: Reef) -> None:
    while reef.nodes:
        reef.nodes.pop().die()


async def test_a_topology_names_every_reducer_also_those_that_have_left() -> None:
    reef = await played(1)
    all_die(reef)
    newcomer = reef.join("10.0.0.9:4601", round=1, state_digest="state-1")
    newcomer.drain()
    named = {peer.node for peer in newcomer.topology.nodes}
    assert newcomer.id in named
    reducers = {part.reducer for table in newcomer.topology.tables for part in table.slices}
    assert reducers <= named


async def test_results_of_nodes_that_are_gone_are_not_to_be_replayed() -> None:
    reef = await played(3)
    all_die(reef)
    run = reef.run
    reef.join("10.0.0.9:4601", round=1, state_digest="state-1")
    assert run.first_kept() == run.round == 3
    (planned,) = reef.told(CatchUpPlanned)
    assert planned.action == "wait" and "results are kept since round 4" in planned.reason
    assert "another --journal" in run.reason
    holder = reef.join("10.0.0.8:4601", round=3, state_digest="state-3")
    assert (await holder.next()).WhichOneof("kind") == "donate"  # the state that the other one lacks
    assert (await holder.opened(3)).lease_count and run.phase == "training"


async def test_the_last_result_of_nodes_that_are_gone_makes_nobody_ready() -> None:
    reef = await played(3)
    all_die(reef)
    late = reef.join("10.0.0.9:4601", round=2, state_digest="state-2")
    assert not reef.run.newcomers.ready(late.node) and reef.run.phase == "gathering"


@pytest.mark.parametrize("gone", [0, 2])
async def test_results_are_replayed_as_long_as_one_node_is_there_that_received_them(gone: int) -> None:
    reef = await played(3)
    for _ in range(gone):
        reef.nodes.pop().die()
    reef.join("10.0.0.9:4601")
    assert reef.run.first_kept() == 0
    assert reef.told(CatchUpPlanned)[-1].action == "replay"


async def test_a_newcomer_has_no_results_from_before_it_came() -> None:
    reef = await played(6)
    newcomer = reef.join("10.0.0.9:4601", round=5, state_digest="state-5")
    await reef_commits(reef, 6)
    assert newcomer.node.seated and reef.run.registry.received_since(7) == 0
    for node in reef.nodes[:3]:
        node.die()
    assert reef.run.registry.received_since(7) == 5


async def reef_commits(reef: Reef, round_index: int) -> None:
    """The members of before commit a round that a newcomer is not in."""
    before, newcomers = reef.nodes[:3], reef.nodes[3:]
    reef.nodes = before
    await reef.finish(round_index)
    reef.nodes = before + newcomers


async def test_a_node_that_lacks_results_is_known_to_others_also_while_nobody_reduces() -> None:
    site = Site(2, present=0, table=TABLE, transport="direct")
    nodes = [Member(site.hub, endpoint=pb.Endpoint()) for _ in range(2)]
    orders = [await node.opened(0) for node in nodes]
    exchanges = [
        node.send(order, random_payload(index, TABLE))
        for index, (node, order) in enumerate(zip(nodes, orders, strict=True))
    ]
    for node, exchange in zip(nodes, exchanges, strict=True):
        await node.receive(exchange)
    await nodes[0].opened(1)
    late = Member(site.hub, endpoint=pb.Endpoint())
    nodes[0].drain()
    assert late.id in {peer.node for peer in nodes[0].topology.nodes} and not nodes[0].slices()


def sliced(round_index: int, nbytes: int) -> Result:
    result = Result(round_index, 1)
    slices = [pb.SliceDigest(out_start=0, out_end=nbytes, digest=b"x" * 16, reducer="node-0")]
    result.settle(
        ("node-0",), (1,), casting=0, nbytes=nbytes, digest="d", reason="", agreement={}, slices=slices
    )
    result.commit()
    return result


def test_no_more_is_promised_than_nodes_keep() -> None:
    ring = ResultRing(rounds=32, nbytes=1000)
    for index in range(10):
        ring.put(sliced(index, 300))
    assert first_kept(ring, MemoryJournal(), 10) == 7
    assert first_kept(ring, MemoryJournal(), 10, at_nodes=9) == 9
    assert first_kept(ring, MemoryJournal(), 10, at_nodes=10) == 10


async def test_numbers_of_topologies_rise_over_restarts_of_the_coordinator() -> None:
    reef = await played(2)
    run = reef.run
    run.wall = lambda: 1_800_000_000.9
    first = Mesh(run, "direct", b"k" * 32)
    assert first.number > run.mesh.number
    first.number += 100_000
    run.wall = lambda: 1_800_000_002.1
    assert Mesh(run, "direct", b"l" * 32).number > first.number
    run.mesh.number += 5 << COUNT_BITS
    reef.join("10.0.0.9:4601")
    assert reef.told(TopologyMade)[-1].number < 100, "people count from the start of the coordinator"
