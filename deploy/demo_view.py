"""How the demo looks while it runs: a table that stays on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.history import History
from deploy.table import MISSING, facts, number, percent, votes
from protos.units import format_bytes, format_duration

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
SOON_SECONDS = 180.0


def spark(values: Sequence[float], width: int = _SPARK_WIDTH) -> str:
    """A curve of at most ``width`` block characters, high values high; not finite ones are left out."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [round(i * len(finite) / count) for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BLOCKS[0] * count
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top)] for value in means)


def bytes_text(history: History) -> tuple[str, str]:
    """Bytes of a step at a node, and of the fp32 ring instead; dashes before the first report."""
    traffic = history.traffic
    if traffic is None:
        return MISSING, MISSING
    bits = 8 / traffic.parameters
    own = (
        f"{format_bytes(traffic.up)} sent, {format_bytes(traffic.down)} received"
        f" ({bits * traffic.up:.2f} + {bits * traffic.down:.2f} bits a parameter)"
    )
    ring = f"{format_bytes(traffic.ring_up)} sent, as much received: {traffic.ratio:.0f} times as much"
    return own, ring


def pace(history: History) -> str:
    """Rounds a second and the time to the last round, in words; empty before the first round."""
    rate, left = history.rounds_per_second, history.reply.rounds - history.reply.round
    if not history.reply.round or not rate > 0:
        return ""
    rest = f", {format_duration(round(left / rate))} left" if left else ""
    return f"{number(rate, 1)} rounds/s{rest}"


def outlook(history: History, baseline: bool) -> str:
    """How long the demo will take by its pace so far, in words; empty where that is soon."""
    rate, left = history.rounds_per_second, history.reply.rounds - history.reply.round
    if not rate > 0 or left / rate < SOON_SECONDS:
        return ""
    more = ", and the single process beside them as long again or longer" if baseline else ""
    shorter = "--rounds or --no-baseline" if baseline else "--rounds"
    return (
        f"a round takes {format_duration(1 / rate)}: the {left:,} rounds that are left take about "
        f"{format_duration(round(left / rate))}{more}; {shorter} makes it shorter"
    )


def view(history: History, title: str, note: str = "") -> RenderableType:
    """The live table."""
    reply, checks = history.reply, history.checks
    head = Table.grid(padding=(0, 2, 0, 0))
    head.add_row(
        Text(f"round {reply.round}/{reply.rounds}", style="bold"),
        ProgressBar(total=max(1, reply.rounds), completed=reply.round, width=32),
        Text(pace(history)),
    )
    validation = MISSING
    if checks:
        last = checks[-1]
        validation = f"{number(last.bits_per_byte)} bits per byte, {number(last.validation_loss)} nats"
        validation += f" (round {last.round + 1})"
    own, ring = bytes_text(history)
    curve = Table.grid(padding=(0, 2, 0, 0))
    curve.add_row(number(history.loss), Text(spark([p.loss for p in history.points]), style="cyan"))
    rows: list[tuple[str, RenderableType]] = [
        ("training loss", curve),
        ("validation", validation),
        ("a step and node", own),
        ("fp32 ring would", ring),
        *([("vote agreement", percent(reply.agreement))] if votes(reply) else []),
        ("speed", f"{_count(history.tokens_per_second)} tokens/s, "
         f"{percent(history.compute_share)} of CPU time in forward and backward"),
        ("state digest", reply.state_digest or MISSING),
    ]  # fmt: skip
    nodes = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in ("node", "state"):
        nodes.add_column(name)
    agreement = any(math.isfinite(node.agreement) for node in reply.nodes) if votes(reply) else False
    for name in ("loss", *(["agreement"] if agreement else ()), "sent", "received", "compute"):
        nodes.add_column(name, justify="right")
    for node in sorted(reply.nodes, key=lambda node: node.name):
        nodes.add_row(
            Text(node.name or node.node),
            Text(node.state),
            number(node.loss),
            *([percent(node.agreement)] if agreement else ()),
            format_bytes(node.bytes_up),
            format_bytes(node.bytes_down),
            percent(node.compute_share),
        )
    parts: list[RenderableType] = [head, "", facts(rows)]
    if reply.nodes:
        parts.append(nodes)
    status = note or (f"{reply.phase}: {reply.reason}" if reply.reason else reply.phase)
    return Panel(
        Group(*parts),
        title=Text(title, style="bold"),
        subtitle=Text(status),
        title_align="left",
        subtitle_align="left",
        box=box.ROUNDED,
        expand=False,
        padding=(1, 2, 0, 2),
    )


def line(history: History) -> str:
    """The same in one line."""
    reply, checks = history.reply, history.checks
    text = f"round {reply.round}/{reply.rounds} loss {number(history.loss)}"
    if checks:
        text += f" validation {number(checks[-1].bits_per_byte)} bits/byte"
    traffic = history.traffic
    if traffic is not None:
        text += (
            f" {format_bytes(traffic.up + traffic.down)}/step {traffic.bits_per_parameter:.2f} bits/parameter"
        )
        text += f" (fp32 ring {format_bytes(2 * traffic.ring_up)}/step)"
    if votes(reply):
        text += f" agreement {percent(reply.agreement)}"
    return text + f" {_count(history.tokens_per_second)} tokens/s"


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else MISSING
