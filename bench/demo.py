"""How much of the demo's CPU time is not forward and backward.

CPU time, not the wall's: on fewer cores than processes a node mostly waits while others compute. Of each node
it is that of all its threads from its first round to its last, without the validation losses, which are
forward passes too; of the coordinator that since the nodes were started.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from rich.console import Console

from bench.report import Report
from deploy.demo import Demo, Options
from deploy.demo_results import Course, Results

BAR: Final = 0.15
QUICK_ROUNDS: Final = 48


def demo(rounds: int | None, baseline: bool) -> Results:
    """Run it, unseen; ``rounds`` as in :class:`deploy.demo.Options`."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        return Demo(Options(Path(folder), rounds=rounds, baseline=baseline), Console(quiet=True)).run()


def run(quick: bool) -> Report:
    """The demo as a user starts it; quick: without the single process, and fewer rounds."""
    return report(demo(QUICK_ROUNDS if quick else None, baseline=not quick))


def report(results: Results) -> Report:
    """The figures of a demo."""
    found, votes, alone = Report("demo"), results.votes, results.baseline
    compute = votes.compute_share * votes.busy_seconds
    found.add("nodes_outside_forward_backward", 1 - votes.compute_share, ceiling=BAR)
    found.add("all_outside_forward_backward", 1 - compute / (votes.busy_seconds + votes.coordinator_seconds))
    if alone is not None:
        found.add("one_process_outside_forward_backward", 1 - alone.compute_share)
    table = found.table(
        f"{votes.parameters:,} parameters, milliseconds of CPU a step",
        *("processes", "forward, backward", "other", "other, %"),
    )
    for name, course in ((f"{votes.processes} nodes", votes), ("one process, Muon", alone)):
        if course is not None:
            ours, other = _milliseconds(course)
            table.row(f"{name}: {course.method}", ours, other, 100 * (1 - course.compute_share))
    of_coordinator = 1e3 * votes.coordinator_seconds / votes.last_step
    table.row("coordinator", 0, of_coordinator, 100)
    ours, other = _milliseconds(votes)
    found.add("node_compute_milliseconds", ours / votes.processes)
    found.add("node_other_milliseconds", other / votes.processes)
    found.add("coordinator_milliseconds", of_coordinator)
    found.add("rounds", len(votes.steps))
    found.add("training_seconds", votes.seconds)
    found.note("CPU time of all threads; validation losses, which are forward passes too, are left out")
    return found


def _milliseconds(course: Course) -> tuple[float, float]:
    """CPU time of all processes in a step: forward and backward, and everything else."""
    each = 1e3 * course.busy_seconds / course.last_step
    return each * course.compute_share, each * (1 - course.compute_share)
