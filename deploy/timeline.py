"""Timelines: when the phases of some rounds went on at each node, from logs of events, as a PNG.

Drawn on matplotlib's Agg canvas directly: no display, no global pyplot state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from deploy.errors import UserError
from deploy.event_log import read_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from node.events import RoundDone

ROWS: Final = {
    "compute": ("data", "compute"),
    "propose": ("propose",),
    "exchange": ("flight", "exchange"),
    "apply": ("apply", "digest"),
    "evaluate": ("evaluate",),
}
LOOKS: Final = {
    "data": ("#56b4c9", "reading data"),
    "compute": ("#0b6e99", "forward and backward"),
    "propose": ("#588157", "writing the contribution"),
    "flight": ("#f2c6a5", "exchanging meanwhile"),
    "exchange": ("#c8553d", "waiting for the result"),
    "apply": ("#6d597a", "applying it"),
    "digest": ("#b7a3c4", "digest of the state"),
    "evaluate": ("#d99a2b", "validation loss"),
}
INCHES: Final = 0.27  # of a row


@dataclass(frozen=True)
class Round:
    """One round of a node.

    Attributes:
        number: from 0.
        began: seconds since 1970.
        spans: phase, begin and end, in seconds since the round began.
    """

    number: int
    began: float
    spans: tuple[tuple[str, float, float], ...]

    @property
    def seconds(self) -> float:
        """To the end of its last phase."""
        return max((end for _, _, end in self.spans), default=0.0)


@dataclass(frozen=True)
class NodeLog:
    """The rounds that a node has finished, in their order."""

    name: str
    rounds: tuple[Round, ...]

    @classmethod
    def of(cls, name: str, events: Iterable[RoundDone]) -> NodeLog:
        """From events themselves."""
        return cls(name, tuple(Round(event.round, event.began, event.spans) for event in events))


@dataclass(frozen=True)
class Panel:
    """Nodes whose timelines stand together, all with the same rounds."""

    title: str
    nodes: tuple[NodeLog, ...]

    @property
    def began(self) -> float:
        """When the first of the nodes began the first of the rounds."""
        return min(node.rounds[0].began for node in self.nodes)


def read(path: Path) -> NodeLog:
    """Read what ``--events`` of a node wrote; a line that was never finished is left out. Where the node was
    started again, it goes on with the round from which it did.

    Raises:
        UserError: it is no log of events, or holds no timeline.
        OSError: it cannot be read.
    """
    name, rounds = path.stem, dict[int, Round]()
    for line in read_lines(path):
        if line.kind == "Joined":
            name = str(line.values.get("node") or name)
        elif line.kind == "Started" and isinstance(first := line.values.get("round"), int):
            rounds = {number: done for number, done in rounds.items() if number < first}
        elif line.kind == "RoundDone":
            done = _round(path, line.values)
            rounds[done.number] = done
    if not rounds:
        raise UserError(f"{path} holds no finished round: a timeline needs at least one")
    return NodeLog(name, tuple(rounds.values()))


def _round(path: Path, event: Mapping[str, Any]) -> Round:
    try:
        number, began = int(event["round"]), float(event["began"])
        spans = tuple((str(name), float(begin), float(end)) for name, begin, end in event["spans"])
        times = [began, *(moment for span in spans for moment in span[1:])]
        if not spans or not all(map(math.isfinite, times)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path}: an event of a round does not tell when its phases went on; the node that wrote it has "
            "an older version of Atoll"
        ) from None
    return Round(number, began, spans)


def together(title: str, nodes: Sequence[NodeLog], *, first: int | None = None, count: int = 4) -> Panel:
    """Cut ``count`` rounds that all nodes have finished: from number ``first`` on, or the last ones.

    Raises:
        UserError: there is no such round.
    """
    shared = sorted(set.intersection(*({done.number for done in node.rounds} for node in nodes)))
    wanted = [number for number in shared if first is None or number >= first]
    wanted = wanted[:count] if first is not None else wanted[-count:]
    if not wanted:
        names = ", ".join(node.name for node in nodes)
        known = f"rounds {shared[0] + 1} to {shared[-1] + 1}" if shared else "no round that all have finished"
        raise UserError(f"there is nothing to draw: the logs of {names} hold {known}")
    cut = [replace(n, rounds=tuple(r for r in n.rounds if r.number in wanted)) for n in nodes]
    return Panel(title, tuple(cut))


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write the PNG of ``panels``, one above the other on one scale of seconds.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [len(_rows(panel)) for panel in panels]
    figure = Figure(
        figsize=(11.5, 1.5 + INCHES * sum(heights) + 0.75 * len(panels)), dpi=130, layout="constrained"
    )
    columns = figure.subplots(
        len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for panel, axes in zip(panels, columns[:, 0], strict=True):
        _panel(axes, panel)
    columns[-1, 0].set_xlabel("seconds since the first of these rounds began")
    seen = {name for panel in panels for node in panel.nodes for r in node.rounds for name, _, _ in r.spans}
    patches = [Patch(color=color, label=text) for name, (color, text) in LOOKS.items() if name in seen]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)  # replaces the figure's canvas
    figure.savefig(path, format="png")


def _rows(panel: Panel) -> list[tuple[NodeLog, str]]:
    """Node and row of every line of a panel, from the top; rows in which nothing happens are left out."""
    seen = {name for node in panel.nodes for r in node.rounds for name, _, _ in r.spans}
    rows = [row for row, phases in ROWS.items() if seen.intersection(phases)]
    return [(node, row) for node in panel.nodes for row in rows]


def _panel(axes: Axes, panel: Panel) -> None:
    rows = _rows(panel)
    for line, (node, row) in enumerate(rows):
        for phase in ROWS[row]:
            bars = [
                (done.began - panel.began + begin, end - begin)
                for done in node.rounds
                for name, begin, end in done.spans
                if name == phase
            ]
            axes.broken_barh(bars, (line - 0.38, 0.76), color=LOOKS[phase][0], linewidth=0)
        if line and node is not rows[line - 1][0]:
            axes.axhline(line - 0.5, color="#bbbbbb", linewidth=0.8)
    leading = min(panel.nodes, key=lambda node: node.rounds[0].began)
    for done in leading.rounds:
        x = done.began - panel.began
        axes.axvline(x, color="#888888", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"round {done.number + 1}",
            (x, -0.5),
            xytext=(3, 3),
            textcoords="offset points",
            fontsize=8,
            color="#666666",
        )
    axes.set_yticks(range(len(rows)), [f"{node.name}  {row}" for node, row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    axes.set_title(panel.title, fontsize=10, loc="left", pad=16)
    axes.grid(True, axis="x", which="major", color="#e5e5e5", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
