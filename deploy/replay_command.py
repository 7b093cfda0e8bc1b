"""The command `atoll replay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = "Example: atoll replay coordinator.jsonl reef.jsonl lagoon.jsonl --from 20 --to 40 --speed 10"


def replay(
    events: Annotated[
        list[Path],
        typer.Argument(metavar="EVENTS...", help="events.jsonl of a coordinator and of nodes."),
    ],
    speed: Annotated[float, typer.Option(min=1e-3, help="So many times as fast as it happened.")] = 1.0,
    start: Annotated[
        str | None, typer.Option("--from", metavar="WHEN", help="A round, or a time such as 12:00:01 (UTC).")
    ] = None,
    end: Annotated[str | None, typer.Option("--to", metavar="WHEN", help="The same for the end.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="One line an event, at once; so it is in pipes, too.")
    ] = False,
) -> None:
    """Show a run as it happened, from the logs of events of any of its processes."""
    from deploy.moments import cut, read_moments
    from deploy.replay import plain_line, play
    from deploy.terminal import console

    moments = read_moments(events, lambda text: typer.echo(f"note: {text}", err=True))
    first, last = cut(moments, start, end)
    out = console()
    if plain or not out.is_terminal:
        for moment in moments[first:last]:
            typer.echo(plain_line(moment))
    else:
        play(moments[:last], out, speed=speed, first=first)
