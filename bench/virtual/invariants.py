"""What must hold in every run, whatever goes wrong; checked while it happens. The numbers are DESIGN's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.virtual.state import Replica
from coordinator.journal import RoundRecord, StartRecord
from optim.aggregate import Bytes, TallyFunction
from optim.bits import tally
from protos.wire import payload_digest

MOST: Final = 20  # violations that are kept of one run


@dataclass(frozen=True)
class Work:
    """What a payload was really computed on."""

    node: str
    round: int
    start: int
    count: int


@dataclass(frozen=True)
class Violation:
    """An invariant that did not hold."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


class Checker:
    """Watches a run from outside: the journal's disk, the nodes' states, and the votes that are tallied.

    Attributes:
        violations: what did not hold.
        digests: of the shared state before each round, by a replay of the journal from its start.
        deviated: nodes whose state was damaged on purpose and has not been loaded anew.
    """

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.reference = Replica()
        self.digests = {0: self.reference.digest}
        self.deviated: set[str] = set()
        self.payloads: dict[int, str] = {}  # digest of each committed result
        self._works: dict[bytes, Work] = {}  # by payload
        self._tallied: dict[bytes, tuple[Work, ...]] = {}  # by result
        self._trained: list[tuple[int, int]] = []  # first sample and end, disjoint, ascending
        self._counted: set[bytes] = set()
        self._start = 0

    def fail(self, rule: str, text: str) -> None:
        """Something did not hold."""
        if len(self.violations) < MOST:
            self.violations.append(Violation(rule, text))

    # ------------------------------------------------------------------------------------ what happens

    def computed(self, payload: bytes, work: Work) -> None:
        """A node has made a payload."""
        self._works[payload] = work

    def tally(self) -> TallyFunction:
        """The majority, which remembers whose votes made what."""

        def counting(
            votes: Sequence[Bytes],
            weights: Sequence[int] | None = None,
            *,
            casting: int,
            out: Bytes | None = None,
        ) -> Bytes:
            result = tally(votes, weights, casting=casting, out=out)
            self._note([vote.tobytes() for vote in votes], result.tobytes())
            return result

        return counting

    def _note(self, votes: Sequence[bytes], result: bytes) -> None:
        works = [self._works.get(vote) for vote in votes]
        if any(work is None for work in works):
            self.fail("6", f"{works.count(None)} of {len(votes)} votes are no node's payload")
            return
        self._tallied[result] = tuple(work for work in works if work is not None)

    def begun(self, start: StartRecord) -> None:
        """The journal begins."""
        if self.payloads:
            self.fail("4", f"the journal began anew with {len(self.payloads)} rounds in it")
        self._start = start.samples

    def committed(self, record: RoundRecord, payload: bytes) -> None:
        """A round has become durable."""
        index = record.round
        if index in self.payloads:
            self.fail("2", f"round {index} is committed a second time")
            return
        if index != self.reference.round:
            self.fail("2", f"round {index} is committed where {self.reference.round} was next")
            return
        if record.voters and record.digest != payload_digest(payload):
            self.fail("2", f"the journal's digest of round {index} is not its payload's")
        self.payloads[index] = record.digest
        self.reference.apply(payload if record.voters else None)
        self.digests[index + 1] = self.reference.digest
        self._ledger(record, payload)

    def applied(self, node: str, round_index: int, payload: bytes | None, replica: Replica) -> None:
        """A node has applied a result."""
        if round_index not in self.payloads:
            self.fail("2", f"{node} applied round {round_index}, which is not in the journal")
            return
        digest = "" if payload is None else payload_digest(payload)
        if digest != self.payloads[round_index]:
            self.fail("2", f"{node} applied another result in round {round_index} than the journal holds")
        self.holds(node, replica)

    def holds(self, node: str, replica: Replica) -> None:
        """A node has come to a state."""
        expected = self.digests.get(replica.round)
        if replica.digest == expected:
            self.deviated.discard(node)
        elif node not in self.deviated:
            self.fail("1", f"{node} holds {replica.digest} before round {replica.round}, not {expected}")

    def agreed(self, round_index: int, digest: str) -> None:
        """The coordinator holds that this is the common state after a round."""
        if digest and digest != self.digests.get(round_index + 1):
            self.fail("1", f"the digest agreed on after round {round_index} is {digest}, a deviant's")

    # ------------------------------------------------------------------------------------ the ledger

    def _ledger(self, record: RoundRecord, payload: bytes) -> None:
        leases = {node: (start, count) for node, start, count in record.trained}
        if sorted(leases) != sorted(record.voters):
            self.fail(
                "6", f"round {record.round} was trained by {sorted(leases)}, decided by {record.voters}"
            )
            return
        alone = self._works.get(payload) if len(record.voters) == 1 else None
        works = (alone,) if alone is not None else self._tallied.get(payload, ())
        if len(works) != len(record.voters):
            self.fail("6", f"nobody knows whose votes made the result of round {record.round}")
            return
        for node, work in zip(record.voters, works, strict=True):
            if work.round != record.round:
                self.fail("2", f"{node}'s vote in round {record.round} is of round {work.round}")
            if (work.start, work.count) != leases[node]:
                self.fail(
                    "6",
                    f"{node}'s vote in round {record.round} was computed on samples "
                    f"{work.start}+{work.count}, the journal says {leases[node][0]}+{leases[node][1]}",
                )
            self._train(record.round, node, work.start, work.start + work.count)
        self._nothing_lost(record)

    def _train(self, round_index: int, node: str, start: int, end: int) -> None:
        for other_start, other_end in self._trained:
            if start < other_end and other_start < end:
                both = max(start, other_start), min(end, other_end)
                self.fail(
                    "6", f"samples {both[0]} to {both[1] - 1} are trained again, by {node} in {round_index}"
                )
        self._trained.append((start, end))

    def _nothing_lost(self, record: RoundRecord) -> None:
        """After a round every index below the frontier is trained or returned, and not both."""
        self._trained = _merged(self._trained)
        spans = [*self._trained, *((start, start + count) for start, count in record.returned)]
        place = self._start
        for start, end in sorted(spans):
            if start > place:
                self.fail("6", f"samples {place} to {start - 1} are lost after round {record.round}")
            elif start < place:
                self.fail("6", f"samples {start} to {min(place, end) - 1} are trained and returned")
            place = max(place, end)
        if place != record.frontier:
            self.fail("6", f"the frontier after round {record.round} is {record.frontier}, not {place}")

    def over(self, journal: Mapping[int, Any]) -> None:
        """The run has ended: a replay of the whole journal gives what the rounds gave."""
        replica = Replica()
        for index in sorted(journal):
            kept = journal[index]
            replica.apply(kept.payload if kept.record.voters else None)
        if replica.digest != self.reference.digest:
            self.fail("4", f"a replay of the journal ends with {replica.digest}, not {self.reference.digest}")


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and merged[-1][1] == start:
            merged[-1] = merged[-1][0], end
        else:
            merged.append((start, end))
    return merged


def random_votes(draws: np.random.Generator) -> bytes:
    """A payload as a sign of noise gives it: no two are equal."""
    signs = draws.standard_normal(32 * 32) > 0
    return np.packbits(signs, bitorder="little").tobytes()
