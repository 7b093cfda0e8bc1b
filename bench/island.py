"""``python -m bench island``: our owner-sharded islands against stock FSDP2 with Muon, on three links.

Three methods train one model in the same processes, one step each in turn: ours; FSDP2 with every matrix
gathered by every rank for its step; and FSDP2 with the matrices dealt out by all-to-alls. Links of 1 Gbit/s
and 100 Mbit/s are network namespaces with a token bucket at both ends of every rank's cable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.island_methods import METHODS, Method, Size
from bench.island_ranks import Ranks, world
from bench.island_work import Steps, losses, peak_memory, reduce_seconds, reference_losses, timed_steps
from bench.namespaces import NamespacesUnavailable, linked
from bench.report import Report, Table, median, median_ratio
from node.model import LlamaShape

RANKS = (2, 4)
HEADLINE = 4
OURS: Method = "owner"
GATHER: Method = "fsdp2-gather"
A2A: Method = "fsdp2-a2a"

SIZE = Size(LlamaShape(d_model=256, layers=4, heads=8, ff=688, context=64, vocab=1024, tied=False), batch=4)
SMALL = Size(LlamaShape(d_model=64, layers=2, heads=4, ff=176, context=32, vocab=96, tied=False), batch=8)


@dataclass(frozen=True)
class Place:
    """Where the ranks are: a suffix of the figures, a rate in bits a second, and how long it is measured."""

    title: str
    suffix: str
    rate: int | None
    warmup: int
    rounds: int
    fp64_steps: int

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return None if self.rate is None else self.rate / 8


PLACES = (
    Place("loopback", "", None, 2, 9, 50),
    Place("1 Gbit/s", "_1gbit", 1_000_000_000, 2, 7, 50),
    Place("100 Mbit/s", "_100mbit", 100_000_000, 1, 4, 10),
)
QUICK = Place("loopback", "", None, 1, 3, 10)


@dataclass(frozen=True)
class Timing:
    """One method on one place: what the slowest rank took in each round, in seconds, and what was sent."""

    training: list[float]
    stepping: list[float]
    cpu: list[float]
    megabytes: float
    collectives: int

    @property
    def whole(self) -> list[float]:
        """Forward, backward and the optimizers' step."""
        return [a + b for a, b in zip(self.training, self.stepping, strict=True)]


@dataclass(frozen=True)
class Row:
    """All methods on one place with one number of ranks.

    Attributes:
        timings: of each method.
        excess: seconds that a step of FSDP2 loses because gloo has no reduce-scatter of its own.
    """

    ranks: int
    timings: dict[Method, Timing]
    excess: float

    def step_ratio(self, baseline: Method) -> float:
        """The optimizers' step of ``baseline`` over ours."""
        return median_ratio(self.timings[baseline].stepping, self.timings[OURS].stepping)

    def end_to_end_ratio(self, baseline: Method, *, excess: float = 0.0) -> float:
        """The whole step of ``baseline``, less ``excess`` seconds, over ours."""
        theirs = [seconds - excess for seconds in self.timings[baseline].whole]
        return median_ratio(theirs, self.timings[OURS].whole)


@dataclass(frozen=True)
class Outcome:
    """Everything measured on one place."""

    place: Place
    rows: dict[int, Row]
    memory: dict[Method, int] | None
    difference: float


def run(quick: bool) -> Report:
    """Measure on loopback and, with root and ``ip``, on both links; quick: a few steps on loopback."""
    report = Report("island")
    outcomes: list[Outcome] = []
    for place in (QUICK,) if quick else PLACES:
        try:
            outcomes.append(measure(place))
        except NamespacesUnavailable as reason:
            report.note(f"no figures for {place.title}: {reason}")
    fill(report, outcomes, bars=not quick)
    if quick:
        report.note("links of 1 Gbit/s and 100 Mbit/s, more steps and the bars: without --quick")
    return report


def measure(place: Place) -> Outcome:
    """All measurements on ``place``."""
    if place.rate is None:
        return _measure(place, None)
    with linked(max(RANKS), place.rate) as namespaces:
        return _measure(place, namespaces)


def _measure(place: Place, namespaces: Sequence[str] | None) -> Outcome:
    with world(HEADLINE, namespaces) as ranks:
        peaks = [peak for peak in ranks.run(peak_memory, HEADLINE, METHODS, SIZE, place.bandwidth) if peak]
    memory = {method: max(peak[method] for peak in peaks) for method in METHODS} if peaks else None
    with world(max(RANKS), namespaces) as ranks:
        sharded = ranks.run(losses, HEADLINE, OURS, SMALL, place.fp64_steps, place.bandwidth)
        rows = {count: _row(ranks, place, count) for count in RANKS}
    alone = reference_losses(SMALL, place.fp64_steps)
    difference = max(abs(a - b) for each in sharded for a, b in zip(each, alone, strict=True))
    return Outcome(place, rows, memory, difference)


def _row(ranks: Ranks, place: Place, count: int) -> Row:
    answers = ranks.run(timed_steps, count, METHODS, SIZE, place.warmup, place.rounds, place.bandwidth)
    timings: dict[Method, Timing] = {}
    for method in METHODS:
        steps: list[Steps] = [measured[method] for measured, _ in answers]
        sent = max(median(each.sent) for each in steps)
        timings[method] = Timing(
            training=_slowest([each.training for each in steps]),
            stepping=_slowest([each.stepping for each in steps]),
            cpu=[sum(of) for of in zip(*(each.cpu for each in steps), strict=True)],
            megabytes=sent / 1e6 / (count if place.rate is None else 1),
            collectives=max(calls[method] for _, calls in answers),
        )
    seconds = ranks.run(reduce_seconds, count, SIZE, 1 if place is QUICK else 2)
    scatter, exchange = (_slowest([each[way] for each in seconds]) for way in (0, 1))
    return Row(count, timings, max(0.0, median(scatter) - median(exchange)))


def _slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    return [max(together) for together in zip(*of_ranks, strict=True)]


def fill(report: Report, outcomes: Sequence[Outcome], *, bars: bool) -> None:
    """Add the figures, the table and the notes of ``outcomes``."""

    def add(name: str, value: float, floor: float | None = None, ceiling: float | None = None) -> None:
        report.add(name, value, floor=floor if bars else None, ceiling=ceiling if bars else None)

    for outcome in outcomes:
        suffix, row = outcome.place.suffix, outcome.rows[HEADLINE]
        add(f"step_ratio{suffix}", row.step_ratio(GATHER), floor=5.0)
        add(f"end_to_end_ratio{suffix}", row.end_to_end_ratio(GATHER), floor=1.0)
        add(f"step_ratio_a2a{suffix}", row.step_ratio(A2A), floor=1.3)
        add(f"end_to_end_ratio_a2a{suffix}", row.end_to_end_ratio(A2A), floor=1.0)
        add(f"collectives_in_step{suffix}", row.timings[OURS].collectives, ceiling=0)
        add(f"loss_difference_fp64{suffix}", outcome.difference, ceiling=1e-12)
        if outcome.memory is None:
            report.note(f"no peak_memory_ratio{suffix}: this system does not tell a process's peak")
        else:
            peak = outcome.memory
            add(f"peak_memory_ratio{suffix}", peak[OURS] / peak[GATHER], ceiling=1.0)
            add(f"peak_memory_ratio_a2a{suffix}", peak[OURS] / peak[A2A])
    for outcome in outcomes:
        suffix = outcome.place.suffix
        for ranks in RANKS:
            row, tail = outcome.rows[ranks], "" if ranks == HEADLINE else f"_{ranks}ranks"
            if tail:
                add(f"end_to_end_ratio{suffix}{tail}", row.end_to_end_ratio(GATHER), floor=1.0)
                add(f"end_to_end_ratio_a2a{suffix}{tail}", row.end_to_end_ratio(A2A), floor=1.0)
                add(f"step_ratio{suffix}{tail}", row.step_ratio(GATHER))
                add(f"step_ratio_a2a{suffix}{tail}", row.step_ratio(A2A))
            corrected = row.end_to_end_ratio(A2A, excess=row.excess)
            add(f"end_to_end_ratio_a2a{suffix}{tail}_true_reduce", corrected)
    steps = {o.place.suffix: median(o.rows[HEADLINE].timings[OURS].stepping) for o in outcomes}
    if len(steps) > 1:
        add("step_slowest_of_fastest_link", max(steps.values()) / min(steps.values()), ceiling=1.25)
    for suffix, seconds in steps.items():
        add(f"step_ms{suffix}", seconds * 1e3)
    table = report.table(
        f"{SIZE.parameters / 1e6:.1f} M parameters, {SIZE.batch * SIZE.shape.context} tokens a step",
        "link, ranks, method",
        "optimizer ms",
        "forward, backward ms",
        "whole ms",
        "optimizer CPU ms",
        "MB sent",
        "collectives",
        "peak MB",
    )
    for outcome in outcomes:
        _rows(table, outcome)
        _notes(report, outcome)
    report.note(
        "ms are medians of the slowest rank's, each phase from a barrier; ratios are medians over rounds in"
        " which every method made one step. CPU ms are of all ranks; MB sent are what the kernel counts at a"
        " rank's interface in a step; collectives are those of one optimizer step; peak MB are of the fullest"
        f" of {HEADLINE} ranks, above the process without a model"
    )
    report.note(
        "all methods share model, data, momentum, fp32 Newton-Schulz and AdamW; the baselines step plain"
        " views of FSDP2's shards, which spares them DTensor dispatch; the gather is one a matrix, as"
        " DTensor.full_tensor does it. Ours picks its collectives by timing on loopback, by the cost model"
        " on a link"
    )


def _rows(table: Table, outcome: Outcome) -> None:
    for ranks, row in outcome.rows.items():
        for method, timing in row.timings.items():
            known = ranks == HEADLINE and outcome.memory is not None
            table.row(
                f"{outcome.place.title}, {ranks}, {method}",
                median(timing.stepping) * 1e3,
                median(timing.training) * 1e3,
                median(timing.whole) * 1e3,
                median(timing.cpu) * 1e3,
                timing.megabytes,
                timing.collectives,
                outcome.memory[method] / 1e6 if known and outcome.memory is not None else "",
            )


def _notes(report: Report, outcome: Outcome) -> None:
    costs = ", ".join(
        f"{row.excess * 1e3:.0f} ms of {median(row.timings[A2A].whole) * 1e3:.0f} at {ranks} ranks"
        for ranks, row in outcome.rows.items()
    )
    report.note(
        f"{outcome.place.title}: gloo runs FSDP2's reduce_scatter as an all-reduce, which an all-to-all and a"
        f" sum would beat by {costs}; the figures _true_reduce take that off the a2a baseline's step"
    )
