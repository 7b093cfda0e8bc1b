"""What a comparison found: one row for each compared run, the front of loss against bytes, a table, JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.compare_outcome import Outcome, finite
from deploy.table import MISSING, number
from protos.allreduce import FP32_BYTES
from protos.units import format_bytes

FRONT: Final = "●"


@dataclass(frozen=True)
class Row:
    """One compared run, over its seeds.

    Attributes:
        label, method: what it is.
        loss, std: validation loss at the end, nats per token: mean and standard deviation over the seeds (0
            for one). NaN if a seed has diverged.
        difference: mean over the seeds of the loss minus that of the first row, on the same weights and data.
        bytes_up, bytes_down: payload of a node over the whole run.
        ratio: how many times more bytes, both ways, an exchange of fp32 gradients in every step would cost.
        bits: sent by a node for each parameter and step.
        state: bytes that a node's optimizer keeps for each parameter, beside the model.
        rounds, steps, tokens, nodes, parameters: of each seed's run.
        front: whether no other run has both a lower loss and fewer bytes.
    """

    label: str
    method: str
    loss: float
    std: float
    difference: float
    bytes_up: int
    bytes_down: int
    ratio: float
    bits: float
    state: float
    rounds: int
    steps: int
    tokens: int
    nodes: int
    parameters: int
    front: bool

    @property
    def traffic(self) -> int:
        """Bytes over a node's link in the whole run, both ways."""
        return self.bytes_up + self.bytes_down


@dataclass(frozen=True)
class Comparison:
    """All of it.

    Attributes:
        rows: in the order that was asked for.
        outcomes: of each row, in the order of the seeds.
        notes: what a reader must know, a sentence each.
    """

    rows: tuple[Row, ...]
    outcomes: tuple[tuple[Outcome, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, outcomes: Sequence[Sequence[Outcome]], notes: Sequence[str] = ()) -> Comparison:
        """``outcomes`` holds a sequence for each compared run, with the same seeds in the same order."""
        losses = [[outcome.validation_loss for outcome in group] for group in outcomes]
        traffic = [group[0].bytes_up + group[0].bytes_down for group in outcomes]
        means = [statistics.fmean(values) for values in losses]
        best = front(list(zip(traffic, means, strict=True)))
        rows = [
            _row(group, values, losses[0], index in best)
            for index, (group, values) in enumerate(zip(outcomes, losses, strict=True))
        ]
        return cls(tuple(rows), tuple(tuple(group) for group in outcomes), tuple(notes))

    def to_json(self, *, curves: bool = True) -> dict[str, Any]:
        """All numbers, with the points of every run if ``curves``; NaN and infinities are null."""
        methods = []
        for row, group in zip(self.rows, self.outcomes, strict=True):
            runs = [outcome.to_json() for outcome in group]
            if not curves:
                for run in runs:
                    del run["points"]
            methods.append({**asdict(row), "runs": runs})
        values = {
            "methods": methods,
            "front": [row.label for row in sorted(self.rows, key=lambda row: row.traffic) if row.front],
            "notes": list(self.notes),
        }
        result: dict[str, Any] = finite(values)
        return result


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Which of ``points`` (bytes, loss) nobody beats: no other has fewer bytes and no more loss, or less loss
    and no more bytes. A loss that is NaN is beaten."""
    best, lowest = set(), math.inf
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], _last(points[i][1]))):
        loss = points[index][1]
        if loss < lowest:
            best.add(index)
            lowest = loss
    return best


def _last(loss: float) -> float:
    return math.inf if math.isnan(loss) else loss


def _row(group: Sequence[Outcome], losses: Sequence[float], first: Sequence[float], on_front: bool) -> Row:
    one = group[0]
    traffic = one.bytes_up + one.bytes_down
    return Row(
        label=one.label,
        method=one.method,
        loss=statistics.fmean(losses),
        std=statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else 0.0,
        difference=statistics.fmean(loss - base for loss, base in zip(losses, first, strict=True)),
        bytes_up=one.bytes_up,
        bytes_down=one.bytes_down,
        ratio=2 * FP32_BYTES * one.parameters * one.steps / traffic if traffic else math.inf,
        bits=8 * one.bytes_up / (one.parameters * one.steps),
        state=one.state_bytes / one.parameters,
        rounds=one.rounds,
        steps=one.steps,
        tokens=one.tokens,
        nodes=one.nodes,
        parameters=one.parameters,
        front=on_front,
    )


def results_table(comparison: Comparison) -> RenderableType:
    """The rows as a table, with its legend and notes."""
    first = comparison.rows[0]
    seeds = len(comparison.outcomes[0])
    title = f"{first.tokens:,} tokens, {first.parameters:,} parameters, {first.nodes} node"
    title += f"{'s' * (first.nodes > 1)}, {seeds} seed{'s' * (seeds > 1)}"
    # Without padding, because the usual 80 columns are few for it; the box still leaves a space.
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=0)
    table.add_column("run", no_wrap=True)
    for name in ("loss", f"- {first.label}", "sent", "received", "fewer", "bits", "state"):
        table.add_column(name, justify="right")
    table.add_column(FRONT)
    for row in comparison.rows:
        table.add_row(
            Text(row.label),
            _loss(row, seeds),
            MISSING if row is first or not math.isfinite(row.difference) else f"{row.difference:+.4f}",
            format_bytes(row.bytes_up),
            format_bytes(row.bytes_down),
            f"{row.ratio:,.3g}x" if math.isfinite(row.ratio) else MISSING,
            f"{row.bits:.3g}",
            f"{row.state:.3g} B",
            FRONT if row.front else "",
        )
    legend = (
        "loss: validation, nats per token. sent, received: payload of a node in the whole run. fewer: how "
        "many times, than fp32 gradients through the same hub in every step (fp32 DDP). bits: sent for each "
        "parameter and step. state: kept by a node's optimizer for each parameter. "
        f"{FRONT}: no other run has a lower loss with fewer bytes."
    )
    notes = [Text(f"note: {note}", style="yellow") for note in comparison.notes]
    return Group(table, Text(legend, style="dim"), *notes)


def _loss(row: Row, seeds: int) -> str:
    if not math.isfinite(row.loss):
        return "diverged"
    return f"{row.loss:.4f} ±{row.std:.4f}" if seeds > 1 else number(row.loss, 4)
