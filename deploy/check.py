"""What a run file comes to: its effective values, and the bytes that its rounds will cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.ring import Traffic
from deploy.table import facts
from protos.buckets import BucketTable
from protos.units import format_bytes

if TYPE_CHECKING:
    from protos.runfile import RunFile
    from protos.runfile_text import Setting

KINDS = {"majority": "1-bit votes, majority", "mean": "fp32, mean"}


def bucket_table(runfile: RunFile) -> BucketTable:
    """The table of the run's model and method, from shapes alone. Imports torch.

    Raises:
        ModelError, RoleError: a model or method that cannot be built.
    """
    from node.model import model_on_meta
    from optim.methods import build_method

    return build_method(runfile.method, model_on_meta(runfile.model)).table


def traffic(runfile: RunFile, table: BucketTable) -> Traffic:
    """Payload of a round at one node."""
    return Traffic(table.elements, runfile.run.nodes, table.nbytes, table.nbytes)


def kinds(table: BucketTable) -> list[tuple[str, int, int]]:
    """Parameters and payload bytes of each kind of bucket: ``(reduce, parameters, bytes)``."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for bucket in table.buckets:
        sums[bucket.reduce][0] += bucket.elements
        sums[bucket.reduce][1] += bucket.nbytes
    return [(reduce, elements, nbytes) for reduce, (elements, nbytes) in sorted(sums.items())]


def values_table(settings: Iterable[Setting]) -> Table:
    """Every value in effect; defaults are dim and say so."""
    table = Table(box=box.SIMPLE_HEAD, title="values in effect", title_justify="left", title_style="bold")
    for name in ("section", "key", "value", "from"):
        table.add_column(name, overflow="fold")
    previous = ""
    for setting in settings:
        section = f"[{setting.section}]" if setting.section != previous else ""
        previous = setting.section
        style = "dim" if setting.is_default else "bold"
        source = "default" if setting.is_default else "run file"
        table.add_row(
            Text(section), Text(setting.key), Text(setting.text, style=style), Text(source, style=style)
        )
    return table


def bytes_view(runfile: RunFile, table: BucketTable) -> RenderableType:
    """Bytes of a round and of the run at one node, beside a ring's, and the share of each kind of bucket."""
    one, rounds = traffic(runfile, table), runfile.run.rounds
    ring = "needs two nodes"
    if one.nodes > 1:
        ring = (
            f"{format_bytes(one.ring_up)} each way between {one.nodes} nodes, {one.ratio:.1f} times as much"
        )
    hub = f"{format_bytes(4 * one.parameters)} each way, {one.hub_ratio:.1f} times as much"
    rows: list[tuple[str, RenderableType]] = [
        ("parameters that travel", f"{one.parameters:,} in {len(table.buckets)} buckets"),
        ("sent by a node", f"{format_bytes(one.up)} ({8 * one.up / one.parameters:.3f} bits a parameter)"),
        ("received by a node", f"{format_bytes(one.down)}, framing adds less than 1 %"),
        ("an fp32 ring all-reduce", ring),
        ("fp32 by way of a hub", hub),
        ("the whole run", f"{format_bytes(rounds * one.up)} each way and node in {rounds:,} rounds"),
    ]
    shares = Table(box=box.SIMPLE_HEAD, title="what travels", title_justify="left", title_style="bold")
    shares.add_column("kind")
    for name in ("parameters", "share", "bytes a round", "share"):
        shares.add_column(name, justify="right")
    for reduce, elements, nbytes in kinds(table):
        shares.add_row(
            KINDS[reduce],
            f"{elements:,}",
            f"{100 * elements / table.elements:.1f} %",
            format_bytes(nbytes),
            f"{100 * nbytes / table.nbytes:.1f} %",
        )
    return Group(facts(rows, title="bytes of a round"), "", shares)


def as_json(
    runfile: RunFile, settings: Iterable[Setting], table: BucketTable, advice: list[str]
) -> dict[str, Any]:
    """The same for programs."""
    one = traffic(runfile, table)
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    defaults: list[str] = []
    for setting in settings:
        values[setting.section][setting.key] = setting.value
        if setting.is_default:
            defaults.append(f"{setting.section}.{setting.key}")
    return {
        "digest": runfile.digest,
        "table_digest": table.digest,
        "values": dict(values),
        "defaults": defaults,
        "advice": advice,
        "round": {
            "parameters": one.parameters,
            "nodes": one.nodes,
            "bytes_up": table.nbytes,
            "bytes_down": table.nbytes,
            "bits_per_parameter_up": 8 * one.up / one.parameters,
            "bits_per_parameter_down": 8 * one.down / one.parameters,
            "ring_fp32_bytes_up": one.ring_up,
            "ring_fp32_ratio": one.ratio,
            "hub_fp32_ratio": one.hub_ratio,
            "kinds": {r: {"parameters": elements, "bytes": nbytes} for r, elements, nbytes in kinds(table)},
        },
    }
