"""``python -m bench simulation``: random schedules of faults on a virtual clock, and what broke in them.

Every schedule runs the coordinator's hub and its server's handlers, and on every node the session,
contributor and transfers, as they are; the network, the clock, the journal's disk and what a node computes
are simulated. A schedule in which an invariant breaks is printed as a script, which ``--script FILE`` runs
again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from bench.report import Report
from bench.virtual.generate import random_schedule
from bench.virtual.schedule import Schedule
from bench.virtual.shrink import shrink
from bench.virtual.simulate import Outcome, simulate

QUICK, FULL = 150, 2000  # schedules


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this bench alone."""
    parser.add_argument("--schedules", type=int, metavar="N", help=f"how many ({FULL}; {QUICK} if --quick)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="number of the first schedule")
    parser.add_argument("--script", type=Path, metavar="FILE", help="run this schedule alone, and tell all")


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Random schedules, or the one of ``--script``."""
    script: Path | None = getattr(options, "script", None)
    if script is not None:
        return _report([Schedule.parse(script.read_text())], log=True)
    count = getattr(options, "schedules", None) or (QUICK if quick else FULL)
    first = getattr(options, "seed", 0)
    return _report((random_schedule(seed) for seed in range(first, first + count)), log=False)


def _report(schedules: Iterable[Schedule], *, log: bool) -> Report:
    report = Report("simulation")
    rules: Counter[str] = Counter()
    count = broken = rounds = faults = 0
    virtual, began = 0.0, time.perf_counter()
    for schedule in schedules:
        outcome = simulate(schedule)
        count, rounds, faults = count + 1, rounds + outcome.rounds, faults + outcome.fired
        virtual += outcome.seconds
        if log:
            print("\n".join(outcome.log))
        if outcome.violations:
            broken += 1
            rules.update(sorted({violation.rule for violation in outcome.violations}))
            _tell(schedule, outcome)
    seconds = time.perf_counter() - began
    report.add("violations", broken, ceiling=0)
    report.add("schedules", count)
    report.add("schedules_per_second", count / seconds)
    report.add("rounds", rounds)
    report.add("faults", faults)
    report.add("virtual_hours", virtual / 3600)
    for rule, number in sorted(rules.items()):
        report.note(f"{number} schedules broke {rule}")
    return report


def _tell(schedule: Schedule, outcome: Outcome) -> None:
    """Print the shortest script of the same kind that can be found."""
    rule = outcome.violations[0].rule
    last = outcome

    def fails(smaller: Schedule) -> bool:
        nonlocal last
        tried = simulate(smaller)
        if all(violation.rule != rule for violation in tried.violations):
            return False
        last = tried
        return True

    schedule = shrink(schedule, fails)
    outcome = last
    lines = [f"# {violation}" for violation in outcome.violations]
    print("\n".join([schedule.script() + lines[0], *lines[1:], ""]), file=sys.stderr, flush=True)
