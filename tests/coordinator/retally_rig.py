"""Nodes that answer when they are asked for drawn lines, honestly or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordinator.metrics import Metrics
from coordinator.retally import Effort
from optim.aggregate import casting_voter
from optim.bits import tally
from protos import atoll_pb2 as pb
from protos.buckets import LINE_BYTES
from tests.coordinator.contribution_rig import random_payload
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
