"""How a test bed looks while it runs: the demo's table, and its links below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy import demo_view
from deploy.history import History
from deploy.testbed.change import State
from protos.units import format_bytes, format_rate


@dataclass(frozen=True)
class Flow:
    """What passes a link: its state, bytes since the run began, and bits per second of late, both ways."""

    state: State
    sent: int
    received: int
    up: float
    down: float


def view(
    history: History, title: str, note: str, flows: Mapping[str, Flow], deeds: Sequence[str]
) -> RenderableType:
    """The live view."""
    parts: list[RenderableType] = [demo_view.view(history, title, note)]
    if flows:
        parts.append(_links(flows))
    parts += [Text(deed, style="dim") for deed in deeds]
    return Group(*parts)


def _links(flows: Mapping[str, Flow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("link", no_wrap=True)
    table.add_column("now")
    for name in ("up", "down", "sent", "received"):
        table.add_column(name, justify="right")
    for name, flow in flows.items():
        table.add_row(
            name,
            Text(flow.state.text, style="" if flow.state.up else "red"),
            format_rate(flow.up),
            format_rate(flow.down),
            format_bytes(flow.sent),
            format_bytes(flow.received),
        )
    return table
