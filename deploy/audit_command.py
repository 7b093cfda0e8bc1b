"""The command `atoll audit`: the journal of a run is checked and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.options import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from coordinator.audit import Audit

EXAMPLE = "Example: atoll audit reef.journal"


def audit(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="The journal's folder, see 'atoll coordinator --journal'."),
    ],
    as_json: Json = False,
) -> None:
    """Check a run's journal: every sample trained at most once and accounted for, every result whole.

    A running coordinator may have it open. The exit code is 1 if anything is wrong.
    """
    from coordinator.audit import audit as check
    from coordinator.journal_reading import JournalReader

    with JournalReader(folder) as reader:
        found = check(reader.ledger)
    if as_json:
        typer.echo(json.dumps(plain(found)))
    else:
        from deploy.terminal import console

        console().print(shown(found))
    if not found.holds:
        raise typer.Exit(1)


def plain(found: Audit) -> dict[str, Any]:
    """An audit as JSON values. Rounds count from 0, as in events."""
    return {
        "holds": found.holds,
        "rounds": {
            "first": found.first,
            "next": found.following,
            "committed": found.rounds,
            "without_voters": found.voided,
            "agreed": found.agreed,
        },
        "samples": {
            "frontier": found.frontier,
            "trained": found.trained,
            "returned": found.returned,
            "unknown": found.unknown,
            "by_node": found.shares,
        },
        "results": {"whole": found.kept, "lost": found.lost},
        "violations": [
            {"kind": wrong.kind, "text": wrong.text, "rounds": wrong.rounds, "nodes": wrong.nodes}
            for wrong in found.violations
        ],
        "untold": found.untold,
    }


def shown(found: Audit) -> RenderableType:
    """An audit for people."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    skipped = found.following - found.first - found.rounds
    rounds = [f"{found.rounds:,} committed"]
    rounds += [f"{found.voided:,} of them without voters"] if found.voided else []
    rounds += [f"{skipped:,} that this journal has lost"] if skipped > 0 else []
    table.add_row("rounds", ", ".join([*rounds, f"round {found.following + 1:,} is next"]))
    samples = [f"{found.trained:,} trained", f"{found.returned:,} to be handed out again"]
    samples += [f"{found.unknown:,} unknown, of the lost rounds"] if found.unknown else []
    table.add_row("samples", f"{found.frontier:,} leased: {', '.join(samples)}")
    for node, count in found.shares.items():
        table.add_row("", f"{count:,} by {node}")
    table.add_row("states", f"agreed on after {found.agreed:,} rounds")
    results = f"{found.kept:,} kept and whole" + (f", {found.lost:,} damaged before" if found.lost else "")
    table.add_row("results", results)
    if found.holds:
        verdict = Text(
            "nothing is wrong: no sample was trained twice, and every one is accounted for", "green"
        )
        return Group(table, verdict)
    lines = [Text(f"{wrong.kind}: {wrong.text}", "red") for wrong in found.violations]
    if found.untold:
        lines.append(Text(f"and {found.untold:,} more", "red"))
    return Group(table, *lines)
