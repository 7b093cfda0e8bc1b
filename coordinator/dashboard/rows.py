"""The tables of the page, as rows of plain values. Pure."""

from __future__ import annotations

import itertools
import math
from typing import Any, Final

from coordinator.dashboard.recorder import CATEGORIES
from coordinator.dashboard.snapshot import COORDINATOR, NodeView, Snapshot
from coordinator.dashboard.words import MISSING, clock, duration, number, percent, rate
from protos.units import format_bytes

Row = dict[str, Any]

ROUNDS: Final = 60  # in the timeline
EVENT_ROWS: Final = 150
ALL: Final = "all"
FEW: Final = "few"
KINDS: Final = {
    FEW: "All but rounds",
    ALL: "All events",
    "run": "Run",
    **{name: name.capitalize() for name, _ in CATEGORIES},
}


def _column(name: str, label: str, *, align: str = "left", by: str = "") -> Row:
    """A column that is sorted by its text, or by the number ``by`` of its row."""
    column: Row = {"name": name, "label": label, "field": name, "align": align, "sortable": True}
    if by:
        column[":sort"] = f"(a, b, one, other) => one.{by} - other.{by}"
    return column


NODE_COLUMNS: Final[list[Row]] = [
    _column("node", "Node", by="order"),
    _column("name", "Name"),
    _column("state", "State"),
    _column("lag", "Lag", by="behind"),
    _column("loss", "Loss", align="right"),
    _column("agreement", "Agreement", align="right", by="agreed"),
    _column("missed", "Missed", align="right", by="missing"),
    _column("rate", "Now", by="speed"),
    _column("up", "Sent", align="right", by="sent"),
    _column("down", "Received", align="right", by="received"),
    _column("way", "Transport"),
    _column("host", "Address"),
]
EVENT_COLUMNS: Final[list[Row]] = [
    {"name": "time", "label": "Time", "field": "time", "align": "left", "classes": "mono dim"},
    {"name": "category", "label": "Kind", "field": "category", "align": "left"},
    {"name": "text", "label": "Event", "field": "text", "align": "left", "classes": "event-text"},
]
FACT_COLUMNS: Final[list[Row]] = [
    {"name": "name", "label": "", "field": "name", "align": "left", "classes": "dim"},
    {"name": "value", "label": "", "field": "value", "align": "left", "classes": "fact"},
]


def lag(node: NodeView) -> str:
    """How far behind a node is, in words."""
    if node.state == "left":
        return "gone"
    if node.lag is None:
        return MISSING
    return "up to date" if node.lag == 0 else f"{node.lag:,} round{'s' * (node.lag != 1)}"


def _way(node: NodeView) -> str:
    if node.way == COORDINATOR:
        return "coordinator"
    return f"{node.way}, reduces {percent(node.reduces)}" if node.reduces else node.way


def node_rows(snapshot: Snapshot) -> list[Row]:
    """A row for each node, in the order in which they joined; those that have left come last."""
    return [
        {
            "order": index,
            "node": node.node,
            "name": node.name,
            "state": node.state,
            "lag": lag(node),
            "loss": number(node.loss),
            "agreement": percent(node.agreement),
            "missed": f"{node.missed:,}",
            "rate": f"↑ {rate(node.rate_up)}  ↓ {rate(node.rate_down)}" if node.state != "left" else "",
            "up": format_bytes(node.bytes_up),
            "down": format_bytes(node.bytes_down),
            "way": _way(node),
            "host": node.host,
            # what the columns are sorted by
            "behind": -1 if node.lag is None else node.lag,
            "agreed": node.agreement if math.isfinite(node.agreement) else -1.0,
            "missing": node.missed,
            "speed": round(node.rate_up + node.rate_down),
            "sent": node.bytes_up,
            "received": node.bytes_down,
        }
        for index, node in enumerate(snapshot.nodes)
    ]


def facts(node: NodeView) -> list[Row]:
    """All about one node."""
    values = {
        "State": node.state + (f" ({node.reason})" if node.reason else ""),
        "Round in flight": node.seat or "no member",
        "Rounds": MISSING if node.trained < 0 else f"{node.trained:,}, {lag(node)}",
        "Loss": number(node.loss),
        "Agreement": percent(node.agreement),
        "Missed": f"{node.missed:,} rounds, of them {node.abstained:,} abstained",
        "Computing": percent(node.compute_share) if math.isfinite(node.compute_share) else MISSING,
        "Sent": f"{format_bytes(node.bytes_up)}, now {rate(node.rate_up)}",
        "Received": f"{format_bytes(node.bytes_down)}, now {rate(node.rate_down)}",
        "Transport": _way(node),
        "Address": node.host,
        "Processes": f"{node.ranks:,}, weight {node.weight:,}",
        "Last heard": f"{duration(node.seen)} ago",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def event_rows(snapshot: Snapshot, kind: str, text: str) -> list[Row]:
    """The newest events of a kind that have ``text`` in them."""
    wanted = text.strip().casefold()
    found = (
        event
        for event in snapshot.events
        if (kind in (ALL, event.category) or (kind == FEW and event.category != "rounds"))
        and (not wanted or wanted in event.text.casefold())
    )
    return [
        {"key": event.number, "time": clock(event.at), "category": event.category, "text": event.text}
        for event in itertools.islice(found, EVENT_ROWS)
    ]


def event_note(snapshot: Snapshot, shown: list[Row]) -> str:
    """How many events there are."""
    if not snapshot.events:
        return "nothing has happened yet"
    return f"{len(shown)} of the last {len(snapshot.events)} events, newest first, times in UTC"


def round_note(snapshot: Snapshot) -> str:
    """The last round, in words."""
    if not snapshot.timeline:
        return "no round has been committed since this coordinator began"
    last = snapshot.timeline[-1]
    return (
        f"Round {last.round + 1:,}: {last.reason}; {last.voters} of {last.members} voted, "
        f"agreement {percent(last.agreement)}, result {format_bytes(last.nbytes)}"
    )


def roster_note(snapshot: Snapshot) -> str:
    """How many nodes there are."""
    text = f"{snapshot.members} members, roster epoch {snapshot.epoch}"
    return f"{text}, {len(snapshot.expelled)} expelled" if snapshot.expelled else text


def foot(snapshot: Snapshot) -> str:
    """What else is to be told of a run."""
    refused = " · ".join(f"{kind} {count:,}" for kind, count in snapshot.counters)
    text = f"transport {snapshot.transport} · {snapshot.parameters:,} parameters · {clock(snapshot.at)} UTC"
    return f"{text} · refused or ignored: {refused}" if refused else text
