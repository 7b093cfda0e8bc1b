"""A run shown as it happened, in a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from deploy.event_words import sentence
from deploy.moments import Moment, utc
from deploy.scene import Scene
from deploy.table import MISSING, STATE_STYLES, facts, number

REFRESH_SECONDS: Final = 0.1  # between two states of the view
LONGEST_PAUSE: Final = 3.0  # seconds without an event are shortened to so many, whatever the speed


def clock(at: float) -> str:
    """A time of day (UTC) with milliseconds."""
    return utc(at).strftime("%H:%M:%S.%f")[:-3] if math.isfinite(at) else MISSING


def plain_line(moment: Moment) -> str:
    """A moment in one line."""
    return f"{utc(moment.at):%Y-%m-%d} {clock(moment.at)} {moment.who:<11} {sentence(moment.event)}"


def view(scene: Scene) -> RenderableType:
    """A scene for a terminal."""
    done = Text(scene.phase, style="bold")
    done.append(f"  {scene.reason}", style="dim")
    rows: list[tuple[str, RenderableType]] = [
        ("time", f"{clock(scene.at)} UTC"),
        ("run", Text(f"{scene.run}  {scene.method}")),
        ("coordinator", done),
        ("round", f"{scene.committed} of {scene.rounds or MISSING} committed"),
        ("loss", f"{number(scene.loss)} nats per token, validation {number(scene.validation)}"),
        ("snapshot", Text(scene.snapshot or MISSING)),
        ("digest", scene.digest or MISSING),
    ]
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("node", "name", "state", "round", "loss", "voted", "beside"):
        table.add_column(name, overflow="fold")
    for node, one in sorted(scene.nodes.items()):
        state = Text(one.state, style=STATE_STYLES.get(one.state, "yellow"))
        last = str(one.round + 1) if one.round >= 0 else MISSING
        table.add_row(
            Text(node), Text(one.name), state, last, number(one.loss), one.voted or MISSING, Text(one.note)
        )
    lines = [
        Text(f"{clock(at)} {who}: {said}", no_wrap=True, overflow="ellipsis") for at, who, said in scene.told
    ]
    return Group(facts(rows), table, *lines)


def play(
    moments: Sequence[Moment],
    console: Console,
    *,
    speed: float,
    first: int = 0,
    sleep: Callable[[float], None] = time.sleep,
) -> Scene:
    """Show a run in a view that stays in place, ``speed`` times as fast as it happened.

    Args:
        moments: all of them.
        console: a terminal.
        speed: above 0.
        first: index of the moment from which on it is shown; what was before is folded in at once.
        sleep: waits for some seconds.
    """
    scene = Scene()
    for moment in moments[:first]:
        scene.take(moment)
    with Live(console=console, auto_refresh=False) as live:
        unshown = 0.0  # seconds of the show since its last refresh
        at = moments[first].at if first < len(moments) else 0.0
        for moment in moments[first:]:
            unshown += min(LONGEST_PAUSE, (moment.at - at) / speed)
            at = moment.at
            if unshown >= REFRESH_SECONDS:
                live.update(view(scene), refresh=True)
                sleep(unshown)
                unshown = 0.0
            scene.take(moment)
        live.update(view(scene), refresh=True)
    return scene
