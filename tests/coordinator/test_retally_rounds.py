"""Rounds between nodes of which drawn lines are made a second time, as the coordinator sees them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from coordinator.events import RoundCommitted, SliceDisputed
from coordinator.inquiry import Inquiries, Reduced
from coordinator.retally import Effort
from coordinator.topology import Assigned
from optim.bits import tally
from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos.buckets import LINE_BYTES, Bucket, BucketTable
from tests.coordinator.coordinator_rig import VirtualTimer
from tests.coordinator.retally_rig import ALWAYS, Shoal, cut, invert
from tests.coordinator.sliced_rig import TABLE


async def test_nothing_is_announced_before_drawn_lines_have_been_made_again() -> None:
    reef = Shoal()
    await reef.begin()
    reef.reduce(made=False)
    for node in reef.nodes:
        node.drain()
        assert not node.asked, "a reducer that knew the lines could be honest only there"
    reef.reduced()
    for node in reef.nodes:
        node.drain()
        (order,) = node.asked
        assert len(order.lines) == len(order.out_lines) == 64 and not order.received
    assert not reef.told(RoundCommitted) and reef.run.active is not None
    assert "the voters show lines" in reef.run.active.waiting()
    for node in reef.nodes[:3]:
        reef.answer(node)
    assert not reef.told(RoundCommitted)
    reef.answer(reef.nodes[3])
    assert len(reef.told(RoundCommitted)) == 1 and reef.outcomes() == {"clear": 1}
    assert list((await reef.committed(0))[0].voters) == [node.id for node in reef.nodes]
    assert not reef.told(SliceDisputed) and not reef.run.scrutiny.barred()


async def test_few_lines_are_drawn_anew_for_each_round() -> None:
    reef = Shoal(effort=Effort(8, 10.0))
    drawn = []
    for _ in range(3):
        await reef.begin(reef.run.round)
        reef.reduced()
        reef.nodes[0].drain()
        drawn.append(tuple(reef.nodes[0].asked[0].out_lines))
        reef.answered()
        await reef.committed(reef.run.round - 1)
    assert len(set(drawn)) == 3 and all(len(lines) == 8 for lines in drawn)
    assert all(place * 8 <= line < place * 8 + 8 for lines in drawn for place, line in enumerate(lines))


async def test_a_round_that_is_not_drawn_waits_for_nobody() -> None:
    reef = Shoal(effort=Effort(64, 0.004))  # once in 512 rounds of so small a model
    await reef.begin()
    reef.reduced()
    assert len(reef.told(RoundCommitted)) == 1 and not reef.nodes[0].asked and not reef.outcomes()


async def test_trouble_waits_until_a_question_is_answered() -> None:
    reef = Shoal()
    await reef.begin()
    for node in reef.nodes:
        node.drain()
    reef.reduce()  # nobody holds the whole yet
    topology = reef.nodes[3].topology.number
    trouble = pb.SliceTrouble(round=0, topology=topology, slice=1, reason="nothing comes from it")
    reef.nodes[3].say(slice_trouble=trouble)
    assert reef.run.mesh.number == topology
    reef.answered()
    for node in reef.nodes:
        node.drain()
    assert not reef.told(RoundCommitted) and not reef.told(SliceDisputed)
    assert "node-1" not in [part.reducer for part in reef.nodes[0].slices()]


async def test_who_does_not_answer_holds_up_one_round() -> None:
    reef = Shoal()
    mute = reef.nodes[3]
    mute.silent = True
    await reef.begin()
    reef.reduced()
    reef.answered()
    reef.idle(4.0)
    assert not reef.told(RoundCommitted)
    reef.idle(2.0)
    assert len(reef.told(RoundCommitted)) == 1
    await reef.committed(0)
    await reef.played()
    assert len(reef.told(RoundCommitted)) == 2, "nobody waits for it now"
    unanswered = reef.run.training.inquiries.unanswered
    assert unanswered == {"node-3": 1} and reef.outcomes() == {"clear": 2}
    await reef.begin(2)
    mute.silent = False
    mute.asked.clear()
    reef.reduced()
    reef.answer(mute)
    reef.answered()
    await reef.committed(2)
    mute.silent = True
    await reef.begin(3)
    reef.reduced()
    reef.answered()
    assert len(reef.told(RoundCommitted)) == 3, "it is waited for again"
    reef.idle(6.0)
    assert unanswered == {"node-3": 2}


@pytest.mark.parametrize(("reduction", "wait"), [(0.0, 5.0), (20.0, 20.0), (100.0, 30.0)])
async def test_answers_take_as_long_as_the_reduction_not_the_computation(
    reduction: float, wait: float
) -> None:
    reef = Shoal()
    reef.nodes[3].silent = True
    await reef.begin()
    reef.idle(60.0)
    reef.reduce(made=False)
    reef.idle(reduction)
    reef.reduced()
    reef.answered()
    reef.idle(wait - 1.0)
    assert not reef.told(RoundCommitted)
    reef.idle(2.0)
    assert len(reef.told(RoundCommitted)) == 1


async def test_a_second_attempt_is_waited_for_no_longer_than_the_first() -> None:
    reef = Shoal()
    reef.nodes[0].lie = invert
    reef.nodes[3].silent = True
    await reef.begin()
    reef.reduce(made=False)
    reef.idle(20.0)
    reef.reduced()
    reef.answered()
    reef.idle(19.5)
    assert not reef.told(SliceDisputed)
    reef.idle(1.0)
    reef.answered()
    assert [event.node for event in reef.told(SliceDisputed)] == ["node-0"]
    reef.run.training.inquiries.forget_all_but(())  # so that it is waited for again
    reef.reduced()
    reef.answered()
    assert not reef.told(RoundCommitted)
    reef.idle(5.5)
    assert len(reef.told(RoundCommitted)) == 1


def test_who_misses_often_is_waited_for_less_and_less() -> None:
    inquiries = Inquiries(ALWAYS, random.Random(1), tally)
    for misses in (1, 2, 3):
        inquiries.missed(["node-0"])
        for _ in range(misses):
            assert not inquiries.waits_for("node-0") and inquiries.waits_for("node-1")
            inquiries.heard("node-0")
            inquiries.heard("node-1")
        assert inquiries.waits_for("node-0")
    inquiries.missed(["node-0", "node-1"])
    inquiries.forget_all_but(["node-1"])
    assert inquiries.unanswered == {"node-1": 1} and inquiries.waits_for("node-0")


def test_a_restarted_coordinator_repeats_no_question() -> None:
    before, after = (Inquiries(ALWAYS, random.Random(seed), tally) for seed in range(2))
    numbers = [one.number() for one in (before, before, after, after)]
    assert len(set(numbers)) == 4 and max(numbers) < 1 << 49


async def test_an_alarm_that_rings_early_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reef = Shoal()
    reef.nodes[3].silent = True
    call_at, now = reef.timer.call_at, reef.timer.now
    early = 1e-4  # of the delay: half a millisecond of 5 s
    monkeypatch.setattr(
        reef.timer, "call_at", lambda when, callback: call_at(when - early * (when - now()), callback)
    )
    await reef.begin()
    reef.reduced()
    reef.answered()
    reef.idle(4.9)
    assert not reef.told(RoundCommitted)
    reef.timer.advance(1.0)
    assert len(reef.told(RoundCommitted)) == 1


async def test_forged_answers_change_nothing() -> None:
    reef = Shoal()
    await reef.begin()
    reef.reduced()
    for node in reef.nodes:
        node.drain()
    liar, order = reef.nodes[0], reef.nodes[0].asked[0]
    whole: dict[str, Any] = {
        "round": 0,
        "question": order.question,
        "contribution": b"x" * 64 * 64,
        "result": b"y" * 64 * 64,
    }
    for changes in (
        {"question": order.question + 1},
        {"contribution": b"x" * 63 * 64},
        {"result": b"y"},
        {"contribution": b"", "result": b""},
        {"received": [b"x" * 64]},
        {"round": 1},
    ):
        liar.say(shown=pb.Shown(**{**whole, **changes}))
    stranger = reef.join("")
    stranger.say(shown=pb.Shown(**whole))
    reef.nodes.pop()
    for node in reef.nodes:
        reef.answer(node)
        node.say(shown=pb.Shown(**whole))  # again, and otherwise, or too late
    assert len(reef.told(RoundCommitted)) == 1 and not reef.told(SliceDisputed)
    assert reef.outcomes() == {"clear": 1}


async def test_an_answer_may_come_in_two_parts() -> None:
    reef = Shoal()
    await reef.begin()
    for node in reef.nodes:
        node.drain()
    reef.reduce()
    for node in reef.nodes:
        node.drain()
        (order,) = node.asked
        node.say(shown=pb.Shown(question=order.question, contribution=cut(node.sent, order.lines)))
    assert not reef.told(RoundCommitted)
    for node in reef.nodes[:3]:  # more than half of them hold it
        (order,) = node.asked
        node.say(shown=pb.Shown(question=order.question, result=cut(reef.result(), order.out_lines)))
        node.holds(0, len(node.slices()))
    assert len(reef.told(RoundCommitted)) == 1 and reef.outcomes() == {"clear": 1}


async def test_what_it_costs() -> None:
    """Counted as it is sent: 64 bytes for each line of a contribution and as many of the result."""
    reef = Shoal(effort=Effort(8, 10.0))
    sent: list[int] = []
    hear = reef.hub.message

    def listen(node: Any, data: bytes) -> None:
        if pb.NodeMessage.FromString(data).HasField("shown"):
            sent.append(len(data))
        hear(node, data)

    reef.hub.message = listen  # type: ignore[method-assign]
    await reef.played()
    assert len(sent) == len(reef.nodes) and max(sent) <= 8 * 2 * 64 + 24


async def test_a_voter_that_was_cut_off_meanwhile_proves_nothing() -> None:
    """It may have computed its contribution anew, and the reducer has the first one."""
    inquiries = Inquiries(Effort(8, 10.0), random.Random(1), tally)
    voters = ["node-0", "node-1", "node-2"]
    whole = Assigned(Slice(0, TABLE.nbytes, 0, TABLE.result_nbytes), "node-0")
    reduced = Reduced(0, TABLE, b"d" * 16, [whole], voters, [1] * 3, [1] * 3, ("node-1",), 1.0)
    orders: dict[str, pb.CoordinatorMessage] = {}
    inquiry = inquiries.about(reduced, orders.__setitem__, VirtualTimer(), lambda: None)
    assert inquiry is not None
    inquiry.begin()
    asked = list(orders)
    assert asked == ["node-0", "node-2"]
    question = orders["node-0"].retally.question
    lines, other = bytes(8 * LINE_BYTES), b"\xff" * 8 * LINE_BYTES
    assert not inquiry.take("node-1", pb.Shown(question=question, contribution=other, result=other))
    for node in asked:
        assert inquiry.look(voters) is None
        assert inquiry.take(node, pb.Shown(question=question, contribution=lines, result=lines))
    assert inquiry.look(voters) == [] and inquiries.outcomes == {"clear": 1}
    assert not inquiries.unanswered


@pytest.mark.parametrize("elements", [124_000_000, 4_000_000, 100_000])
async def test_its_bytes_are_a_small_part_of_a_round(elements: int) -> None:
    share = 0.0002
    table = BucketTable((Bucket.of("w", "majority", [("w", (elements,))]),))
    inquiries = Inquiries(Effort(), random.Random(1), tally)
    voters = [f"node-{index}" for index in range(8)]
    whole = Assigned(Slice(0, table.nbytes, 0, table.result_nbytes), "node-0")
    ones = [1] * 8
    reduced = Reduced(0, table, b"d" * 16, [whole], voters, ones, ones, (), 1.0)
    asked: list[pb.CoordinatorMessage] = []
    inquiry = inquiries.about(reduced, lambda node, order: asked.append(order), VirtualTimer(), lambda: None)
    assert inquiry is not None
    inquiry.begin()
    assert len(asked) == len(voters)
    order = asked[0].retally
    lines = bytes(LINE_BYTES * len(order.lines))
    answers = [
        pb.NodeMessage(shown=pb.Shown(question=order.question, contribution=lines)),
        pb.NodeMessage(shown=pb.Shown(question=order.question, result=lines)),
    ]
    up, down = sum(answer.ByteSize() for answer in answers), asked[0].ByteSize()
    chance = Effort().chance(len(order.lines), table.nbytes)
    assert 0.5 * share < chance * up / table.nbytes <= share
    assert down < up / 8
