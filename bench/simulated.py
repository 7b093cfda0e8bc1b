"""Simulated runs of a small model on the embedded text: what the benches of losses share.

A run takes half a million tokens by default: 512 steps of four nodes with four sequences of 64 bytes each.
All methods see the same weights and the same data at equal seeds, so differences are taken seed by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Console

from bench.report import Report
from deploy.compare import STANDARD, Entry, at_tokens
from deploy.compare_command import RichWatcher
from deploy.compare_outcome import Outcome
from deploy.compare_picture import draw_front
from deploy.compare_pool import Job, run_jobs
from deploy.compare_results import Comparison
from deploy.simulation import Build

NODES: Final = 4
BATCH: Final = 4  # sequences of a node in a step
CONTEXT: Final = int(STANDARD["model"]["context"])
WARMUP: Final = 0.1  # of the rounds
PROCESSES: Final = 2


@dataclass(frozen=True)
class Case:
    """One of the compared runs.

    Attributes:
        label: unique in a bench.
        method: the [method] section of its run file.
        nodes, batch: how the sequences of a step are shared out.
        build: makes the optimizer, where that is not the run file's.
    """

    label: str
    method: Mapping[str, Any]
    nodes: int = NODES
    batch: int = BATCH
    build: Build | None = None

    def entry(self, steps: int) -> Entry:
        """Its run, ``steps`` long or as near as whole rounds come to that."""
        values = {
            **STANDARD,
            "run": {**STANDARD["run"], "nodes": self.nodes},
            "data": {"batch": self.batch},
            "method": dict(self.method),
        }
        entry = at_tokens(Entry(self.label, values), steps * self.nodes * self.batch * CONTEXT, points=0)
        rounds = entry.values["run"]["rounds"]
        # At least one round: a tenth of a few long rounds would be no warm-up at all.
        if rounds > 1:
            entry.values["method"].setdefault("warmup", max(1, round(WARMUP * rounds)))
        return entry


def simulate(cases: Sequence[Case], *, steps: int, seeds: int) -> dict[str, list[Outcome]]:
    """All cases with seeds 0, 1, ..., by label; outcomes in the order of the seeds."""
    jobs = [
        Job(case.label, case.entry(steps).runfile(seed), case.build)
        for case in cases
        for seed in range(seeds)
    ]
    with RichWatcher(Console(stderr=True, highlight=False)) as watcher:
        outcomes = run_jobs(jobs, PROCESSES, watcher=watcher)
    return {case.label: outcomes[index * seeds : (index + 1) * seeds] for index, case in enumerate(cases)}


class Losses:
    """Differences of losses over paired seeds."""

    def __init__(self, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        self._losses = {label: [run.validation_loss for run in runs] for label, runs in outcomes.items()}

    def gap(self, worse: Case, better: Case) -> float:
        """Mean over the seeds of the loss of ``worse`` minus that of ``better``, nats per byte."""
        pairs = zip(self._losses[worse.label], self._losses[better.label], strict=True)
        return statistics.fmean(a - b for a, b in pairs)


def figure_name(label: str) -> str:
    """``"sign-muon, one worker"`` as ``"signmuon_one_worker"``."""
    return label.replace(", ", "_").replace("-", "").replace(" ", "_").replace("=", "")


def add_rows(
    report: Report, title: str, outcomes: Mapping[str, Sequence[Outcome]], controls: Collection[str] = ()
) -> None:
    """A table of all runs, and figures of each: loss, its spread, payload. ``controls`` are on no front."""
    judged = [runs for label, runs in outcomes.items() if label not in controls]
    others = [runs for label, runs in outcomes.items() if label in controls]
    rows = [*Comparison.of(judged).rows, *(Comparison.of([runs]).rows[0] for runs in others)]
    table = report.table(
        title, "run", "nodes", "steps", "loss", "std", "MB sent", "x fp32 DDP", "bits", "state B", "front"
    )
    for row in rows:
        name = figure_name(row.label)
        report.add(f"loss_{name}", row.loss)
        report.add(f"std_{name}", row.std)
        report.add(f"payload_mb_{name}", row.bytes_up / 1e6)
        table.row(
            row.label,
            row.nodes,
            row.steps,
            f"{row.loss:.4f}",
            f"{row.std:.4f}",
            row.bytes_up / 1e6,
            row.ratio,
            row.bits,
            row.state,
            "yes" if row.front and row.label not in controls else "",
        )
    report.picture("front", lambda path: draw_front(Comparison.of(judged), path))
    best = sorted((row for row in rows[: len(judged)] if row.front), key=lambda row: row.traffic)
    report.note(f"the front, from few bytes to many: {', '.join(row.label for row in best)}")
    report.note("loss: nats per held-out byte; gaps are means over paired runs (same weights and data)")
    report.note("MB sent: payload of one node over the run, embeddings and norms included")
    report.note("bits: sent for each parameter and step; state: of the optimizer, for each parameter")
    report.note("x fp32 DDP: both ways, against fp32 gradients through the same hub in every step")
