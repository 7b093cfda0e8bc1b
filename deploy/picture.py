"""The picture of a comparison: loss over bytes (log x) and over steps, side by side, as a PNG.

Drawn on matplotlib's Agg canvas directly: no display, no global pyplot state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from protos.units import format_bytes

_COLORS = ("#0b6e99", "#c8553d", "#588157", "#6d597a")


@dataclass(frozen=True)
class Curve:
    """One run of a picture.

    ``steps`` count from 1 and ``losses`` are nats per token of the training batch at them; ``checks`` are
    ``(step, validation loss)``; ``step_bytes`` is what a node sends and receives in one step. Points that
    are not finite are left out.
    """

    label: str
    steps: Sequence[int]
    losses: Sequence[float]
    step_bytes: float
    checks: Sequence[tuple[int, float]] = field(default_factory=tuple)


def smooth(values: Sequence[float], span: int) -> list[float]:
    """Mean over ``span`` values around each (fewer, but as many on both sides, towards the ends)."""
    half, last, out = span // 2, len(values) - 1, []
    for index in range(len(values)):
        reach = min(half, index, last - index)
        window = values[index - reach : index + reach + 1]
        out.append(sum(window) / len(window))
    return out


def draw(path: Path, title: str, curves: Sequence[Curve], *, unit: str = "nats per byte") -> None:
    """Write the PNG of ``curves`` to ``path``.

    Raises:
        ValueError: no curve has a finite point.
        OSError: the file cannot be written.
    """
    if not any(math.isfinite(loss) for curve in curves for loss in curve.losses):
        raise ValueError("there is nothing to draw: no run has a finite loss")
    figure = Figure(figsize=(11.5, 4.6), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for curve, color in zip(curves, _COLORS, strict=False):
        _line(left, curve, color, curve.step_bytes)
        _line(right, curve, color, 1.0)
    if any(curve.step_bytes > 0 for curve in curves):
        left.set_xscale("log")
    left.set_xlabel("bytes sent and received by a node (log scale)")
    left.set_ylabel(f"loss, {unit}")
    left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_bytes(x)))
    left.xaxis.set_minor_formatter(NullFormatter())
    right.set_xlabel("steps")
    for axes in (left, right):
        axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=9)
    _limit(left, curves)
    figure.suptitle(title, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)  # replaces the figure's canvas
    figure.savefig(path, format="png")


def _line(axes: Axes, curve: Curve, color: str, scale: float) -> None:
    points = [(s, v) for s, v in zip(curve.steps, curve.losses, strict=True) if math.isfinite(v)]
    checks = [(s, v) for s, v in curve.checks if math.isfinite(v)]
    if points:
        steps = np.array([s for s, _ in points], dtype=float)
        losses = [v for _, v in points]
        axes.plot(steps * scale, losses, color=color, alpha=0.15, linewidth=0.8)
        axes.plot(
            steps * scale,
            smooth(losses, max(3, len(losses) // 30)),
            color=color,
            alpha=1.0 if not checks else 0.55,
            linewidth=1.2,
            label=f"{curve.label}, training",
        )
    if checks:
        x = np.array([s for s, _ in checks], dtype=float) * scale
        y = [v for _, v in checks]
        label = f"{curve.label}, validation"
        axes.plot(x, y, color=color, marker="o", markersize=4, linewidth=1.6, label=label)


def _limit(axes: Axes, curves: Sequence[Curve]) -> None:
    """Cut the first steep steps off, so that the rest of the curves can be told apart."""
    losses = sorted(v for curve in curves for v in curve.losses if math.isfinite(v))
    checks = [v for curve in curves for _, v in curve.checks if math.isfinite(v)]
    low = min(losses[:1] + checks)
    high = losses[min(len(losses) - 1, math.ceil(0.95 * len(losses)))]
    margin = max(0.04 * (high - low), 1e-3)
    axes.set_ylim(low - margin, high + margin)
