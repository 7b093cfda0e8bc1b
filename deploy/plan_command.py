"""The command `atoll plan`: from what the user says to a table, or JSON, and a recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deploy.errors import UserError
from deploy.plan import Estimate, Offer, Recommendation, Situation, bottleneck, estimate, recommend
from deploy.ranking import CANDIDATES, SOURCE
from deploy.table import MISSING, Fitting, facts, number, percent
from protos.method_section import MethodConfig
from protos.runfile import RunFile, RunFileError
from protos.sections import ModelConfig
from protos.toml_writer import to_toml
from protos.units import format_bytes, format_duration, format_rate, parse_count, parse_duration, parse_rate

if TYPE_CHECKING:
    from optim.role import ParameterRole


_BYTES: Final = ("up", "down", "peak", "bits")
_TIME: Final = ("exchange", "round", "busy")
_MEMORY: Final = ("state B", "host B")


@dataclass(frozen=True)
class Question:
    """A user's choices as texts; see the command's help. ``None``: not given."""

    uplink: str
    step_time: str
    file: Path | None = None
    params: str | None = None
    model: str | None = None
    vocab: int | None = None
    nodes: int | None = None
    downlink: str | None = None
    hub: str | None = None
    latency: str | None = None
    codec: str | None = None
    busy: float = 0.9


@dataclass(frozen=True)
class Answer:
    """What the methods come to, best measured loss first."""

    model: ModelConfig
    parameters: int
    situation: Situation
    estimates: list[Estimate]
    recommended: Recommendation
    note: str


def answer(question: Question) -> Answer:
    """Work it out. Imports torch and `transformers` for a model of that kind alone.

    Raises:
        UnitError, UserError: a value that cannot be; the text says what to write.
        RunFileError: the run file cannot be used.
        ModelError, RoleError: a model that cannot be built.
    """
    runfile = None if question.file is None else RunFile.load(question.file)
    situation = situation_of(question, runfile)
    model = _model(question, runfile)
    from node.shapes import roles_of

    built = roles_of(model)
    offers = [] if runfile is None else [_own(runfile, built)]
    offers += measured_methods(built, question.codec)
    estimates = [estimate(offer, situation) for offer in offers]
    return Answer(
        model=model,
        parameters=estimates[0].parameters,
        situation=situation,
        estimates=estimates,
        recommended=recommend(estimates, question.busy),
        note=bottleneck(estimates, situation),
    )


def situation_of(question: Question, runfile: RunFile | None) -> Situation:
    """The links and nodes that a user means.

    Raises:
        UnitError, UserError: a value that cannot be.
    """
    nodes = question.nodes if question.nodes is not None else (runfile.run.nodes if runfile else None)
    if nodes is None:
        raise UserError("how many nodes take part? give --nodes, or a run file")
    uplink = _rate("--uplink", question.uplink)
    downlink = uplink if question.downlink is None else _rate("--downlink", question.downlink)
    hub_up, hub_down = uplink, downlink
    if question.hub is not None:
        hub_up = hub_down = _rate("--hub", question.hub)
    step = parse_duration(question.step_time)
    if not 0 < step <= 86400:
        raise UserError(f"--step-time {question.step_time}: a step takes more than 0 s and at most a day")
    values = {} if question.latency is None else {"latency": parse_duration(question.latency)}
    return Situation(nodes, uplink, downlink, hub_up, hub_down, step, **values)


def _rate(option: str, text: str) -> float:
    rate = parse_rate(text)
    if rate <= 0:
        raise UserError(f"{option} {text}: a link carries more than nothing; write for example '1gbit'")
    return rate


def _model(question: Question, runfile: RunFile | None) -> ModelConfig:
    named = [
        option
        for option, value in (("FILE", runfile), ("--params", question.params), ("--model", question.model))
        if value is not None
    ]
    if len(named) != 1:
        what = f"{' and '.join(named)} name one" if named else "nothing names one"
        raise UserError(
            f"one model is planned for, but {what}; give one of FILE, --params 720M or --model hf:NAME"
        )
    if runfile is not None:
        return runfile.model
    if question.params is not None:
        from deploy.shape import shape_for

        return shape_for(parse_count(question.params), question.vocab)
    name = question.model or ""
    if not name.startswith("hf:") or not name[3:].strip():
        raise UserError(
            f"--model {name}: write 'hf:' and a folder, a config.json or a hub id; or use --params"
        )
    return ModelConfig(name=name, vocab=question.vocab)


def _own(runfile: RunFile, built: Sequence[ParameterRole]) -> Offer:
    """The run file's own method, first in the list. Its loss is known only if it is a measured one."""
    from deploy.costs import costs_of

    method = runfile.method
    loss = next(
        (one.loss for one in CANDIDATES if _method(one.name, one.values, None) == method), float("nan")
    )
    return Offer(f"{runfile.run.name} ({method.name})", costs_of(method, built), method.overlap, loss)


def _method(name: str, values: Sequence[tuple[str, Any]], codec: str | None) -> MethodConfig:
    choices = {"name": name, **dict(values)}
    if codec is not None and "codec" not in MethodConfig.model_validate(choices).unused():
        choices["codec"] = codec
    try:
        return RunFile.parse(to_toml({"method": choices})).method
    except RunFileError as error:
        rules = "; ".join(f"{one.rule}; {one.fix}" if one.fix else one.rule for one in error.problems)
        raise UserError(f"--codec {codec} with {name}: {rules}") from error


def measured_methods(built: Sequence[ParameterRole], codec: str | None) -> list[Offer]:
    """The measured methods, in the order of their losses; with another codec the loss is open."""
    from deploy.costs import costs_of

    offers = []
    for one in CANDIDATES:
        method = _method(one.name, one.values, codec)
        measured = method == _method(one.name, one.values, None)
        offers.append(
            Offer(one.label, costs_of(method, built), method.overlap, one.loss if measured else float("nan"))
        )
    return offers


def view(found: Answer) -> RenderableType:
    """The table, the assumptions above it, and the recommendation below."""
    one, situation = found.model, found.situation
    model = one.name
    if one.name == "llama":
        model = f"d_model {one.d_model}, {one.layers} layers, {one.vocab or 256:,} token ids"
    link = f"{format_rate(situation.uplink)} up, {format_rate(situation.downlink)} down"
    hub = f"{format_rate(situation.hub_uplink)} up, {format_rate(situation.hub_downlink)} down"
    rows: list[tuple[str, RenderableType]] = [
        ("model", f"{found.parameters:,} parameters ({model})"),
        ("nodes", f"{situation.nodes}, each {link}; {format_duration(situation.step_seconds)} a step"),
        ("coordinator", f"{hub}; {format_duration(situation.latency)} an exchange beside its bytes"),
    ]
    table = Fitting(
        _methods_table(found, ["steps", *_BYTES, *_TIME, *_MEMORY, "loss"]),
        Group(_methods_table(found, ["steps", *_TIME, "loss"]), _methods_table(found, [*_BYTES, *_MEMORY])),
    )
    sentences = [
        Text(f"take {found.recommended.label}: {found.recommended.reason}", style="bold"),
        *([Text(found.note, style="yellow")] if found.note else []),
        Text(
            "up, down: payload of a round at a node, as a mean; peak: the largest; bits: sent for each "
            "parameter and step; busy: share of the time in which a node computes; state, host: bytes of "
            "optimizer state for each parameter, "
            f"beside it and in host memory; loss: nats a byte after equal tokens in '{SOURCE}'",
            style="dim",
        ),
    ]
    return Group(facts(rows), table, *sentences)


def _methods_table(found: Answer, columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("method", overflow="fold")  # the only one that may be folded
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for each in found.estimates:
        cells = _cells(each)
        style = "bold green" if each.label == found.recommended.label else ""
        table.add_row(Text(each.label), *(cells[name] for name in columns), style=style)
    return table


def _cells(each: Estimate) -> dict[str, str]:
    known = "" if each.state.known else "+"
    return {
        "steps": f"{each.steps:,}",
        "up": format_bytes(each.bytes_up),
        "down": format_bytes(each.bytes_down),
        "peak": format_bytes(each.peak_bytes),
        "bits": f"{each.bits:.3f}",
        "exchange": format_duration(each.exchange_seconds),
        "round": format_duration(each.round_seconds),
        "busy": percent(each.utilisation),
        "state B": f"{each.state.device / each.parameters:.2f}{known}",
        "host B": f"{each.state.host / each.parameters:.2f}" if each.state.host else MISSING,
        "loss": number(each.loss),
    }


def as_json(found: Answer) -> dict[str, Any]:
    """The same for programs; what has not been measured is null."""
    return {
        "model": {**dict(found.model), "parameters": found.parameters},
        "situation": asdict(found.situation),
        "methods": [
            {
                "label": one.label,
                "steps": one.steps,
                "bytes_up": one.bytes_up,
                "bytes_down": one.bytes_down,
                "peak_bytes": one.peak_bytes,
                "bits_per_parameter_step": one.bits,
                "node_seconds": one.node_seconds,
                "hub_seconds": one.hub_seconds,
                "exchange_seconds": one.exchange_seconds,
                "waiting_seconds": one.waiting_seconds,
                "round_seconds": one.round_seconds,
                "utilisation": one.utilisation,
                "state_bytes": one.state.device,
                "host_bytes": one.state.host,
                "loss": one.loss if one.loss == one.loss else None,
            }
            for one in found.estimates
        ],
        "recommended": asdict(found.recommended),
        "note": found.note,
        "losses_from": SOURCE,
    }
