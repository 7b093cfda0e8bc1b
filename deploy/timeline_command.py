"""The command `atoll timeline`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deploy.options import Json

EXAMPLE = "Example: atoll timeline reef.jsonl lagoon.jsonl -o timeline.png --rounds 3"


def timeline(
    events: Annotated[
        list[Path],
        typer.Argument(metavar="EVENTS...", help="events.jsonl of nodes, one file for each node."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The picture, PNG.")] = Path(
        "timeline.png"
    ),
    rounds: Annotated[int, typer.Option(min=1, max=100, help="How many rounds are drawn.")] = 4,
    first: Annotated[
        int | None,
        typer.Option("--from", min=1, help="The first of them; the last ones are drawn if not given."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw when nodes computed, exchanged and applied in some rounds, from their logs of events."""
    from deploy.timeline import draw, read, together

    nodes = [read(path) for path in events]
    panel = together("", nodes, first=None if first is None else first - 1, count=rounds)
    shown = panel.nodes[0].rounds
    numbers = f"round {shown[0].number + 1}"
    if len(shown) > 1:
        numbers = f"rounds {shown[0].number + 1} to {shown[-1].number + 1}"
    draw(out, f"Where the time goes: {numbers}", [panel])
    if as_json:
        drawn = [shown[0].number + 1, shown[-1].number + 1]
        typer.echo(json.dumps({"path": str(out), "rounds": drawn, "nodes": [n.name for n in panel.nodes]}))
        return
    typer.echo(f"wrote {out}: {numbers} of {', '.join(node.name for node in panel.nodes)}")
