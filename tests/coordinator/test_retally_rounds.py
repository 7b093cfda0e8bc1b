"""Rounds between nodes of which drawn lines are made a second time, as the coordinator sees them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from coordinator.events import NodeExpelled, NodeSuspected, RoundCommitted, SliceDisputed
from coordinator.inquiry import Inquiries, Reduced
from coordinator.metrics import Metrics
from coordinator.retally import Effort
from coordinator.suspicion import Thresholds
from coordinator.topology import Assigned
from optim.aggregate import casting_voter
from optim.bits import tally
from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos.buckets import LINE_BYTES, Bucket, BucketTable
from tests.coordinator.coordinator_rig import VirtualTimer, random_payload
from tests.coordinator.sliced_rig import TABLE, Member, Reef

ALWAYS = Effort(64, 10.0)  # every line, in every round
Spoil = Callable[[bytearray], None]


def invert(data: bytearray) -> None:
    for index in range(len(data)):
        data[index] ^= 0xFF


def invert_half(data: bytearray) -> None:
    half = data[: len(data) // 2]
    invert(half)
    data[: len(half)] = half


class Witness(Member):
    """A node with a contribution, which answers questions about it.

    Attributes:
        sent: its contribution.
        lie: what it does to the results of its slices.
        says: what it does to lines of its contribution when it is asked for them.
        shows: what it does to lines that it was sent, when it is asked as their reducer.
        silent: it answers no questions.
    """

    sent = b""
    lie: Spoil | None = None
    says: Spoil | None = None
    shows: Spoil | None = None
    silent = False

    def drain(self) -> None:
        """Also answer what it was asked."""
        waiting = self.outbox._messages
        while waiting and waiting[0].WhichOneof("kind") in ("topology", "reduce", "retally"):
            message = waiting.popleft()
            if message.HasField("topology"):
                self._revise(message.topology)
            elif message.HasField("reduce"):
                self.reduces = message.reduce
            else:
                self.asked.append(message.retally)

    asked: list[pb.Retally]


class Shoal(Reef):
    """Whose nodes really have contributions; what they reduce is made here."""

    nodes: list[Witness]  # type: ignore[assignment]

    def __init__(self, count: int = 4, **plan: Any) -> None:
        super().__init__(count, **{"effort": ALWAYS, "rounds": 64, **plan})
        self.run.training.inquiries.chance = random.Random(7)

    def join(self, direct: str = "", **changes: Any) -> Witness:
        node = Witness(self.hub, endpoint=pb.Endpoint(direct=direct), **changes)
        node.asked = []
        node.sent = random_payload(len(self.nodes), TABLE)
        self.nodes.append(node)
        return node

    def by(self, name: str) -> Witness:
        return next(node for node in self.nodes if node.id == name)

    def contributions(self, voters: Sequence[str]) -> list[bytes]:
        return [self.by(name).sent for name in voters]

    def result(self) -> bytes:
        """As the present reducers make it."""
        order = self.by(self.nodes[0].slices()[0].reducer).reduces
        assert order is not None
        rows = [np.frombuffer(row, np.uint8) for row in self.contributions(order.voters)]
        true = bytes(tally(rows, casting=casting_voter(order.round, len(rows))))
        made = b""
        for part in self.nodes[0].slices():
            own = bytearray(true[part.out_start : part.out_end])
            if (lie := self.by(part.reducer).lie) is not None:
                lie(own)
            made += own
        return made

    def reduced(self, voters: Sequence[str] | None = None) -> None:
        """All slices are reduced, and all nodes hold the result."""
        for node in self.nodes:
            node.drain()
        self.reduce(voters=voters)
        active = self.run.active
        if active is not None:
            for node in self.nodes:
                node.holds(active.round, len(node.slices()))

    def answer(self, node: Witness) -> None:
        """Everything that it has been asked."""
        node.drain()
        while node.asked and not node.silent:
            order = node.asked.pop(0)
            shown = pb.Shown(round=order.round, question=order.question)
            result = cut(self.result(), order.out_lines)
            if order.received:
                assert node.reduces is not None
                for row in self.contributions(node.reduces.voters):
                    lines = bytearray(cut(row, order.lines))
                    if node.shows is not None:
                        node.shows(lines)
                    shown.received.append(bytes(lines))
                shown.result = result
            else:
                lines = bytearray(cut(node.sent, order.lines))
                if node.says is not None:
                    node.says(lines)
                shown.contribution, shown.result = bytes(lines), result
            node.say(shown=shown)

    def answered(self) -> None:
        """Until nobody is asked any more."""
        for _ in range(3):
            for node in self.nodes:
                self.answer(node)

    async def played(self) -> list[pb.Commit]:
        """A round from its opening to its commit."""
        index = self.run.round
        await self.begin(index)
        self.reduced()
        self.answered()
        self.reduced()  # others may have had to reduce it again
        self.answered()
        return await self.committed(index)

    async def committed(self, index: int) -> list[pb.Commit]:
        commits = [await node.committed() for node in self.nodes]
        for node in self.nodes:
            node.report(index, f"state-{index + 1}")
        return commits

    def outcomes(self) -> dict[str, float]:
        families = Metrics(self.hub).registry.collect()
        samples = [sample for family in families for sample in family.samples]
        return {
            sample.labels["outcome"]: sample.value
            for sample in samples
            if sample.name == "atoll_retallies_total" and sample.value
        }


def cut(data: bytes, lines: Sequence[int]) -> bytes:
    return b"".join(data[LINE_BYTES * line : LINE_BYTES * (line + 1)] for line in lines)


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
