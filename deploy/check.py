"""What a run file comes to: its effective values, the bytes of its rounds, its optimizer's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.compare import steps_of, trained_tokens
from deploy.costs import Costs
from deploy.memory import RankBytes, StateBytes
from deploy.ring import Traffic
from deploy.table import facts
from protos.model_tensors import OWN
from protos.units import format_bytes, format_duration
from protos.waits import waits

if TYPE_CHECKING:
    from protos.runfile import RunFile
    from protos.runfile_text import Setting


def traffic(runfile: RunFile, costs: Costs) -> Traffic:
    """Payload of a step at one node: that of a round, shared out to its steps."""
    up, down = costs.bytes_up / costs.steps, costs.bytes_down / costs.steps
    return Traffic(costs.parameters, runfile.run.nodes, up, down)


def round_tokens(runfile: RunFile, costs: Costs) -> int:
    """Tokens that a node reads in a round."""
    return costs.steps * runfile.data.batch * runfile.model.predicted


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


def bytes_view(runfile: RunFile, costs: Costs) -> RenderableType:
    """Steps, bytes and memory at one node, beside an fp32 ring's bytes, and what the bytes consist of."""
    one, rounds, nodes = traffic(runfile, costs), runfile.run.rounds, runfile.run.nodes
    tokens = round_tokens(runfile, costs)
    what = "samples" if runfile.model.name == OWN else "tokens"
    ring = "needs two nodes"
    if nodes > 1:
        ring = f"{format_bytes(one.ring_up)} each way between {nodes} nodes, {one.ratio:.1f} times as much"
    hub = f"{format_bytes(4 * one.parameters)} each way, {one.hub_ratio:.1f} times as much"
    rows: list[tuple[str, RenderableType]] = [
        ("parameters", f"{one.parameters:,}"),
        ("a round", f"{_steps(costs.steps)}: {tokens:,} {what} a node, {nodes * tokens:,} in all"),
        ("sent by a node", _flow(costs.bytes_up, costs)),
        ("received by a node", f"{_flow(costs.bytes_down, costs)}; framing adds less than 1 %"),
    ]
    if len(costs.tables.tables) > 1:
        up, down = costs.tables.nbytes, costs.tables.result_nbytes
        when = f"one of {len(costs.tables.cycle)} rounds"
        if runfile.method.fragments > 1:
            when = f"{runfile.method.fragments} fragments in turn"
        rows.append(("largest round", f"{format_bytes(up)} sent, {format_bytes(down)} received; {when}"))
    sent, received = rounds * costs.bytes_up, rounds * costs.bytes_down
    both = f"{format_bytes(sent)} each way"
    if sent != received:
        both = f"{format_bytes(sent)} sent, {format_bytes(received)} received"
    rows += [
        ("an fp32 ring in every step", ring),
        ("fp32 by way of a hub", hub),
        ("the whole run", f"{both} by a node in {rounds:,} rounds"),
        ("", f"{_steps(steps_of(runfile))} of each node, {trained_tokens(runfile):,} {what} in all"),
        ("optimizer state", memory_text(costs.state, costs.parameters)),
    ]
    shares = Table(box=box.SIMPLE_HEAD, title="what travels", title_justify="left", title_style="bold")
    shares.add_column("kind")
    for name in ("entries a round", "sent a round", "share", "received a round"):
        shares.add_column(name, justify="right")
    for kind in costs.kinds:
        shares.add_row(
            Text(kind.text),
            f"{kind.entries:,.0f}" if kind.bytes_up else "",
            format_bytes(kind.bytes_up),
            f"{100 * kind.bytes_up / costs.bytes_up:.1f} %",
            format_bytes(kind.bytes_down),
        )
    return Group(facts(rows, title="a round"), "", shares)


def waits_line(runfile: RunFile) -> str:
    """Every wait of a run in one line, with the key that sets it."""
    known = waits(runfile.round.deadline, runfile.round.start_timeout)
    each = (f"{wait.name} {format_duration(wait.seconds)}{wait.key and f' ({wait.key})'}" for wait in known)
    return f"waits: {'; '.join(each)}"


def _steps(count: int) -> str:
    return f"{count:,} steps" if count > 1 else "1 step"


def _flow(nbytes: float, costs: Costs) -> str:
    """Bytes of a round one way, and what that is for a step and a parameter."""
    bits = 8 * nbytes / costs.steps / costs.parameters
    each = f"{format_bytes(nbytes / costs.steps)} a step, " if costs.steps > 1 else ""
    return f"{format_bytes(nbytes)} a round ({each}{bits:.3f} bits a parameter and step)"


def memory_text(state: StateBytes, parameters: int) -> str:
    """State of an optimizer in words."""
    text = f"{state.device / parameters:.2f} bytes a parameter"
    if not state.known:
        text += " and what the class of torch.optim keeps"
    if state.host:
        text += f", and {state.host / parameters:.2f} in host memory"
    return f"{text} ({format_bytes(state.device + state.host)})"


def ranks_view(ranks: Sequence[RankBytes]) -> RenderableType:
    """What the fullest rank of an island holds, by kind, and what the others do."""
    full = max(ranks, key=lambda one: one.resting)
    kinds = {
        "weights": full.weights,
        "gradients": full.gradients,
        "optimizer state": full.state.device,
        "state in host memory": full.state.host,
        "contribution": full.contribution,
    }
    average = sum(one.resting for one in ranks) / len(ranks)
    most = max(ranks, key=lambda one: one.peak)
    more = "" if full.state.known else " and what the class of torch.optim keeps"
    rows: list[tuple[str, RenderableType]] = [
        (name, format_bytes(nbytes)) for name, nbytes in kinds.items() if nbytes
    ]
    rows += [
        ("between rounds", f"{format_bytes(full.resting)}{more}; a rank on average {format_bytes(average)}"),
        ("the most in a round", f"{format_bytes(most.peak)} and activations{more}, in fp32"),
    ]
    return facts(rows, title=f"the fullest of {len(ranks)} ranks" if len(ranks) > 1 else "a node of one rank")


def ranks_json(ranks: Iterable[RankBytes]) -> list[dict[str, Any]]:
    """The same of every rank, in bytes."""
    return [asdict(one) | {"resting": one.resting, "peak": one.peak} for one in ranks]


def as_json(runfile: RunFile, settings: Iterable[Setting], costs: Costs, advice: list[str]) -> dict[str, Any]:
    """The same for programs."""
    one = traffic(runfile, costs)
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    defaults: list[str] = []
    for setting in settings:
        values[setting.section][setting.key] = setting.value
        if setting.is_default:
            defaults.append(f"{setting.section}.{setting.key}")
    tokens = round_tokens(runfile, costs)
    return {
        "digest": runfile.digest,
        "table_digest": costs.tables.digest,
        "values": dict(values),
        "defaults": defaults,
        "advice": advice,
        "round": {
            "parameters": one.parameters,
            "nodes": one.nodes,
            "steps": costs.steps,
            "tokens_node": tokens,
            "tokens": tokens * one.nodes,
            "bytes_up": costs.bytes_up,
            "bytes_down": costs.bytes_down,
            "largest_bytes_up": costs.tables.nbytes,
            "largest_bytes_down": costs.tables.result_nbytes,
            "bits_per_parameter_step_up": 8 * one.up / one.parameters,
            "bits_per_parameter_step_down": 8 * one.down / one.parameters,
            "ring_fp32_step_bytes_up": one.ring_up,
            "ring_fp32_ratio": one.ratio,
            "hub_fp32_ratio": one.hub_ratio,
            "kinds": [
                {
                    "reduce": kind.reduce,
                    "codec": kind.codec,
                    "result": kind.result,
                    "entries": kind.entries,
                    "bytes_up": kind.bytes_up,
                    "bytes_down": kind.bytes_down,
                }
                for kind in costs.kinds
            ],
        },
        "waits": {
            wait.name: wait.seconds for wait in waits(runfile.round.deadline, runfile.round.start_timeout)
        },
        "state": {
            "device_bytes": costs.state.device,
            "host_bytes": costs.state.host,
            "complete": costs.state.known,
        },
    }
