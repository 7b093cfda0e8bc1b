"""The audit of a journal: was every sample trained at most once, and is every one accounted for?

A pure function of what the journal says; reading it is :mod:`coordinator.journal_reading`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.journal import RosterRecord, RoundRecord, StartRecord
from coordinator.ranges import Range, Ranges

MAX_WEIGHT: Final = 65535
NAMED: Final = 100  # violations that are told in full, of each kind


@dataclass(frozen=True)
class Violation:
    """A rule that the journal breaks: its ``kind``, the text for people, which rounds (from 0) and nodes."""

    kind: str
    text: str
    rounds: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skip:
    """Rounds from ``first`` up to ``end`` that this journal has lost; samples before ``samples`` may have
    been leased in them. What was leased in them and is in a node's hands still may be trained later on."""

    first: int
    end: int
    samples: int


@dataclass(frozen=True)
class Ledger:
    """What a journal says.

    Attributes:
        start: with which state the run began.
        rounds: iterates over all rounds in order, as often as it is called.
        skips: gaps in them.
        rosters: those that are kept, in any order.
        digests: (round, digest) of agreements.
        results: of every round with a result that should be kept: its number, and what is wrong with it, or
            ``""``; or ``None`` where the journal itself says that it is lost.
    """

    start: StartRecord
    rounds: Callable[[], Iterable[RoundRecord]]
    skips: Sequence[Skip] = ()
    rosters: Iterable[RosterRecord] = ()
    digests: Iterable[tuple[int, str]] = ()
    results: Iterable[tuple[int, str | None]] = ()


@dataclass
class Audit:
    """What an audit has found.

    Attributes:
        first, following: the rounds from ``first`` up to ``following`` are committed, but for the skipped.
        rounds, voided: how many rounds there are, and how many of them without voters.
        frontier: no sample from there on had been leased at the end of the last round.
        trained, returned: samples below it that were trained, and that are to be handed out again.
        unknown: samples that were leased, or not, in rounds which the journal has lost.
        shares: samples trained by each node.
        agreed: rounds after which the nodes agreed on the state's digest.
        kept, lost: results that were read and found whole; results that the journal knows to be damaged.
        violations: rules that are broken.
        untold: violations beyond the first of their kind that are told.
    """

    first: int = 0
    following: int = 0
    rounds: int = 0
    voided: int = 0
    frontier: int = 0
    trained: int = 0
    returned: int = 0
    unknown: int = 0
    shares: dict[str, int] = field(default_factory=dict)
    agreed: int = 0
    kept: int = 0
    lost: int = 0
    violations: list[Violation] = field(default_factory=list)
    untold: int = 0

    @property
    def holds(self) -> bool:
        """Whether no rule is broken."""
        return not self.violations

    def tell(self, violations: Iterable[Violation]) -> None:
        """Add violations; of a kind only the first ones."""
        counts = Counter(violation.kind for violation in self.violations)
        for violation in violations:
            counts[violation.kind] += 1
            if counts[violation.kind] > NAMED:
                self.untold += 1
            else:
                self.violations.append(violation)


def audit(ledger: Ledger) -> Audit:
    """Check a ledger: rounds follow one another, voters and weights fit, samples are accounted for exactly,
    digests are agreed on once, results are whole."""
    found = Audit(first=ledger.start.round, following=ledger.start.round, frontier=ledger.start.samples)
    epochs: dict[int, set[str]] = {}
    for roster in ledger.rosters:
        epochs.setdefault(roster.epoch, set()).update(member.node for member in roster.members)
    _rounds(ledger, epochs, found)
    _digests(ledger.digests, found)
    _results(ledger.results, found)
    return found


def _rounds(ledger: Ledger, epochs: Mapping[int, set[str]], found: Audit) -> None:
    skips = {skip.first: skip for skip in ledger.skips}
    trained, twice = Ranges(), Ranges()
    barred = 0  # what had been leased before the rounds that are lost: they may have trained it
    last: RoundRecord | None = None
    shares: Counter[str] = Counter()
    for record in ledger.rounds():
        while found.following in skips:
            skip = skips.pop(found.following)
            barred = found.frontier
            found.following, found.frontier = skip.end, max(found.frontier, skip.samples)
        found.tell(_order(record, found, barred))
        found.tell(_votes(record, epochs.get(record.epoch)))
        for node, start, count in record.trained:
            shares[node] += count
            for part in trained.add(start, start + count):
                twice.add(*part)
        found.rounds += 1
        found.voided += not record.voters
        found.following, found.frontier = record.round + 1, max(found.frontier, record.frontier)
        last = record
    found.tell(_trained_twice(ledger.rounds(), twice))
    for skip in sorted(skips.values(), key=lambda skip: skip.first):  # behind the last round
        found.following, found.frontier = skip.end, max(found.frontier, skip.samples)
    found.trained, found.shares = trained.total, dict(sorted(shares.items()))
    returned = () if last is None or last.round + 1 != found.following else last.returned
    behind = max((skip.samples for skip in ledger.skips), default=0)
    _account(ledger.start.samples, trained, returned, behind, found)


def _order(record: RoundRecord, found: Audit, barred: int) -> Iterator[Violation]:
    """Rounds follow one another, and with them the frontier; nothing is leased beyond it, nor anew what was
    handed out before rounds that the journal has lost."""
    name, rounds = f"round {record.round + 1}", (record.round,)
    if record.round != found.following:
        yield Violation("order", f"{name} follows where round {found.following + 1} should", rounds)
    if record.frontier < found.frontier:
        text = f"{name} ends with the frontier at sample {record.frontier}, before it was at {found.frontier}"
        yield Violation("order", text, rounds)
    for node, start, count in record.trained:
        if count < 1 or start < 0 or start + count > record.frontier:
            text = (
                f"{name}: {node} trained {_samples(start, start + count)}, the frontier is {record.frontier}"
            )
            yield Violation("frontier", text, rounds, (node,))
        elif start < barred:
            text = (
                f"{name}: {node} trained {_samples(start, start + count)}, which rounds that this journal "
                f"has lost may have trained, up to sample {barred - 1}"
            )
            yield Violation("twice", text, rounds, (node,))


def _votes(record: RoundRecord, members: set[str] | None) -> Iterator[Violation]:
    name, rounds, voters = f"round {record.round + 1}", (record.round,), record.voters
    if len(set(voters)) != len(voters):
        double = tuple(node for node, count in Counter(voters).items() if count > 1)
        yield Violation("voters", f"{name}: {', '.join(double)} voted twice", rounds, double)
    if not len(voters) == len(record.weights) == len(record.agreement):
        text = f"{name}: {len(voters)} voters, {len(record.weights)} weights, {len(record.agreement)} shares"
        yield Violation("weights", text, rounds)
    for node, weight in zip(voters, record.weights, strict=False):
        if not 1 <= weight <= MAX_WEIGHT:
            yield Violation("weights", f"{name}: {node} voted with weight {weight}", rounds, (node,))
    if voters and not 0 <= record.casting < len(voters):
        yield Violation("weights", f"{name}: the casting voter is {record.casting} of {len(voters)}", rounds)
    trainers = [node for node, _, _ in record.trained]
    if sorted(trainers) != sorted(voters):
        other = tuple(sorted(set(trainers) ^ set(voters)))
        text = f"{name}: who voted and who trained differ: {', '.join(other) or 'one of them twice'}"
        yield Violation("voters", text, rounds, other)
    if members is not None and (strangers := tuple(sorted(set(voters) - members))):
        text = f"{name}: {', '.join(strangers)} voted without being in the roster of epoch {record.epoch}"
        yield Violation("voters", text, rounds, strangers)
    if bool(voters) != bool(record.nbytes):
        text = f"{name}: {len(voters)} voters and a result of {record.nbytes} bytes"
        yield Violation("voters", text, rounds)


def _trained_twice(rounds: Iterable[RoundRecord], twice: Ranges) -> Iterator[Violation]:
    """Name who trained each range that was trained more than once."""
    parts = list(twice)[:NAMED]
    if not parts:
        return
    who: dict[Range, list[tuple[int, str]]] = {part: [] for part in parts}
    for record in rounds:
        for node, start, count in record.trained:
            for part in parts:
                if start < part[1] and start + count > part[0]:
                    who[part].append((record.round, node))
    for part, places in who.items():
        named = " and by ".join(f"{node} in round {index + 1}" for index, node in places)
        indices, nodes = zip(*places, strict=True)
        yield Violation("twice", f"{_samples(*part)} trained by {named}", tuple(indices), tuple(nodes))


def _account(
    start: int, trained: Ranges, returned: Sequence[tuple[int, int]], behind: int, found: Audit
) -> None:
    """Every sample below the frontier is trained or returned; below ``behind`` rounds that are lost may have
    trained it."""
    accounted = Ranges(trained)
    for first, count in returned:
        for part in accounted.add(first, first + count):
            text = f"{_samples(*part)}: trained, or returned before, and returned once more at the end"
            found.tell([Violation("account", text, (found.following - 1,))])
        found.returned += count
    for part in accounted.missing(start, found.frontier):
        unknown = max(0, min(part[1], behind) - part[0])
        found.unknown += unknown
        if part[0] + unknown < part[1]:
            text = f"{_samples(part[0] + unknown, part[1])} below the frontier: neither trained nor returned"
            found.tell([Violation("account", text, (found.following - 1,))])
    for part in accounted:
        if part[0] < start or part[1] > found.frontier:
            text = f"{_samples(*part)} reach beyond {_samples(start, found.frontier)}, all that was leased"
            found.tell([Violation("account", text)])


def _digests(digests: Iterable[tuple[int, str]], found: Audit) -> None:
    agreed: dict[int, str] = {}
    for index, digest in digests:
        known = agreed.setdefault(index, digest)
        if known != digest:
            text = f"after round {index + 1} the nodes agreed on two states: {known} and {digest}"
            found.tell([Violation("digests", text, (index,))])
    found.agreed = len(agreed)


def _results(results: Iterable[tuple[int, str | None]], found: Audit) -> None:
    for index, problem in results:
        if problem is None:
            found.lost += 1
        elif problem:
            found.tell([Violation("results", f"the result of round {index + 1}: {problem}", (index,))])
        else:
            found.kept += 1


def _samples(first: int, end: int) -> str:
    return f"sample {first}" if end == first + 1 else f"samples {first} to {end - 1}"
