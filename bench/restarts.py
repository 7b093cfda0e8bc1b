"""The coordinator is killed again and again, at points drawn at random: the run comes to the same.

Its nodes live through all of it. Every round must have the votes of all of them, on the samples that they
would have had, so that the state after every round is that of a run in which nobody dies, bit for bit.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
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
    "method": {"name": "sign-muon", "warmup": 0},
    "round": {"adaptive": False},  # every vote counts, however long the others take
}


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


def course(folder: Path, rounds: int, kills: int, seed: int = 0) -> Course:
    """Carry out a run of so many rounds in which the coordinator is killed so many times.

    Raises:
        BedError: it does not go on, or two nodes have different states.
    """
    chance, pauses = random.Random(seed), []
    folder.mkdir(parents=True, exist_ok=True)
    with ForkedChildren() as children:
        bed = Bed(folder, children, command=())
        bed.write({**RUN, "run": {**RUN["run"], "rounds": rounds}})
        fault = _drawn(chance, first=True) if kills else NONE
        hub = bed.lead(fault=fault)
        for name in NAMES:
            bed.join(name, "--wait", "100s")
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


def run(quick: bool) -> Report:
    """The bench."""
    report, kills = Report("restarts"), 8 if quick else 50
    rounds = (kills + 2) * APART
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        quiet = course(Path(folder) / "quiet", rounds, 0)
        killed = course(Path(folder) / "killed", rounds, kills)
    differing = [index for index in range(rounds) if quiet.digests[index] != killed.digests.get(index)]
    report.add("rounds_that_differ", len(differing), ceiling=0)
    report.add("violations", len(killed.violations), ceiling=0)
    report.add("pause_median_seconds", median(killed.pauses))
    report.add("pause_longest_seconds", max(killed.pauses))
    report.add("kills", kills)
    report.add("rounds", rounds)
    for violation in killed.violations:
        report.note(violation.text)
    report.note(
        "a round differs if it is missing, or the state after it is not that of the run without kills"
    )
    report.note("pause: from a kill until all nodes have applied a round more, or the next kill is due")
    return report
