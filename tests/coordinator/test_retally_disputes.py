"""Drawn lines are made a second time and a node has lied: who is named, and reduces no more."""

from __future__ import annotations

import pytest

from coordinator.events import NodeExpelled, NodeSuspected, RoundCommitted, SliceDisputed
from coordinator.suspicion import Thresholds
from protos import atoll_pb2 as pb
from tests.coordinator.retally_rig import Shoal, invert, invert_half


@pytest.mark.parametrize("expel", [0.0, 1.2])
async def test_a_reducer_that_lies_is_named_and_reduces_no_more(expel: float) -> None:
    reef = Shoal(thresholds=Thresholds(expel=expel))
    liar = reef.nodes[1]
    liar.lie = invert
    await reef.begin()
    reef.reduced()
    reef.answered()
    (found,) = reef.told(SliceDisputed)
    assert (found.node, found.outcome, found.against) == (liar.id, "lied", ())
    assert not reef.told(RoundCommitted), "the round goes on without what it has made"
    for node in reef.nodes:
        node.drain()
        assert liar.id not in [part.reducer for part in node.slices()]
    reef.reduced()
    reef.answered()
    (committed,) = reef.told(RoundCommitted)
    assert liar.id in committed.voters and reef.outcomes() == {"lied": 1, "clear": 1}
    (suspected,) = reef.told(NodeSuspected)
    assert (suspected.node, suspected.cause, suspected.score) == (liar.id, "lies", 2.0)
    assert suspected.action == ("expel" if expel else "warn")
    assert [event.node for event in reef.told(NodeExpelled)] == ([liar.id] if expel else [])
    if expel:
        return
    await reef.committed(0)
    for _ in range(10):  # longer than one that has failed is spared
        commits = await reef.played()
        assert liar.id not in [part.reducer for part in commits[0].slices]
    assert len(reef.told(SliceDisputed)) == 1


async def test_votes_that_a_reducer_makes_up_are_contradicted_by_those_who_cast_them() -> None:
    reef = Shoal()
    liar = reef.nodes[2]
    liar.lie = liar.shows = invert  # consistent in itself
    await reef.played()
    (found,) = reef.told(SliceDisputed)
    assert found.outcome == "disputed" and set(found.against) == {"node-0", "node-1", "node-3"}
    (suspected,) = reef.told(NodeSuspected)
    assert (suspected.node, suspected.cause) == ("node-2", "lies")
    assert "node-0, node-1, node-3 contradict it" in suspected.reason


async def test_a_reducer_that_does_not_show_what_it_was_sent_loses_the_slice() -> None:
    reef = Shoal()
    liar = reef.nodes[0]
    liar.lie = invert
    await reef.begin()
    reef.reduced()
    for node in reef.nodes:
        reef.answer(node)
    liar.silent = True
    reef.answered()
    assert reef.run.active is not None and "node-0 shows lines" in reef.run.active.waiting()
    assert not reef.told(SliceDisputed)
    reef.idle(6.0)
    (found,) = reef.told(SliceDisputed)
    assert (found.node, found.outcome) == ("node-0", "evaded")
    liar.silent = False
    liar.asked.clear()
    reef.reduced()
    reef.answered()
    assert len(reef.told(RoundCommitted)) == 1 and not reef.told(NodeSuspected)
    assert reef.run.scrutiny.barred().keys() == {"node-0"}


async def test_who_takes_back_what_it_made_once_it_was_asked_loses_the_slice() -> None:
    for fields in ({"digest": b"x" * 16}, {"failed": "out of memory"}):
        reef = Shoal()
        await reef.begin()
        reef.reduced()
        reef.nodes[1].news(1, [node.id for node in reef.nodes], made=True, **fields)
        (found,) = reef.told(SliceDisputed)
        assert (found.node, found.outcome) == ("node-1", "evaded") and "took back" in found.reason
        for node in reef.nodes:
            node.drain()
            node.asked.clear()  # about what is void
        reef.reduced()
        reef.answered()
        assert len(reef.told(RoundCommitted)) == 1


async def test_what_the_last_reducer_took_back_is_not_announced() -> None:
    reef = Shoal(2)
    await reef.played()
    reef.nodes[1].says = invert_half  # of what the other one reduces, which therefore does so no more
    await reef.begin(1)
    reef.reduced()
    reef.answered()
    reef.nodes[1].says = None
    reef.reduced()
    names = [node.id for node in reef.nodes]
    reef.nodes[1].news(0, names, made=True, digest=b"x" * 16)
    assert reef.told(SliceDisputed)[-1].outcome == "evaded"
    assert reef.run.scrutiny.barred().keys() == set(names)
    reef.answered()
    reef.nodes[1].holds(1, 2)
    assert len(reef.told(RoundCommitted)) == 1, "nobody holds what it makes now"
    reef.reduced()
    reef.answered()
    commits = await reef.committed(1)
    assert [bytes(part.digest) for part in commits[0].slices] == [b"\1" * 16, b"\2" * 16]


async def test_friends_of_a_liar_cannot_have_other_lines_drawn() -> None:
    reef = Shoal()
    reef.nodes[0].lie = invert
    await reef.begin()
    reef.reduced()
    topology = reef.nodes[3].topology.number
    trouble = pb.SliceTrouble(round=0, topology=topology, slice=1, reason="it is slow")
    reef.nodes[3].say(slice_trouble=trouble)
    assert reef.run.mesh.number == topology, "the slice moves once the question is answered, not before"
    reef.answered()
    assert [event.node for event in reef.told(SliceDisputed)] == ["node-0"]
    assert reef.run.mesh.number > topology


async def test_a_voter_that_denies_its_votes_accuses_nobody() -> None:
    reef = Shoal(5)
    reef.nodes[4].says = invert
    await reef.played()
    assert {event.node for event in reef.told(SliceDisputed)} >= {"node-0", "node-1", "node-2", "node-3"}
    assert [event.node for event in reef.told(NodeSuspected)] == ["node-4"]
    assert reef.run.scrutiny.barred().keys() == {"node-4"}, "all reducers go on but that one"
    before = len(reef.told(SliceDisputed))
    await reef.played()
    assert len(reef.told(SliceDisputed)) == before, "nobody listens to it any more"


async def test_of_two_nodes_in_dispute_neither_reduces() -> None:
    reef = Shoal(2)
    left, right = reef.nodes
    await reef.played()
    right.says = invert_half  # of the slice that the other one reduces; its own vote decides ties now
    await reef.begin(1)
    reef.reduced()
    reef.answered()
    right.says = None
    assert reef.run.scrutiny.barred().keys() == {"node-0"}
    reef.reduced()
    reef.answered()
    commits = await reef.committed(1)
    assert [part.reducer for part in commits[0].slices] == ["node-1", "node-1"]
    left.says = invert
    await reef.played()
    assert reef.run.scrutiny.barred().keys() == {"node-0", "node-1"} and not reef.told(NodeSuspected)
    orders = [await node.opened(3) for node in reef.nodes]
    assert [order.topology for order in orders] == [0, 0], "the coordinator reduces then"


async def test_a_voter_that_dies_as_it_is_asked_is_not_waited_for() -> None:
    reef = Shoal()
    reef.nodes[0].lie = invert
    await reef.begin()
    reef.reduced()
    gone = reef.nodes.pop()
    assert gone.id == "node-3"
    gone.die()  # and a slice with it: the others make that anew
    for node in reef.nodes:
        node.drain()
        node.asked.clear()
    reef.reduced([node.id for node in reef.nodes])
    reef.answered()
    assert [event.node for event in reef.told(SliceDisputed)] == ["node-0"]


async def test_a_lie_is_seen_though_a_voter_is_gone() -> None:
    reef = Shoal(5)
    reef.join("")  # that nobody can call: it reduces nothing
    for node in reef.nodes:
        node.sent = reef.nodes[0].sent
    reef.nodes[0].lie = invert
    await reef.opened(reef.nodes[:5])
    reef.nodes.pop().die()
    reef.reduced()
    reef.nodes[4].silent = True
    reef.answered()
    reef.idle(6.0)
    reef.answered()
    assert [event.outcome for event in reef.told(SliceDisputed)] == ["lied"]
