"""The command ``atoll compare``: simulate, show how it goes, and leave numbers and pictures in a folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deploy import compare
from deploy.compare_outcome import Outcome
from deploy.compare_pool import Job, Watcher, run_jobs
from deploy.compare_results import Comparison, results_table
from deploy.errors import UserError
from deploy.preset import Key
from deploy.table import number
from protos.runfile_text import advice


@dataclass(frozen=True)
class Options:
    """A user's choices; see the command's help."""

    names: Sequence[str]
    out: Path
    seeds: int = 3
    tokens: int | None = None
    jobs: int = 2
    values: Mapping[Key, Any] = field(default_factory=dict)


def compare_runs(options: Options, console: Console) -> Comparison:
    """Do all of it; ``console`` is told how it goes.

    Raises:
        UserError, RunFileError: runs that cannot be compared, or a folder that cannot be written.
        ProcessError: a process died.
        KeyboardInterrupt: Ctrl-C; runs that have ended are kept.
    """
    chosen = compare.entries(options.names, tokens=options.tokens, values=options.values)
    wanted = options.tokens or compare.trained_tokens(chosen[0].runfile(0))
    for entry in chosen:
        console.print(compare.describe(entry, wanted), markup=False, highlight=False, soft_wrap=True)
        for sentence in advice(entry.runfile(0)):
            console.print(f"{entry.label}: {sentence}", style="yellow", markup=False, soft_wrap=True)
    jobs = [Job(entry.label, entry.runfile(seed)) for entry in chosen for seed in range(options.seeds)]
    folder = options.out / "runs"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be made: {error.strerror or error}; choose another --out"
        ) from error
    try:
        with RichWatcher(console) as watcher:
            outcomes = run_jobs(jobs, options.jobs, folder=folder, watcher=watcher)
    except KeyboardInterrupt:
        kept = f"runs that have ended are kept in {folder}; the same command goes on with the others"
        console.print(kept, markup=False, highlight=False, soft_wrap=True)
        raise
    groups = [outcomes[start : start + options.seeds] for start in range(0, len(outcomes), options.seeds)]
    comparison = Comparison.of(groups, _notes(groups, wanted))
    _write(comparison, options.out)
    return comparison


def show(comparison: Comparison, out: Path, console: Console) -> None:
    """Print the table and where everything lies."""
    console.print(results_table(comparison))
    for name in ("loss.png", "front.png", "compare.json"):
        if (out / name).exists():
            console.print(str(out / name), markup=False, highlight=False, soft_wrap=True)


def _write(comparison: Comparison, out: Path) -> None:
    text = json.dumps(comparison.to_json(), indent=1, allow_nan=False)
    (out / "compare.json").write_text(text + "\n", encoding="utf-8")
    from deploy.compare_picture import NothingToDraw, draw_curves, draw_front

    try:
        draw_curves(comparison, out / "loss.png")
        draw_front(comparison, out / "front.png")
    except NothingToDraw:
        for name in ("loss.png", "front.png"):  # those of an earlier comparison would lie
            (out / name).unlink(missing_ok=True)


def _notes(groups: Sequence[Sequence[Outcome]], tokens: int) -> list[str]:
    notes = []
    for group in groups:
        one = group[0]
        if one.parameters != groups[0][0].parameters:
            notes.append(f"{one.label} trains another model, of {one.parameters:,} parameters")
        if one.tokens != tokens:
            off = one.tokens / tokens - 1
            more = "more" if off > 0 else "fewer"
            notes.append(f"{one.label} was trained on {abs(off):.1%} {more} tokens: its rounds cannot be cut")
    return notes


class RichWatcher(Watcher):
    """Bars on a terminal, a line for each run that has ended elsewhere. Use as a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal)
        self._all: TaskID | None = None
        self._running: dict[str, TaskID] = {}

    def __enter__(self) -> RichWatcher:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def begin(self, jobs: int, known: int) -> None:
        self._all = self._bars.add_task("runs", total=jobs, completed=known)
        if known:
            self._say(f"{known} of {jobs} runs are done already")

    def progress(self, name: str, share: float, loss: float) -> None:
        if name not in self._running:
            self._running[name] = self._bars.add_task(name, total=100)
        text = f"  {name}, loss {number(loss)}"
        self._bars.update(self._running[name], completed=round(100 * share), description=text)

    def done(self, outcome: Outcome) -> None:
        task = self._running.pop(outcome.name, None)
        if task is not None:
            self._bars.remove_task(task)
        if self._all is not None:
            self._bars.advance(self._all)
        self._say(
            f"{outcome.name}: {number(outcome.validation_loss, 4)} nats, {outcome.cpu_seconds:.0f} CPU s"
        )

    def _say(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)
