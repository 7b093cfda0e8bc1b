"""``python -m bench overlap``: rounds whose exchange runs while gradients are computed, behind thin links.

Two nodes of one thread each join a coordinator as ``atoll join`` does, each behind its own link of
100 Mbit/s; the coordinator's is ten times as fast. The batch is chosen so that computing takes as long as
exchanging: that is where overlap can win most. Three kinds of runs take turns: one after the other (compute,
write, exchange, apply), overlapped (a bucket leaves as soon as its gradients are there; the results are the
same to the bit), and delayed (with ``delay = 1`` a gradient travels during the whole next step).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from bench.namespaces import NamespacesUnavailable
from bench.overlap_fleet import COMPUTE, NODE_LINK, NODES, WARM_ROUNDS, Course, Fleet, Run, fleet
from bench.overlap_island import RANKS, Counts, count
from bench.report import Report, Table, median, median_ratio
from deploy.timeline import NodeLog, Panel, draw, together

KINDS: Final = {"one after the other": (False, 0), "overlapped": (True, 0), "delayed": (True, 1)}
SERIAL, OVERLAPPED, DELAYED = KINDS
BAR: Final = 1.3
BALANCE: Final = 1.25  # compute and exchange count as equal within this factor
DRAWN: Final = 3  # rounds of the picture


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        method: by name.
        model: the [model] section of the run file.
        batch: to begin with.
    """

    method: str
    model: Mapping[str, Any]
    batch: int

    def run(self, batch: int, kind: str, rounds: int) -> Run:
        """Its run of a kind."""
        overlap, delay = KINDS[kind]
        values = {
            "run": {"rounds": rounds},
            "model": dict(self.model),
            "data": {"batch": batch},
            "method": {"name": self.method, "delay": delay, "warmup": 1},
        }
        return Run(values, overlap)


CASES: Final = (
    Case("ddp-adamw", {"d_model": 256, "layers": 4, "heads": 4, "context": 64}, 24),
    Case("signum", {"d_model": 512, "layers": 6, "heads": 8, "context": 16}, 5),
    Case("sign-muon", {"d_model": 256, "layers": 4, "heads": 4, "context": 16}, 1),
)
QUICK: Final = (Case("ddp-adamw", {"d_model": 128, "layers": 4, "heads": 4, "context": 64}, 16),)


@dataclass(frozen=True)
class Size:
    """How much is measured: rounds of a run, runs of each kind, tries to find the batch and their rounds."""

    rounds: int
    passes: int
    tries: int
    try_rounds: int


FULL: Final = Size(rounds=WARM_ROUNDS + 7, passes=4, tries=3, try_rounds=WARM_ROUNDS + 4)
SHORT: Final = Size(rounds=WARM_ROUNDS + 4, passes=1, tries=1, try_rounds=WARM_ROUNDS + 2)


@dataclass(frozen=True)
class Measured:
    """One case: the runs of each kind, in the order of the passes, in which the kinds take turns."""

    case: Case
    batch: int
    courses: dict[str, list[Course]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def rounds(self, kind: str) -> list[float]:
        """Seconds of a round, the median of each pass."""
        return [median(course.rounds) for course in self.courses[kind]]

    def speedup(self, kind: str) -> float:
        """Over one after the other: the median of the passes."""
        return median_ratio(self.rounds(SERIAL), self.rounds(kind))

    @property
    def compute(self) -> float:
        """Seconds in forward, backward and writing the contribution, without overlap."""
        return median([median(course.seconds(*COMPUTE)) for course in self.courses[SERIAL]])

    @property
    def exchange(self) -> float:
        """Seconds of an exchange, without overlap."""
        return median([median(course.waits) for course in self.courses[SERIAL]])

    @property
    def ratio(self) -> float:
        """Compute over exchange."""
        return self.compute / self.exchange


def run(quick: bool) -> Report:
    """Measure behind thin links; where they cannot be made, on loopback, and judge nothing."""
    cases, size = (QUICK, SHORT) if quick else (CASES, FULL)
    why = ""
    try:
        measured = measure(cases, size, shaped=True)
    except NamespacesUnavailable as reason:
        why = str(reason)
        measured = measure(cases, size, shaped=False)
    report = Report("overlap")
    fill(report, measured, count("sign-muon", rounds=3 if quick else 6), judged=not quick and not why)
    if why:
        report.note(
            f"NOT JUDGED: there is no thin link, all runs are on loopback, where an exchange takes hardly "
            f"any time ({why})"
        )
    elif quick:
        report.note("not judged: a small model and a few rounds; the bars are those of the full form")
    return report


def measure(cases: tuple[Case, ...], size: Size, *, shaped: bool) -> list[Measured]:
    """All runs of all cases, with a batch for each.

    Raises:
        NamespacesUnavailable: thin links are wanted and cannot be made.
    """
    with fleet(shaped=shaped) as processes:
        found = [Measured(case, balanced(processes, case, size)) for case in cases]
        for _ in range(size.passes):
            for of in found:
                for kind, courses in of.courses.items():
                    courses.append(processes.course(of.case.run(of.batch, kind, size.rounds)))
        return found


def balanced(processes: Fleet, case: Case, size: Size) -> int:
    """The batch with which computing takes as long as exchanging, as nearly as whole samples allow."""
    batch = case.batch
    for _ in range(size.tries):
        tried = Measured(case, batch)
        tried.courses[SERIAL].append(processes.course(case.run(batch, SERIAL, size.try_rounds)))
        batch = next_batch(batch, tried.ratio)
    return batch


def next_batch(batch: int, ratio: float) -> int:
    """A better batch, given compute over exchange with the present one."""
    return max(1, min(round(batch / ratio), 8 * batch))


def fill(report: Report, measured: list[Measured], counts: list[Counts], *, judged: bool) -> None:
    """Write figures, tables, the picture and notes; the first case is the one that has to hold the bar."""
    main = measured[0]
    report.add("speedup", main.speedup(OVERLAPPED), floor=BAR if judged else None)
    report.add("gathers_for_exchange", max(of.extra for of in counts), ceiling=0)
    report.add(
        "compute_over_exchange",
        main.ratio,
        floor=1 / BALANCE if judged else None,
        ceiling=BALANCE if judged else None,
    )
    table = report.table(
        f"{NODES} nodes behind {NODE_LINK // 10**6} Mbit/s, seconds of a round" if judged else "seconds",
        *("method", "batch", "compute", "exchange", "ratio", SERIAL, OVERLAPPED, "speedup"),
        *(DELAYED, "speedup"),
    )
    for of in measured:
        _row(report, table, of)
    table = report.table(
        f"collectives of a round of an island of {RANKS} ranks",
        *("rank", "forward and backward", "whole round", "control", "control bytes"),
    )
    for rank, each in enumerate(counts):
        table.row(str(rank), each.passes, max(each.rounds), max(each.control), max(each.control_bytes))
    report.add("control_bytes", max(max(each.control_bytes) for each in counts))
    panels = [_panel(main, kind) for kind in KINDS]
    report.picture("timeline", lambda path: draw(path, _title(main), panels))
    report.note(
        "compute: forward, backward and writing the contribution; exchange: the wait of the node that was "
        "ready last; both without overlap"
    )
    report.note(
        "what is sent while gradients come has to wait for the first of them: with compute = exchange a "
        "forward pass of a third of the compute leaves a factor of 1.5 at most; delayed, 2"
    )
    report.note("overlapped rounds give the same bits; delayed ones are other updates, a round late")
    report.note(
        "on CPUs sign-muon's polar factors cost more than a thin link's time for their bits: its ratio is "
        "what a single sample leaves"
    )


def _row(report: Report, table: Table, of: Measured) -> None:
    name = of.case.method.replace("-", "_")
    seconds = {kind: median(of.rounds(kind)) for kind in KINDS}
    for kind in (OVERLAPPED, DELAYED):
        report.add(f"speedup_{name}_{kind}", of.speedup(kind))
    report.add(f"compute_over_exchange_{name}", of.ratio)
    report.add(f"compute_seconds_{name}", of.compute)
    report.add(f"exchange_seconds_{name}", of.exchange)
    for kind, value in seconds.items():
        report.add(f"round_seconds_{name}_{kind.replace(' ', '_')}", value)
    table.row(
        of.case.method,
        of.batch,
        of.compute,
        of.exchange,
        of.ratio,
        seconds[SERIAL],
        seconds[OVERLAPPED],
        of.speedup(OVERLAPPED),
        seconds[DELAYED],
        of.speedup(DELAYED),
    )


def _panel(of: Measured, kind: str) -> Panel:
    """Some rounds of the run of that kind that is nearest to the median."""
    middle = median(of.rounds(kind))
    course = min(of.courses[kind], key=lambda each: abs(median(each.rounds) - middle))
    nodes = [NodeLog.of(f"node {index}", rounds) for index, rounds in enumerate(course.nodes)]
    title = f"{kind}: {middle:.2f} s a round"
    if kind != SERIAL:
        title += f", {of.speedup(kind):.2f} x as fast"
    return together(title, nodes, first=WARM_ROUNDS, count=DRAWN)


def _title(of: Measured) -> str:
    return (
        f"{of.case.method}, {NODES} nodes behind {NODE_LINK // 10**6} Mbit/s: computing takes "
        f"{of.ratio:.2f} x as long as exchanging"
    )
