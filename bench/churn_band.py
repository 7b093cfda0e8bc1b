"""What quiet runs come to, for the one in which processes come and go: a band of losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.console import Console

from deploy.compare_command import RichWatcher
from deploy.compare_outcome import Outcome
from deploy.compare_pool import Job, run_jobs
from protos.runfile import RunFile

SEEDS: Final = 3
PROCESSES: Final = 2


@dataclass(frozen=True)
class Beside:
    """A loss beside the band.

    Attributes:
        round: after which it was measured.
        loss: nats per token, as all here.
        middle: of the band there.
        inside: whether it lies in the band.
    """

    round: int
    loss: float
    middle: float
    inside: bool


@dataclass(frozen=True)
class Band:
    """Validation losses of quiet runs, round by round, nats per token.

    Attributes:
        rounds: after which they were measured.
        low, high: the lowest and highest of them.
        margin: the range of runs that differ in their seeds alone, in the median over the second half of
            their course.
    """

    rounds: tuple[int, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    margin: float

    def beside(self, losses: Sequence[tuple[int, float]]) -> list[Beside]:
        """The losses (round, loss) that were measured after rounds of the band."""
        bounds = dict(zip(self.rounds, zip(self.low, self.high, strict=True), strict=True))
        found = []
        for index, loss in losses:
            if index in bounds:
                low, high = bounds[index]
                inside = low - self.margin <= loss <= high + self.margin
                found.append(Beside(index, loss, (low + high) / 2, inside))
        return found


def quiet_runs(file: RunFile, nodes: Sequence[int]) -> Band:
    """Simulate the run with each of these numbers of nodes, none of which comes or goes, and some seeds."""
    jobs = []
    for count in nodes:
        for more in range(SEEDS):
            run = file.run.model_copy(update={"nodes": count, "seed": file.run.seed + more})
            jobs.append(Job(f"quiet, {count} nodes", file.model_copy(update={"run": run})))
    with RichWatcher(Console(stderr=True, highlight=False)) as watcher:
        outcomes = run_jobs(jobs, PROCESSES, watcher=watcher)
    return band_of([outcomes[first : first + SEEDS] for first in range(0, len(jobs), SEEDS)])


def band_of(groups: Sequence[Sequence[Outcome]]) -> Band:
    """The band of these runs; those of a group differ in their seeds alone."""
    spans, ranges = [], list[float]()
    for group in groups:
        columns = [[loss for _, loss in column] for column in zip(*map(_course, group), strict=True)]
        spans.append([(min(column), max(column)) for column in columns])
        ranges += [high - low for low, high in spans[-1][len(columns) // 2 :]]
    low = tuple(min(low for low, _ in column) for column in zip(*spans, strict=True))
    high = tuple(max(high for _, high in column) for column in zip(*spans, strict=True))
    return Band(tuple(index for index, _ in _course(groups[0][0])), low, high, float(np.median(ranges)))


def _course(run: Outcome) -> list[tuple[int, float]]:
    """Round and validation loss, wherever it was measured."""
    steps = run.steps // run.rounds
    return [
        (point.steps // steps - 1, point.validation_loss)
        for point in run.points
        if math.isfinite(point.validation_loss)
    ]
