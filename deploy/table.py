"""The status of a run as rich tables: the run, its nodes, and what was refused or ignored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from protos import atoll_pb2 as pb
from protos.address import peer
from protos.units import format_bytes, format_duration

MISSING = "–"
_PHASE_STYLES = {"training": "green", "paused": "yellow", "done": "bold green", "failed": "bold red"}
STATE_STYLES = {"active": "green", "lagging": "yellow"}
_DIGEST_SHOWN = 12
_UNLIMITED = 10_000  # columns; more than any table has


def number(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` decimals, or a dash when it was not measured (NaN)."""
    return f"{value:.{digits}f}" if math.isfinite(value) else MISSING


def percent(value: float) -> str:
    """A share of 1 as a percentage with one decimal, or a dash."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else MISSING


class Fitting:
    """The first of some views for which the console is wide enough; the last where it is for none.

    A table that is too wide would lose whole columns: rich shrinks them down to nothing.
    """

    def __init__(self, *views: RenderableType) -> None:
        self._views = views

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(width=_UNLIMITED)
        for view in self._views[:-1]:
            if console.measure(view, options=unlimited).maximum <= options.max_width:
                yield view
                return
        yield self._views[-1]


def facts(rows: Iterable[tuple[str, RenderableType]], title: str | None = None) -> Table:
    """Two columns without a header: a name and its value."""
    table = Table(box=None, show_header=False, title=title, title_justify="left", padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def last_measured(reply: pb.StatusReply) -> tuple[float, float, float, int]:
    """Newest loss, validation loss, bits per byte and its round; NaN and -1 where not measured yet."""
    loss = next((point.loss for point in reversed(reply.curve) if math.isfinite(point.loss)), math.nan)
    for point in reversed(reply.curve):
        if math.isfinite(point.validation_loss):
            return loss, point.validation_loss, point.bits_per_byte, point.round
    return loss, math.nan, math.nan, -1


def present(reply: pb.StatusReply) -> int:
    """Nodes that have not left."""
    return sum(node.state != "left" for node in reply.nodes)


def trained(node: pb.NodeStatus) -> int:
    """The last round that a node has reported, counted from 1 as people do; 0 if there is none."""
    return node.round + 1 if node.round > 0 or math.isfinite(node.loss) else 0


def votes(reply: pb.StatusReply) -> bool:
    """Whether a majority decides of anything in this run, as far as its last round shows."""
    return bool(reply.round) and math.isfinite(reply.agreement)


def ways(up: float, down: float) -> str:
    """Bytes sent and received, in words."""
    sent = format_bytes(up)
    return f"{sent} each way" if up == down else f"{sent} up, {format_bytes(down)} down"


def payload(reply: pb.StatusReply) -> str:
    """Bytes of a round at a node, each way, in words."""
    up, down = reply.payload_bytes, reply.result_bytes
    text = ways(up, down)
    if reply.parameters:
        bits = [f"{8 * nbytes / reply.parameters:.3f}" for nbytes in dict.fromkeys((up, down))]
        text += f" ({' and '.join(bits)} bits a parameter)"
    return text


_SECURITY: Final = {"tls": "TLS", "mtls": "TLS, with certificates of the nodes"}
_INSECURE: Final = "INSECURE: nothing is encrypted, and nothing proves who the coordinator is"


def run_table(reply: pb.StatusReply) -> Table:
    """The run in one table of names and values."""
    loss, validation, bits, measured = last_measured(reply)
    phase = Text(reply.phase, style=_PHASE_STYLES.get(reply.phase, "yellow"))
    if reply.reason:
        phase.append(f"  {reply.reason}", style="dim")
    rows: list[tuple[str, RenderableType]] = [
        ("run", Text(f"{reply.run}  {reply.method}  {reply.run_digest[:_DIGEST_SHOWN]}")),
        ("phase", phase),
        ("round", f"{reply.round} of {reply.rounds} committed, epoch {reply.epoch}"),
        ("loss", f"{number(loss)} nats per token"),
    ]
    if measured >= 0:
        rows.append(
            ("validation", f"{number(validation)} nats, {number(bits)} bits per byte (round {measured + 1})")
        )
    rows.append(("a round", f"{payload(reply)}, {reply.parameters:,} parameters"))
    if reply.ways:
        rows.append(("transport", reply.ways))
    rows.append(("security", _SECURITY.get(reply.security) or Text(_INSECURE, style="bold red")))
    rows.append(("traffic", f"{format_bytes(reply.bytes_in)} in, {format_bytes(reply.bytes_out)} out"))
    if reply.seconds > 0:
        pace = f", {reply.round / reply.seconds:.2f} rounds/s" if reply.round else ""
        rows.append(("time", format_duration(reply.seconds) + pace))
    if votes(reply):
        rows.append(("agreement", percent(reply.agreement)))
    rows.append(("digest", reply.state_digest or MISSING))
    return facts(rows)


def roster_table(nodes: Iterable[pb.NodeStatus]) -> RenderableType:
    """One row a node, two tables on a narrow terminal; agreement and ranks only where they tell something."""
    nodes = list(nodes)
    who = ["node", "name", *(["ranks"] if any(node.ranks > 1 for node in nodes) else []), "state"]
    work = ["round", "loss", "agreement", "compute"]
    if not any(math.isfinite(node.agreement) for node in nodes):
        work.remove("agreement")
    traffic = ["up", "down", "missed", "abstained"]
    whole = _nodes_table(nodes, [*who, "address", *work, *traffic], title="nodes")
    narrow = Group(
        _nodes_table(nodes, [*who, *work], title="nodes"),
        _nodes_table(nodes, ["node", "address", *traffic]),
    )
    return Fitting(whole, narrow)


def _nodes_table(nodes: Iterable[pb.NodeStatus], columns: Sequence[str], title: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    for name in columns:
        if name in ("node", "name", "state", "address"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for node in nodes:
        cells = _node_cells(node)
        table.add_row(*(cells[name] for name in columns))
    return table


def _node_cells(node: pb.NodeStatus) -> dict[str, RenderableType]:
    return {
        "node": Text(node.node),
        "name": Text(node.name),
        "ranks": str(max(1, node.ranks)),
        "state": Text(node.state, style=STATE_STYLES.get(node.state, "yellow")),
        "address": Text(peer(node.address)),
        "round": str(trained(node) or MISSING),
        "loss": number(node.loss),
        "agreement": percent(node.agreement),
        "compute": percent(node.compute_share),
        "up": format_bytes(node.bytes_up),
        "down": format_bytes(node.bytes_down),
        "missed": str(node.missed),
        "abstained": str(node.abstained),
    }


def counters_table(reply: pb.StatusReply) -> Table:
    """What was refused or ignored, by kind."""
    table = Table(box=box.SIMPLE_HEAD, title="refused or ignored", title_justify="left", title_style="bold")
    table.add_column("kind")
    table.add_column("count", justify="right")
    for kind in sorted(reply.counters):
        table.add_row(Text(kind), str(reply.counters[kind]))
    return table


def status_view(reply: pb.StatusReply) -> RenderableType:
    """Everything of one status, for a terminal."""
    parts: list[RenderableType] = [run_table(reply)]
    if reply.nodes:
        parts.append(roster_table(reply.nodes))
    if any(reply.counters.values()):
        parts.append(counters_table(reply))
    return Group(*parts)


def progress_line(reply: pb.StatusReply) -> str:
    """The run in one line, for pipes and logs."""
    loss, validation, bits, measured = last_measured(reply)
    line = f"{reply.phase} round {reply.round}/{reply.rounds} nodes {present(reply)} loss {number(loss)}"
    if measured >= 0:
        line += f" validation {number(validation)} ({number(bits)} bits/byte)"
    if votes(reply):
        line += f" agreement {percent(reply.agreement)}"
    if reply.round:
        line += f" in {format_bytes(reply.bytes_in)} out {format_bytes(reply.bytes_out)}"
    return line
