"""The picture of a run in which processes come and go: its loss on the band, its votes, what happened."""

from __future__ import annotations

from bisect import bisect
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.churn_band import Band
from bench.churn_play import FEWEST, MOST, Course

BLUE, GRAY, RED, DARK = "#0b6e99", "#8a8a8a", "#c8553d", "#3a3a3a"
# What is marked: kind, text, color; from top to bottom.
MARKS: Final = (
    ("come", "a node comes", "#588157"),
    ("leave", "a node leaves", "#d99a2b"),
    ("freeze", "a node freezes", "#56b4c9"),
    ("die", "a node is killed", RED),
    ("suspend", "the coordinator is stopped", GRAY),
    ("crash", "the coordinator is killed", DARK),
)
DOWN: Final = ("suspend", "crash")


def draw(path: Path, course: Course, band: Band) -> None:
    """Write it as a PNG. All panels are over the rounds; the uppermost axis tells minutes."""
    figure = Figure(figsize=(9.6, 7.0), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    loss, voters, events = figure.subplots(3, 1, sharex=True, height_ratios=(5.0, 2.0, 1.9))
    _loss(loss, course, band)
    _voters(voters, course)
    _events(events, course)
    for axes in (loss, voters, events):
        for kind in DOWN:
            for index in course.rounds_of(kind):
                axes.axvline(index, color=DARK, linewidth=0.6, alpha=0.25, zorder=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    events.set_xlabel("rounds")
    events.set_xlim(0, len(course.voters))
    figure.align_ylabels([loss, voters])
    _minutes(loss, course)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _loss(axes: Axes, course: Course, band: Band) -> None:
    low = [loss - band.margin for loss in band.low]
    high = [loss + band.margin for loss in band.high]
    outer = "± the range of their seeds"
    axes.fill_between(band.rounds, low, high, color=BLUE, alpha=0.12, linewidth=0, label=outer)
    inner = f"quiet runs of {FEWEST} and of {MOST} nodes"
    axes.fill_between(band.rounds, band.low, band.high, color=BLUE, alpha=0.28, linewidth=0, label=inner)
    if course.losses:
        axes.plot(*zip(*course.losses, strict=True), color=RED, linewidth=1.5, label="this run")
    # The first point is far above all that follow, and would press them together.
    axes.set_ylim(min(low) - 0.02, high[min(1, len(high) - 1)] + 0.02)
    axes.set_ylabel("validation loss, nats per token")
    axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.7)
    axes.legend(frameon=False, fontsize=9)


def _voters(axes: Axes, course: Course) -> None:
    rounds = range(len(course.voters))
    axes.fill_between(rounds, course.voters, step="post", color="#84b5cb", linewidth=0)
    axes.set_ylim(0, MOST + 0.5)
    axes.set_yticks([0, FEWEST, MOST])
    axes.set_ylabel("votes of a round")
    axes.grid(True, axis="y", color="#e4e4e4", linewidth=0.7)


def _events(axes: Axes, course: Course) -> None:
    labels = []
    for row, (kind, text, color) in enumerate(MARKS):
        rounds = course.rounds_of(kind)
        axes.plot(rounds, [row] * len(rounds), "|", color=color, markersize=8, markeredgewidth=1.4)
        labels.append(f"{text} ({len(rounds)})")
    axes.set_yticks(range(len(MARKS)), labels)
    axes.set_ylim(len(MARKS) - 0.4, -0.6)
    axes.tick_params(axis="y", labelsize=8, length=0)


def _minutes(axes: Axes, course: Course) -> None:
    """Tell the minutes above the rounds, which do not pass evenly."""
    times = sorted(course.commits.values())
    apart = len(times) // 20  # rounds between two texts, at least
    places: list[tuple[int, str]] = []
    for minute in range(1, int((times[-1] - times[0]) // 60) + 1):
        index = bisect(times, times[0] + 60 * minute)
        if not places or index - places[-1][0] >= apart:
            places.append((index, f"{minute} min"))
    upper = axes.secondary_xaxis("top")
    upper.set_xticks([index for index, _ in places], [text for _, text in places])
    upper.tick_params(labelsize=8, length=3, color=GRAY, labelcolor=GRAY)
    upper.spines["top"].set_visible(False)
