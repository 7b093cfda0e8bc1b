"""What came out of the demo: numbers from the nodes' event logs, a summary, JSON and the picture."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from deploy.table import MISSING, number, percent
from protos.allreduce import ring_bytes
from protos.units import format_bytes, format_duration


@dataclass
class Course:
    """One run. Losses in nats per token; ``checks`` are (step, validation loss, bits per byte).

    Steps are those of the local optimizer: an exchange closes one of them, or several together.
    """

    method: str
    processes: int
    parameters: int
    steps: list[int] = field(default_factory=list)  # the last of each round, from 1
    losses: list[float] = field(default_factory=list)
    checks: list[tuple[int, float, float]] = field(default_factory=list)
    step_bytes_up: float = 0.0  # of a node
    step_bytes_down: float = 0.0
    tokens: int = 0  # of all nodes
    seconds: float = 0.0  # from the first to the last step
    busy_seconds: float = 0.0  # CPU time of the nodes in all rounds, without evaluations
    compute_share: float = math.nan  # of it, in forward and backward
    coordinator_seconds: float = 0.0  # CPU time of the coordinator since the nodes were started
    agreement: float = math.nan  # mean over steps and nodes

    @property
    def last_step(self) -> int:
        """Steps made; 0 before the first."""
        return self.steps[-1] if self.steps else 0

    @property
    def step_bytes(self) -> float:
        """Sent and received by a node in a step."""
        return self.step_bytes_up + self.step_bytes_down

    @property
    def validation_loss(self) -> float:
        """The last one measured, NaN if none was."""
        return self.checks[-1][1] if self.checks else math.nan

    @property
    def bits_per_byte(self) -> float:
        """The last one measured, NaN if none was."""
        return self.checks[-1][2] if self.checks else math.nan


@dataclass(frozen=True)
class Agreement:
    """Whether the nodes held the same shared state: digests compared round by round."""

    rounds: int  # with a digest from every node
    equal: int  # of them, with one digest
    digest: str  # after the last round

    @property
    def holds(self) -> bool:
        """All rounds, and at least one."""
        return 0 < self.rounds == self.equal


def rounds_of(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The applied rounds of an event log."""
    return [event for event in events if event["event"] == "RoundDone"]


def _value(value: float | None) -> float:
    return math.nan if value is None else float(value)


def course_of(method: str, logs: Sequence[Sequence[dict[str, Any]]], seconds: float) -> Course:
    """Put the event logs of all nodes of a run together; the loss of a step is the mean over its nodes.

    Raises:
        ValueError: no log, or one without its start.
    """
    started = [event for log in logs for event in log if event["event"] == "Started"]
    if not logs or len(started) < len(logs):
        raise ValueError("an event log lacks its start")
    course = Course(method, len(logs), started[0]["parameters"], seconds=seconds)
    steps = _steps_after(logs)
    losses: dict[int, list[float]] = {}
    agreements: list[float] = []
    compute = busy = 0.0
    for log in logs:
        rounds = rounds_of(log)
        for event in rounds:
            step = steps[event["round"]]
            loss, agreement = _value(event["loss"]), _value(event["agreement"])
            losses.setdefault(step, []).extend([loss] if math.isfinite(loss) else [])
            agreements += [agreement] if event["counted"] and math.isfinite(agreement) else []
            if event["validation_loss"] is not None:
                course.checks.append((step, event["validation_loss"], _value(event["bits_per_byte"])))
            course.tokens += event["tokens"]
            compute += event["compute_seconds"]
            busy += event["busy_seconds"]
        if rounds:
            trained = sum(event.get("micro_steps", 1) for event in rounds)
            course.step_bytes_up += rounds[-1]["bytes_up"] / trained / len(logs)
            course.step_bytes_down += rounds[-1]["bytes_down"] / trained / len(logs)
    course.checks.sort()
    course.steps = sorted(losses)
    course.losses = [sum(v) / len(v) if v else math.nan for _, v in sorted(losses.items())]
    course.busy_seconds, course.compute_share = busy, compute / busy if busy > 0 else math.nan
    course.agreement = sum(agreements) / len(agreements) if agreements else math.nan
    return course


def _steps_after(logs: Sequence[Sequence[dict[str, Any]]]) -> dict[int, int]:
    """Steps that a node has made after each round."""
    lengths = {event["round"]: int(event.get("micro_steps", 1)) for log in logs for event in rounds_of(log)}
    totals = accumulate(lengths[index] for index in sorted(lengths))
    return dict(zip(sorted(lengths), totals, strict=True))


def with_ring_bytes(course: Course, nodes: int) -> Course:
    """``course`` of a single process, with the bytes that ``nodes`` nodes would exchange in an fp32 ring."""
    course.step_bytes_up = course.step_bytes_down = ring_bytes(course.parameters, nodes)
    return course


def agreement_of(logs: Sequence[Sequence[dict[str, Any]]]) -> Agreement:
    """Compare the digests that the nodes computed after each round."""
    digests: dict[int, list[str]] = {}
    for log in logs:
        for event in rounds_of(log):
            digests.setdefault(event["round"], []).append(event["digest"])
    full = {index: found for index, found in digests.items() if len(found) == len(logs)}
    equal = sum(len(set(found)) == 1 for found in full.values())
    return Agreement(len(full), equal, full[max(full)][0] if full else "")


@dataclass(frozen=True)
class Results:
    """Everything the demo found out. ``seconds`` is wall time from its start to here."""

    votes: Course
    agreement: Agreement
    baseline: Course | None
    sample: str
    seconds: float

    @property
    def ring_ratio(self) -> float:
        """How many times more bytes an fp32 ring between as many nodes passes over a node's link."""
        ring = 2 * ring_bytes(self.votes.parameters, self.votes.processes)
        return ring / self.votes.step_bytes if self.votes.step_bytes else math.inf

    def to_json(self) -> str:
        """All numbers; NaN and infinities are null."""
        ring = ring_bytes(self.votes.parameters, self.votes.processes)
        values = {
            "votes": _course_json(self.votes),
            "baseline": _course_json(self.baseline) if self.baseline else None,
            "ring_fp32_bytes_up": ring,
            "ring_fp32_ratio": self.ring_ratio,
            "bits_per_parameter": 8 * self.votes.step_bytes / self.votes.parameters,
            "digests_equal": self.agreement.holds,
            "rounds_compared": self.agreement.rounds,
            "digest": self.agreement.digest,
            "sample": self.sample,
            "seconds": self.seconds,
        }
        return json.dumps(_finite(values), indent=2, allow_nan=False) + "\n"


def _course_json(course: Course) -> dict[str, Any]:
    last = {"validation_loss": course.validation_loss, "bits_per_byte": course.bits_per_byte}
    return {**last, **asdict(course)}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def summary(results: Results) -> Table:
    """The votes and, beside them, the baseline."""
    votes, baseline = results.votes, results.baseline
    table = Table(box=box.SIMPLE_HEAD, title="summary", title_justify="left", title_style="bold")
    table.add_column("")
    courses = [votes] + ([baseline] if baseline else [])
    for course in courses:
        what = "1 process" if course.processes == 1 else f"{course.processes} nodes"
        table.add_column(Text(f"{course.method}, {what}"), justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells[: len(courses)])

    def each(name: str, text: Any) -> None:
        row(name, *(text(course) for course in courses))

    each("validation, bits per byte", lambda c: number(c.bits_per_byte))
    each("validation, nats", lambda c: number(c.validation_loss))
    each("steps", lambda c: f"{c.last_step:,}")
    if votes.last_step > len(votes.steps):
        row("exchanges", f"{len(votes.steps):,}", MISSING)
    each("tokens", lambda c: f"{c.tokens:,}")
    ring = f"{format_bytes(2 * ring_bytes(votes.parameters, votes.processes))} (fp32 ring)"
    row("bytes a step and node", format_bytes(votes.step_bytes), ring)
    each("bits a parameter", lambda c: f"{8 * c.step_bytes / c.parameters:.2f}")
    each("whole run and node", lambda c: format_bytes(c.step_bytes * c.last_step))
    if math.isfinite(votes.agreement):
        row("vote agreement", percent(votes.agreement), MISSING)
    each("CPU time in forward, backward", lambda c: percent(c.compute_share))
    each("tokens a second", lambda c: f"{c.tokens / c.seconds:,.0f}" if c.seconds > 0 else MISSING)
    each("seconds of training", lambda c: format_duration(c.seconds))
    return table


def verdict(results: Results) -> str:
    """Whether all nodes held the same bits, and the ratio of bytes, in words."""
    agreement = results.agreement
    nodes = results.votes.processes
    if agreement.holds:
        same = f"all {nodes} nodes held the same bits after each of {agreement.rounds} rounds"
        same += f" (digest {agreement.digest})"
    else:
        same = f"THE NODES DIFFERED: equal digests in {agreement.equal} of {agreement.rounds} rounds"
    return f"{same}; an fp32 ring all-reduce would have moved {results.ring_ratio:.1f} times the bytes"


def draw(results: Results, path: Path, unit: str = "nats per byte") -> None:
    """The picture; see :func:`deploy.picture.draw`."""
    from deploy import picture

    def curve(course: Course, label: str) -> picture.Curve:
        checks = [(step, loss) for step, loss, _ in course.checks]
        return picture.Curve(label, course.steps, course.losses, course.step_bytes, checks)

    votes = results.votes
    curves = [curve(votes, f"{votes.method}, {votes.processes} nodes")]
    if results.baseline is not None:
        curves.append(
            curve(results.baseline, f"{results.baseline.method}, one process (bytes of an fp32 ring)")
        )
    title = f"{votes.parameters:,} parameters, {votes.tokens:,} tokens"
    picture.draw(
        path, f"{title}: {results.ring_ratio:.0f} times fewer bytes than an fp32 ring", curves, unit=unit
    )
