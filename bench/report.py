"""What a bench returns, and the few helpers that all benches share.

A bench is a module with one function ``run(quick: bool) -> Report``, entered by name in
``bench.__main__.BENCHES``. It must end within 45 s on two cores when ``quick`` is true. A whole bench::

    from bench.report import Report, Table, interleave, median, median_ratio

    def run(quick: bool) -> Report:
        report = Report("example")
        times = interleave({"ours": work, "copy": copy}, repeats=5 if quick else 11)
        report.add("ours_of_copy", median_ratio(times["copy"], times["ours"]), floor=0.7)
        report.add("ours_seconds", median(times["ours"]))
        table = report.table("One core, 16 Mi parameters", "kernel", "ms")
        table.row("ours", median(times["ours"]) * 1e3)
        report.note("read is a xor of the same bytes")
        return report

Order the figures with ratios first and absolute times after them. ``floor`` and ``ceiling`` state the bar
that a figure has to hold; they are shown beside it, and ``python -m bench NAME --check`` fails below it.
The command prints tables, figures and notes, and as the last line of stdout the object of
:meth:`Report.to_json`.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

Cell = str | float | int


@dataclass(frozen=True)
class Bar:
    """What a figure has to hold: at least ``floor``, at most ``ceiling``; ``None`` where there is no bar."""

    floor: float | None = None
    ceiling: float | None = None

    def holds(self, value: float) -> bool:
        """True if ``value`` lies within the bar."""
        return (self.floor is None or value >= self.floor) and (self.ceiling is None or value <= self.ceiling)

    def __str__(self) -> str:
        parts = [f">= {self.floor:g}"] if self.floor is not None else []
        parts += [f"<= {self.ceiling:g}"] if self.ceiling is not None else []
        return " and ".join(parts)


@dataclass
class Table:
    """A titled table: the first column is text, the others are numbers or text."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]] = field(default_factory=list)

    def row(self, *cells: Cell) -> None:
        """Append one row; raises ``ValueError`` unless it has one cell for each column."""
        if len(cells) != len(self.columns):
            raise ValueError(f"table {self.title!r}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)


@dataclass
class Report:
    """The outcome of one bench: flat figures in the order they were added, their bars, tables and notes."""

    bench: str
    figures: dict[str, float] = field(default_factory=dict)
    bars: dict[str, Bar] = field(default_factory=dict)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pictures: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    def add(
        self, name: str, value: float, *, floor: float | None = None, ceiling: float | None = None
    ) -> None:
        """Add a figure; raises ``ValueError`` for a repeated name or a value that is not finite."""
        if name in self.figures:
            raise ValueError(f"bench {self.bench}: figure {name!r} is reported twice")
        if not math.isfinite(value):
            raise ValueError(f"bench {self.bench}: figure {name!r} is {value}, not a finite number")
        self.figures[name] = value if isinstance(value, int) else float(value)
        if floor is not None or ceiling is not None:
            self.bars[name] = Bar(floor, ceiling)

    def table(self, title: str, *columns: str) -> Table:
        """Start a table and return it for its rows."""
        table = Table(title, columns)
        self.tables.append(table)
        return table

    def note(self, text: str) -> None:
        """Add one line of explanation below the tables."""
        self.notes.append(text)

    def picture(self, name: str, draw: Callable[[Path], None]) -> None:
        """Add a picture that ``draw`` can write as a PNG."""
        self.pictures[name] = draw

    def write_pictures(self, figures: Path) -> None:
        """Write all pictures beside the file of the figures: ``methods-front.png`` by ``methods.json``."""
        for name, draw in self.pictures.items():
            draw(figures.with_name(f"{figures.stem}-{name}.png"))

    def missed(self) -> list[str]:
        """Figures outside their bars, one sentence each."""
        return [
            f"{name} is {format_number(self.figures[name])}, the bar is {bar}"
            for name, bar in self.bars.items()
            if not bar.holds(self.figures[name])
        ]

    def to_json(self) -> str:
        """One line: ``{"bench": NAME, "figures": {...}}``, figures rounded to six significant digits."""
        figures = {k: v if isinstance(v, int) else float(f"{v:.6g}") for k, v in self.figures.items()}
        return json.dumps({"bench": self.bench, "figures": figures})

    def print(self, console: Console) -> None:
        """Print tables, figures with their bars, and notes."""
        for table in self.tables:
            console.print(_rich_table(table.title, table.columns, table.rows))
        rows: list[tuple[Cell, ...]] = []
        for name, value in self.figures.items():
            bar = self.bars.get(name)
            verdict = "" if bar is None else f"{bar}  {'held' if bar.holds(value) else 'MISSED'}"
            rows.append((name, value, verdict))
        console.print(_rich_table(f"bench {self.bench}", ("figure", "value", "bar"), rows))
        for note in self.notes:
            console.print(note, markup=False, highlight=False)


def format_number(value: float) -> str:
    """Three or four significant digits, without an exponent between 0.001 and a million."""
    if isinstance(value, int) or (abs(value) >= 1000 and abs(value) < 1e15):
        return f"{value:,.0f}"
    if value == 0 or 1e-3 <= abs(value) < 1000:
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
    return f"{value:.3e}"


def _rich_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]]) -> RichTable:
    table = RichTable(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if index == 0 else "right", no_wrap=index == 0)
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else format_number(cell) for cell in row))
    return table


def interleave(
    cases: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.thread_time,
) -> dict[str, list[float]]:
    """Time ``cases`` round-robin and return the seconds of each, ``repeats`` samples in order.

    Sample i of every case comes from the same pass, so a ratio of two cases at the same index is taken
    under the same load. The default clock is the CPU time of the calling thread, which other processes on a
    busy machine do not add to; pass ``time.perf_counter`` where waiting belongs to the measurement.
    """
    times: dict[str, list[float]] = {name: [] for name in cases}
    for index in range(warmup + repeats):
        for name, case in cases.items():
            start = clock()
            case()
            seconds = clock() - start
            if index >= warmup:
                times[name].append(seconds)
    return times


def median(samples: Sequence[float]) -> float:
    """Median of the samples."""
    return float(statistics.median(samples))


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of samples taken in the same pass."""
    return float(statistics.median(a / b for a, b in zip(numerators, denominators, strict=True)))
