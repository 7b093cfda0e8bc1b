"""Minutes in which nodes and the coordinator are killed, frozen, leave and come, at moments drawn at random.

Between three and eight nodes take part. Asked is whether rounds go on being committed, whether all states
stay equal, whether the journal accounts for every sample, and whether the run learns as quiet ones do.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from bench.bed import Bed
from bench.churn_band import quiet_runs
from bench.churn_picture import draw
from bench.churn_play import FEWEST, MOST, Churn, Course
from bench.forked import ForkedChildren
from bench.report import Report

STANDSTILL = 120.0  # seconds without a commit that nobody may see
LAST = 5  # points whose losses are compared in the mean


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this bench alone."""
    parser.add_argument("--minutes", type=float, metavar="M", help="that it lasts (10; a fifth if --quick)")
    parser.add_argument("--seed", type=int, default=0, help="of what happens when (0)")
    parser.add_argument("--folder", type=Path, help="keep journal, logs and events there")


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """The bench."""
    minutes = getattr(options, "minutes", None) or (0.2 if quick else 10.0)
    console = Console(stderr=True, highlight=False)
    with _folder(getattr(options, "folder", None)) as folder, ForkedChildren() as children:
        bed = Bed(folder, children, command=())
        every = 10 if quick else 50
        churn = Churn(bed, random.Random(getattr(options, "seed", 0)), every, console)
        course = churn.play(minutes * 60, STANDSTILL)
    report = Report("churn")
    fill(report, course, minutes)
    return report


@contextlib.contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True)
        yield given
    else:
        with tempfile.TemporaryDirectory(prefix="atoll-bench-") as made:
            yield Path(made)


def fill(report: Report, course: Course, minutes: float) -> None:
    """Figures and picture of a run, beside quiet ones that are as long as it was."""
    rounds = max(course.commits) + 1
    file = course.file.model_copy(update={"run": course.file.run.model_copy(update={"rounds": rounds})})
    band = quiet_runs(file, (FEWEST, MOST))
    points = band.beside(course.losses)
    violations = course.found.violations
    report.add("longest_standstill_seconds", course.standstill, ceiling=STANDSTILL)
    report.add("digest_mismatches", len(course.differing) + course.deviations, ceiling=0)
    report.add("violations", len(violations) + course.found.untold, ceiling=0)
    report.add("processes_that_failed", len(course.troubles), ceiling=0)
    report.add("points_outside_the_band", sum(not point.inside for point in points), ceiling=0)
    report.add("loss_minus_quiet", _mean([point.loss - point.middle for point in points[-LAST:]]))
    report.add("band_margin", band.margin)
    report.add("points", len(points))
    report.add("minutes", minutes)
    report.add("rounds", rounds)
    report.add("samples_trained", course.found.trained)
    report.add("voters_mean", _mean(course.voters))
    report.add("nodes_that_came", course.count("come"))
    report.add("kills_of_nodes", course.count("die"))
    report.add("nodes_that_left", course.count("leave"))
    report.add("nodes_frozen", course.count("freeze"))
    report.add("kills_of_the_coordinator", course.count("crash"))
    report.add("stops_of_the_coordinator", course.count("suspend"))
    for text in [*(violation.text for violation in violations), *course.troubles]:
        report.note(text)
    report.note(
        "digest_mismatches: rounds after which two nodes had different states, and deviations that the "
        "coordinator found"
    )
    report.note(
        f"the band: validation losses of quiet runs of {FEWEST} and of {MOST} nodes, between which this one "
        "has its votes, with three seeds each, widened by the range of runs that differ in their seeds alone"
    )
    report.picture("losses", lambda path: draw(path, course, band))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
