"""The two pictures of a comparison: loss over tokens, and the front of loss over bytes (log x), as PNGs.

Drawn on matplotlib's Agg canvas directly: no display, no global pyplot state.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, NullFormatter

from deploy.compare_outcome import Outcome
from deploy.compare_results import Comparison, Row
from protos.units import format_bytes

COLORS: Final = (
    "#0b6e99", "#c8553d", "#588157", "#6d597a", "#d99a2b", "#3a3a3a",
    "#56b4c9", "#e58a76", "#9bc53d", "#b07aa1", "#8c564b", "#7f7f7f",
)  # fmt: skip
LABEL_PIXELS: Final = 16.0  # between the lines of neighbouring labels
LABEL_REACH: Final = 210.0  # pixels to the right within which a label may cover another


class NothingToDraw(ValueError):
    """No run of the comparison has a finite loss."""


def draw_curves(comparison: Comparison, path: Path) -> None:
    """Write ``loss over tokens``: the mean over the seeds, and their range as a band.

    Raises:
        NothingToDraw: no validation loss is finite.
    """
    _check(comparison)
    figure = Figure(figsize=(8.6, 5.0), dpi=130, layout="constrained")
    axes = figure.subplots()
    ends = []
    for index, (row, group) in enumerate(zip(comparison.rows, comparison.outcomes, strict=True)):
        tokens, means, lows, highs = _course(group)
        if not tokens:
            continue
        color = COLORS[index % len(COLORS)]
        axes.plot(tokens, means, color=color, marker="o", markersize=3, linewidth=1.5, label=row.label)
        if len(group) > 1:
            axes.fill_between(tokens, lows, highs, color=color, alpha=0.15, linewidth=0)
        ends.append(means)
    axes.set_xlabel("tokens, all nodes together")
    axes.set_ylabel("validation loss, nats per token")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    _style(axes)
    axes.legend(frameon=False, fontsize=8)
    # The first point of a run is far above all that follow, and would press them together.
    low = min(min(means) for means in ends)
    high = max(means[min(1, len(means) - 1)] for means in ends)
    margin = max(0.05 * (high - low), 1e-3)
    axes.set_ylim(low - margin, high + margin)
    _save(figure, path)


def draw_front(comparison: Comparison, path: Path) -> None:
    """Write ``loss over bytes``: one point for each run, and a line along those that no other beats.

    Raises:
        NothingToDraw: no validation loss is finite.
    """
    _check(comparison)
    figure = Figure(figsize=(8.6, 5.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    rows = [(index, row) for index, row in enumerate(comparison.rows) if math.isfinite(row.loss)]
    best = sorted((row for _, row in rows if row.front), key=lambda row: row.traffic)
    axes.plot(
        [row.traffic for row in best],
        [row.loss for row in best],
        color="#999999",
        linewidth=1.2,
        linestyle="--",
        zorder=1,
        label="front",
    )
    for index, row in rows:
        color = COLORS[index % len(COLORS)]
        size, fill = (48, color) if row.front else (30, "white")
        axes.scatter(
            [row.traffic], [row.loss], s=size, color=fill, edgecolors=color, linewidths=1.5, zorder=3
        )
        if row.std > 0:
            axes.errorbar([row.traffic], [row.loss], yerr=[row.std], color=color, linewidth=1, zorder=2)
    axes.set_xscale("log" if all(row.traffic > 0 for _, row in rows) else "symlog")
    axes.set_xlabel("payload sent and received by a node in the whole run (log scale)")
    axes.set_ylabel("validation loss, nats per token")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_bytes(x)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.14, y=0.1)
    _style(axes)
    figure.canvas.draw()  # fixes the layout, which the places of the labels follow from
    _label(axes, [row for _, row in rows])
    axes.legend(frameon=False, fontsize=8, loc="upper right")
    _save(figure, path)


def _course(group: Sequence[Outcome]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Tokens, and mean, lowest and highest validation loss over the seeds, where all are finite."""
    columns = []
    for points in zip(*(outcome.points for outcome in group), strict=True):
        losses = [point.validation_loss for point in points]
        if all(map(math.isfinite, losses)):
            columns.append((points[0].tokens, statistics.fmean(losses), min(losses), max(losses)))
    tokens, means, lows, highs = (
        (list(column) for column in zip(*columns, strict=True)) if columns else ([],) * 4
    )
    return tokens, means, lows, highs


def _label(axes: Axes, rows: Sequence[Row]) -> None:
    """Write the labels right of their points, moved up where one would cover another."""
    places = [(*axes.transData.transform((row.traffic, row.loss)), row) for row in rows]
    taken: list[tuple[float, float]] = []
    for x, y, row in sorted(places, key=lambda place: place[1]):
        at = y
        while any(abs(x - x0) < LABEL_REACH and abs(at - y0) < LABEL_PIXELS for x0, y0 in taken):
            at += 2.0
        taken.append((x, at))
        axes.annotate(
            row.label,
            (row.traffic, row.loss),
            xytext=(7, (at - y) * 72 / axes.figure.dpi - 3),
            textcoords="offset points",
            fontsize=8,
            fontweight="bold" if row.front else "normal",
            path_effects=[withStroke(linewidth=2.5, foreground="white")],
            zorder=4,
        )


def _style(axes: Axes) -> None:
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)


def _check(comparison: Comparison) -> None:
    if not any(math.isfinite(row.loss) for row in comparison.rows):
        raise NothingToDraw("there is nothing to draw: every run has diverged")


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)  # replaces the figure's canvas
    figure.savefig(path, format="png")
