"""Whether a node that reduced a slice has told the truth about it, and who is not to be believed. Pure.

Lines of the result are drawn once the digests of all slices are there, each voter shows what it has sent and
received of them, and the majority or mean is made a second time. Where that differs, the reducer shows what
*it* says it was sent. One of two nodes that contradict each other lies; which of the two is certain only once
more than half of all others contradict it, as fewer than half lie.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, get_args

import numpy as np

from coordinator.rounds import listed
from optim.aggregate import Bytes
from protos.buckets import LINE_BYTES

if TYPE_CHECKING:
    from protos.byzantine_section import ByzantineConfig

Outcome = Literal["clear", "unknown", "disputed", "evaded", "lied"]

OUTCOMES: Final[tuple[Outcome, ...]] = get_args(Outcome)
MAX_VOTERS: Final = 512  # of a round of which lines are asked for: a reducer shows them in one message
_OVERHEAD: Final = 128  # bytes, about, of a question and an answer beside the lines

# What a second reduction of some of the lines gives, and which bits of it are certain; see optim.recount
Recount = Callable[[Sequence[int], Sequence["Bytes | None"]], "tuple[Bytes, Bytes]"]


class Chance(Protocol):
    """What is drawn by lot: a ``random.SystemRandom``, so that nobody can know it before."""

    def random(self) -> float:
        """From 0 to 1, without 1."""
        ...

    def randrange(self, start: int, stop: int) -> int:
        """A whole number from ``start`` to ``stop - 1``."""
        ...


@dataclass(frozen=True)
class Effort:
    """How much is made a second time.

    Attributes:
        lines: of the result, in a round; 0: none.
        cost: the share of a contribution's bytes that a voter sends for it at most, in the mean of many
            rounds: with small models only some of the rounds are looked at.
    """

    lines: int = 64
    cost: float = 0.0002

    @classmethod
    def of(cls, config: ByzantineConfig) -> Effort:
        """That of a run file."""
        return cls(config.retally, config.retally_cost)

    def chance(self, lines: int, nbytes: int) -> float:
        """With which probability a round is looked at whose contributions have ``nbytes``, if that needs
        ``lines``."""
        return min(1.0, self.cost * nbytes / (2 * LINE_BYTES * lines + _OVERHEAD)) if lines else 0.0


EFFORT: Final = Effort()


def draw(count: int, lines: int, chance: Chance) -> tuple[int, ...]:
    """``lines`` of the numbers from 0 to ``count - 1``, ascending, one out of each of as many equal parts;
    all of them if there are not more."""
    if count <= lines:
        return tuple(range(count))
    return tuple(
        chance.randrange(count * part // lines, count * (part + 1) // lines) for part in range(lines)
    )


@dataclass(frozen=True)
class Statement:
    """What a voter says: uint8[lines, 64] of its contribution and of the result as it came to it; ``None``:
    nothing."""

    row: Bytes | None = None
    result: Bytes | None = None


@dataclass(frozen=True)
class Shown:
    """What a reducer says: uint8[lines, 64] of each voter's contribution, in slot order, and of a result."""

    rows: Sequence[Bytes]
    result: Bytes


@dataclass(frozen=True)
class Verdict:
    """On a reducer.

    Attributes:
        outcome: ``"clear"``; ``"unknown"``: nobody has told enough; ``"disputed"``: it contradicts the nodes
            ``against``; ``"evaded"``: it did not show what it had been sent; ``"lied"``: it contradicts
            itself.
        reason: in words.
        against: whom it contradicts.
    """

    outcome: Outcome
    reason: str
    against: tuple[str, ...] = ()


def differing(
    places: Sequence[int], voters: Sequence[str], statements: Mapping[str, Statement], recount: Recount
) -> list[int] | None:
    """At which ``places`` of the drawn lines somebody has received another result than the voters'
    contributions give, as far as they say so; ``None``: nobody has told enough to know."""
    said = [statements.get(voter, Statement()) for voter in voters]
    chosen = list(places)
    made, certain = recount(places, [None if one.row is None else one.row[chosen] for one in said])
    received = [one.result[chosen] for one in said if one.result is not None]
    if not received or not certain.any():
        return None
    wrong = np.bitwise_or.reduce([(result ^ made) & certain for result in received])
    return [place for place, line in zip(chosen, wrong, strict=True) if line.any()]


def judge(
    reducer: str,
    places: Sequence[int],
    voters: Sequence[str],
    statements: Mapping[str, Statement],
    shown: Shown | None,
    recount: Recount,
) -> Verdict:
    """The verdict on a reducer whose slice is :func:`differing` at ``places``, once it has ``shown`` them
    (``None``: it has not, in time)."""
    where = f"{len(places)} of the lines that were drawn"
    if shown is None:
        reason = f"{where} are not what the voters' contributions give, and it does not show what it was sent"
        return Verdict("evaded", reason)
    made, _ = recount(places, shown.rows)
    if not np.array_equal(made, shown.result):
        reason = (
            f"what it says that it was sent gives another result in {where} than it says that it has made"
        )
        return Verdict("lied", reason)
    said = [statements.get(voter, Statement()) for voter in voters]
    against = [
        voter
        for voter, one, row in zip(voters, said, shown.rows, strict=True)
        if voter != reducer
        and not (_agree(one.row, row, places) and _agree(one.result, shown.result, places))
    ]
    if not against:
        return Verdict("lied", f"of {where} it says one thing as a voter and another as their reducer")
    reason = f"of {where} it and {listed(against)} say different things about what the one sent to the other"
    return Verdict("disputed", reason, tuple(against))


def _agree(lines: Bytes | None, shown: Bytes, places: Sequence[int]) -> bool:
    return lines is None or np.array_equal(lines[list(places)], shown)


@dataclass
class Disputes:
    """Who contradicts whom in a run, and what follows from that.

    Attributes:
        liars: nodes that have lied for certain, with the reason in words.
    """

    liars: dict[str, str] = field(default_factory=dict)
    _evaders: dict[str, str] = field(default_factory=dict)
    _pairs: dict[tuple[str, str], str] = field(default_factory=dict)  # reducer and voter: the reason

    def add(self, reducer: str, verdict: Verdict, members: Collection[str]) -> dict[str, str]:
        """A verdict on a ``reducer`` that is not clear; who has lied for certain by that, with the reason.

        A node has lied if it contradicts itself, or more than half of all others and at least two of them.
        """
        before = set(self.liars)
        if verdict.outcome == "lied":
            self.liars.setdefault(reducer, verdict.reason)
        elif verdict.outcome == "evaded":
            self._evaders.setdefault(reducer, verdict.reason)
        for voter in verdict.against:
            self._pairs.setdefault((reducer, voter), verdict.reason)
        for node in members:
            others = {other for pair in self._pairs if node in pair for other in pair} & set(members) - {node}
            if len(others) >= 2 and 2 * len(others) > len(members) - 1:
                what = "what it has sent and received, or been sent and made"
                self.liars.setdefault(node, f"{listed(sorted(others))} contradict it about {what}")
        return {node: reason for node, reason in self.liars.items() if node not in before}

    def barred(self) -> dict[str, str]:
        """Who shall not reduce, and why: whoever has lied, or evaded the question, and reducers that are in
        dispute with a voter that has not lied for certain."""
        disputed = {
            reducer: reason for (reducer, voter), reason in self._pairs.items() if voter not in self.liars
        }
        return {**disputed, **self._evaders, **self.liars}

    def forget_all_but(self, nodes: Collection[str]) -> None:
        """The others will not come back."""
        self.liars = {node: reason for node, reason in self.liars.items() if node in nodes}
        self._evaders = {node: reason for node, reason in self._evaders.items() if node in nodes}
        self._pairs = {pair: reason for pair, reason in self._pairs.items() if set(pair) <= set(nodes)}
