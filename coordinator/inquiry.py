"""Questions about a round that is reduced and not announced yet: drawn lines are made a second time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from coordinator.retally import (
    MAX_VOTERS,
    Chance,
    Effort,
    Outcome,
    Shown,
    Statement,
    Verdict,
    differing,
    draw,
    judge,
)
from coordinator.timer import Alarm, Timer
from coordinator.topology import Assigned
from optim.aggregate import Bytes, TallyFunction
from optim.recount import Line, Recountable, Terms, recount
from protos import atoll_pb2 as pb
from protos.atoll_pb2 import CoordinatorMessage, Retally
from protos.buckets import LINE_BYTES, BucketTable
from protos.waits import answer_patience

MAX_ALARM_DELAY: Final = 1.0  # seconds; more means that the process was stopped or starved
SHOWN_BYTES: Final = 48 << 10  # of what a reducer shows at most


@dataclass(frozen=True)
class Finding:
    """A verdict on a reducer that is not clear."""

    reducer: str
    verdict: Verdict


@dataclass(frozen=True)
class Reduced:
    """A round whose slices all have digests.

    Attributes:
        digest: of all slices, see :func:`protos.digests.slices_digest`.
        assigned: the slices.
        voters: whose contributions are in the result, in slot order.
        weights, mean_weights: of them.
        unsure: who are not asked, as what they would say proves nothing: they have lied before, or may have
            computed their contribution anew since it arrived.
        took: seconds from when the last contribution was there until now.
    """

    round: int
    table: BucketTable
    digest: bytes
    assigned: Sequence[Assigned]
    voters: Sequence[str]
    weights: Sequence[int]
    mean_weights: Sequence[int]
    unsure: Collection[str]
    took: float


class Inquiries:
    """Those of a run.

    Attributes:
        effort: how much is made a second time.
        chance: what is drawn by lot.
        outcomes: how often each was come to.
        unanswered: how often each node did not say in time what it had sent.
        distrusted: nodes that are not asked: they have lied for certain.
    """

    def __init__(self, effort: Effort, chance: Chance, tally: TallyFunction) -> None:
        self.effort, self.chance = effort, chance
        self.outcomes: Counter[Outcome] = Counter()
        self.unanswered: Counter[str] = Counter()
        self.distrusted: frozenset[str] = frozenset()
        self._tally = tally
        self._recountable: dict[str, Recountable] = {}
        self._owed: Counter[str] = Counter()  # answers until a node is waited for again
        self._number = chance.randrange(0, 1 << 48)  # not those of a coordinator before

    def drawn(self, table: BucketTable) -> bool:
        """Draw whether a round with ``table`` is looked at."""
        lines = min(self.effort.lines, self._lines_of(table).count)
        return bool(lines) and self.chance.random() < self.effort.chance(lines, table.nbytes)

    def number(self) -> int:
        """Of the next question."""
        self._number += 1
        return self._number

    def about(
        self,
        reduced: Reduced,
        ask: Callable[[str, CoordinatorMessage], None],
        timer: Timer,
        changed: Callable[[], None],
    ) -> Inquiry | None:
        """Draw lines to ask for; ``None``: there is nobody, or too many, to ask."""
        if not 0 < len(reduced.voters) <= MAX_VOTERS:
            return None
        found = self._lines_of(reduced.table)
        lines = [found.line(number) for number in draw(found.count, self.effort.lines, self.chance)]
        terms = Terms(reduced.round, reduced.table.rule, self._tally, reduced.weights, reduced.mean_weights)
        return Inquiry(self, reduced, lines, terms, ask, timer, changed)

    def waits_for(self, node: str) -> bool:
        """Whether an answer of a node is worth waiting for."""
        return node not in self._owed

    def heard(self, node: str) -> None:
        """It has answered a question."""
        self._owed[node] -= 1
        self._owed = +self._owed

    def missed(self, nodes: Collection[str]) -> None:
        """They have not, in time: none is waited for until it has answered as often as it ever missed."""
        self.unanswered.update(nodes)
        self._owed.update({node: self.unanswered[node] for node in nodes})

    def forget_all_but(self, nodes: Collection[str]) -> None:
        """The others will not come back."""
        for counts in (self.unanswered, self._owed):
            for node in counts.keys() - set(nodes):
                del counts[node]

    def _lines_of(self, table: BucketTable) -> Recountable:
        if table.digest not in self._recountable:
            self._recountable[table.digest] = Recountable(table)
        return self._recountable[table.digest]


class Inquiry:
    """About one attempt at a round, from the question to all voters until :meth:`look` has an answer.

    Args:
        inquiries: of the run.
        reduced: the round.
        lines: that were drawn.
        terms: how the round is reduced.
        ask: gives a node an order.
        timer: its clock.
        changed: called when :meth:`look` may say something else, as a deadline has passed.
    """

    def __init__(
        self,
        inquiries: Inquiries,
        reduced: Reduced,
        lines: Sequence[Line],
        terms: Terms,
        ask: Callable[[str, CoordinatorMessage], None],
        timer: Timer,
        changed: Callable[[], None],
    ) -> None:
        self.digest = reduced.digest
        self._inquiries, self._reduced, self._lines, self._terms = inquiries, reduced, lines, terms
        self._ask, self._timer, self._changed = ask, timer, changed
        self._statements: dict[str, Statement] = {}
        self._wrong: dict[str, list[int]] | None = None  # by reducer; None: the voters are still asked
        self._unknown = False
        self._shown: dict[str, Shown] = {}
        self._findings: list[Finding] | None = None
        self._alarm: Alarm | None = None
        self._due = 0.0
        self._question = 0

    def begin(self) -> None:
        """Ask all voters."""
        self._question = self._inquiries.number()
        asked = [voter for voter in self._reduced.voters if voter not in self._reduced.unsure]
        self._put(asked, range(len(self._lines)), received=False)

    @property
    def waiting(self) -> str:
        """What for, in words; empty: for nothing any more."""
        if self._findings is not None:
            return ""
        if self._wrong is None:
            return "the voters show lines of what they have sent and received"
        return f"{', '.join(self._wrong)} shows lines of what it was sent"

    def take(self, node: str, answer: pb.Shown) -> bool:
        """A node answers; whether that fits a question that it was asked, and says something new."""
        question = self._reduced.round, self._question
        if (answer.round, answer.question) != question or self._findings is not None:
            return False
        if self._wrong is None:
            return self._state(node, answer)
        places = self._wrong.get(node)
        rows = [_lines(row, len(places or ())) for row in answer.received]
        result = _lines(answer.result, len(places or ()))
        if places is None or node in self._shown or len(rows) != len(self._reduced.voters) or result is None:
            return False
        known = [row for row in rows if row is not None]
        if len(known) != len(rows):
            return False
        self._shown[node] = Shown(known, result)
        return True

    def _state(self, node: str, answer: pb.Shown) -> bool:
        row, result = (_lines(part, len(self._lines)) for part in (answer.contribution, answer.result))
        before = self._statements.get(node, Statement())
        if node not in self._reduced.voters or node in self._reduced.unsure or answer.received:
            return False
        if (row is None) == bool(answer.contribution) or (result is None) == bool(answer.result):
            return False
        if (row is None or before.row is not None) and (result is None or before.result is not None):
            return False  # nothing, or what it has said before
        self._statements[node] = Statement(
            row if before.row is None else before.row, result if before.result is None else before.result
        )
        if before.row is None and row is not None:
            self._inquiries.heard(node)
        return True

    def look(self, awaited: Collection[str]) -> list[Finding] | None:
        """What there is to say about the reducers: nothing, if all is clear; ``None``: not yet.

        Args:
            awaited: members that can answer. The contributions of all of them are waited for, and what more
                than half of them have received.
        """
        if self._findings is not None:
            return self._findings
        now = self._timer.now()
        if self._wrong is None:
            asked = [
                voter
                for voter in self._reduced.voters
                if voter in awaited and voter not in self._reduced.unsure and self._inquiries.waits_for(voter)
            ]
            said = [self._statements.get(voter, Statement()) for voter in asked]
            late = [voter for voter, one in zip(asked, said, strict=True) if one.row is None]
            held = sum(one.result is not None for one in said)
            if now < self._due and (late or 2 * held <= len(asked) > 0):
                return None
            self._inquiries.missed(late)
            self._wrong = self._compare()
            self._question = self._inquiries.number()
            for reducer, places in self._wrong.items():
                self._put([reducer], places, received=True)
        if now < self._due and self._wrong.keys() - self._shown.keys():
            return None
        self.cancel()
        self._findings = [
            Finding(
                reducer,
                judge(
                    reducer,
                    places,
                    self._reduced.voters,
                    self._statements,
                    self._shown.get(reducer),
                    self._recount,
                ),
            )
            for reducer, places in self._wrong.items()
        ]
        for finding in self._findings:
            self._inquiries.outcomes[finding.verdict.outcome] += 1
        if not self._findings:
            self._inquiries.outcomes["unknown" if self._unknown else "clear"] += 1
        return self._findings

    def cancel(self) -> None:
        """It is of no use any more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _compare(self) -> dict[str, list[int]]:
        """Make the lines of each reducer a second time: which differ."""
        found: dict[str, list[int]] = {}
        most = max(1, SHOWN_BYTES // (LINE_BYTES * (len(self._reduced.voters) + 1)))
        for reducer in dict.fromkeys(one.reducer for one in self._reduced.assigned):
            own = [one.slice for one in self._reduced.assigned if one.reducer == reducer]
            places = [
                place
                for place, line in enumerate(self._lines)
                if any(part.out_start <= line.out_start < part.out_end for part in own)
            ]
            if not places:
                continue
            wrong = differing(places, self._reduced.voters, self._statements, self._recount)
            self._unknown |= wrong is None
            if wrong:
                found[reducer] = wrong[:most]
        return found

    def _recount(self, places: Sequence[int], rows: Sequence[Bytes | None]) -> tuple[Bytes, Bytes]:
        return recount(self._terms, [self._lines[place] for place in places], rows)

    def _put(self, nodes: Sequence[str], places: Sequence[int], *, received: bool) -> None:
        """Ask ``nodes`` for lines, and wait for them as long as the reduction has taken, but 5 s at least and
        30 s at most."""
        lines = [self._lines[place] for place in places]
        order = Retally(
            round=self._reduced.round,
            question=self._question,
            digest=self.digest,
            lines=[line.start // LINE_BYTES for line in lines],
            out_lines=[line.out_start // LINE_BYTES for line in lines],
            received=received,
        )
        self._wake_at(self._timer.now() + answer_patience(self._reduced.took))
        for node in nodes:
            self._ask(node, CoordinatorMessage(retally=order))

    def _wake_at(self, due: float) -> None:
        self.cancel()
        self._due = due
        self._alarm = self._timer.call_at(due, self._rang)

    def _rang(self) -> None:
        self._alarm = None
        slept = self._timer.now() - self._due
        if slept < 0:  # the event loop may round to milliseconds
            self._wake_at(self._due)
        elif slept > MAX_ALARM_DELAY:  # this process did not run: what came meanwhile is still to be read
            self._wake_at(self._timer.now() + MAX_ALARM_DELAY)
        else:
            self._changed()


def _lines(data: bytes, count: int) -> Bytes | None:
    """uint8[count, 64]; ``None`` if ``data`` are not as many."""
    if not count or len(data) != LINE_BYTES * count:
        return None
    return np.frombuffer(data, np.uint8).reshape(count, LINE_BYTES)
