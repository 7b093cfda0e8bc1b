"""The coordinator is killed again and again, at points drawn at random: the run comes to the same.

Its nodes live through all of it. Every round must have the votes of all of them, on the samples that they
would have had, so that the state after every round is that of a run in which nobody dies, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.bed import Bed
from bench.faults import NONE, Fault, stopped
from bench.forked import ForkedChildren
from bench.report import Report, median
from coordinator.audit import Violation, audit
from coordinator.journal_reading import JournalReader

NAMES: Final = ("a", "b", "c")
POINTS: Final = ("gathering", "open", "delivered", "journaling", "journaled", "")  # "": wherever it is
APART: Final = 12  # rounds between two kills, at most
RUN: Final[dict[str, dict[str, Any]]] = {
    "run": {"nodes": len(NAMES), "evaluate_every": 0},
    "round": {"adaptive": False},  # every vote counts, however long the others take
}
SIGN_MUON: Final[dict[str, Any]] = {"name": "sign-muon", "warmup": 0}
LORDO: Final[dict[str, Any]] = {"name": "lordo", "warmup": 0, "local_steps": 4, "rank": 4}


@dataclass(frozen=True)
class Course:
    """What became of a run.

    Attributes:
        digests: of the state after each round, on which all nodes agree.
        violations: that its journal's audit has found.
        pauses: seconds from each kill until every node had applied one more round.
    """

    digests: dict[int, str]
    violations: Sequence[Violation]
    pauses: Sequence[float]


def course(
    folder: Path, rounds: int, kills: int, seed: int = 0, method: Mapping[str, Any] = SIGN_MUON
) -> Course:
    """Carry out a run of so many rounds in which the coordinator is killed so many times.

    Args:
        folder: for all files of the run.
        seed: of the points at which it is killed.
        method: section of the run file.

    Raises:
        BedError: it does not go on, or two nodes have different states.
    """
    chance, pauses = random.Random(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    with ForkedChildren() as children:
        bed = Bed(folder, children, command=())
        bed.write({**RUN, "run": {**RUN["run"], "rounds": rounds}, "method": dict(method)})
        fault = _drawn(chance, first=True) if kills else NONE
        hub = bed.lead(fault=fault)
        for name in NAMES:  # one after the other: in both runs the same has the first place
            child = bed.join(name, "--wait", "100s")
            bed.until(lambda n=name: bool(bed.events(n, "Joined")), f"the admission of {name}", watch=child)  # type: ignore[misc]
        for left in reversed(range(kills)):
            if fault.point:
                bed.until(lambda child=hub: stopped(child.pid), "the point of the kill")  # type: ignore[misc]
            else:
                bed.reached(NAMES[0], bed.last(NAMES[0]) + chance.randint(1, APART))
            bed.kill(hub)
            killed, reached = time.monotonic(), max(map(bed.last, NAMES))
            fault = _drawn(chance) if left else NONE
            hub = bed.lead(fault=fault)
            if fault.point != "gathering":  # or it is to be killed before it opens a round
                bed.until(
                    lambda n=reached, child=hub: min(map(bed.last, NAMES)) > n or stopped(child.pid),  # type: ignore[misc]
                    f"round {reached + 2}",
                )
                pauses.append(time.monotonic() - killed)
        for child in (*bed.nodes.values(), hub):
            if bed.ended(child):
                raise RuntimeError(child.fate())
        with JournalReader(bed.journal) as reader:
            return Course(bed.digests(), audit(reader.ledger).violations, pauses)


def _drawn(chance: random.Random, *, first: bool = False) -> Fault:
    """Where the coordinator is killed next."""
    point = chance.choice(POINTS[1:] if first else POINTS)
    each = len(NAMES) if point == "delivered" else 1  # times in a round that it comes there, at least
    return Fault(point, 1 if point == "gathering" else chance.randint(1, APART * each))


@dataclass(frozen=True)
class Comparison:
    """A run whose coordinator was killed against one that was left alone."""

    rounds: int
    quiet: Course
    killed: Course

    @property
    def differing(self) -> list[int]:
        """Rounds that are missing, or after which the state is another."""
        ours, theirs = self.killed.digests, self.quiet.digests
        return [index for index in range(self.rounds) if theirs[index] != ours.get(index)]


def compared(kills: int, seed: int, method: Mapping[str, Any]) -> Comparison:
    """Both runs, one after the other."""
    rounds = (kills + 2) * APART
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        quiet = course(Path(folder) / "quiet", rounds, 0, method=method)
        killed = course(Path(folder) / "killed", rounds, kills, seed, method)
    return Comparison(rounds, quiet, killed)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this bench alone."""
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the points of the kills")


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """The bench."""
    report, seed = Report("restarts"), getattr(options, "seed", 0)
    kills, lordo_kills = (6, 2) if quick else (50, 10)
    votes, lordo = compared(kills, seed, SIGN_MUON), compared(lordo_kills, seed, LORDO)
    report.add("rounds_that_differ", len(votes.differing), ceiling=0)
    report.add("violations", len(votes.killed.violations), ceiling=0)
    report.add("lordo_rounds_that_differ", len(lordo.differing), ceiling=0)
    report.add("lordo_violations", len(lordo.killed.violations), ceiling=0)
    report.add("pause_median_seconds", median(votes.killed.pauses))
    report.add("pause_longest_seconds", max(votes.killed.pauses))
    report.add("kills", kills)
    report.add("rounds", votes.rounds)
    report.add("lordo_kills", lordo_kills)
    report.add("lordo_rounds", lordo.rounds)
    for violation in (*votes.killed.violations, *lordo.killed.violations):
        report.note(violation.text)
    report.note(
        "a round differs if it is missing, or the state after it is not that of the run without kills"
    )
    report.note("pause: from a kill until all nodes have applied a round more, or the next kill is due")
    return report
