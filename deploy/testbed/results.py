"""What came out of a test bed: rounds, links, bytes and what was done to them, as JSON and as tables."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table

from deploy.demo_results import Agreement, rounds_of
from deploy.event_log import Line
from deploy.table import MISSING, facts, number, percent
from deploy.testbed.layout import Layout, as_json
from deploy.testbed.network import Counters
from deploy.testbed.probing import Probes
from protos.units import format_bytes, format_duration, format_rate

EXCHANGE = "exchange"  # the phase of a round in which a node only waits


@dataclass(frozen=True)
class Deed:
    """Something that was done to the bed, or happened to it: seconds since the first round was opened (NaN
    before), and rounds committed by then."""

    seconds: float
    round: int
    what: str
    link: str = ""


@dataclass(frozen=True)
class Round:
    """One committed round.

    Attributes:
        round: its index.
        ended: seconds from the opening of the first round to its commit.
        seconds: since the commit before it.
        tokens: that its voters had read.
        loss: mean over the nodes that trained in it, nats per token; NaN if none did.
        voters: how many were counted.
        nodes: by name: ``seconds`` by phase, ``tokens``, ``bytes_up`` and ``bytes_down`` of the round.
    """

    round: int
    ended: float
    seconds: float
    tokens: int
    loss: float
    voters: int
    nodes: Mapping[str, Mapping[str, Any]]


@dataclass
class Results:
    """All of it. ``why_plain`` says why there are no links, and is empty if there are; ``complete`` is
    whether the run came to its last round."""

    run: Mapping[str, Any]
    layout: Layout
    why_plain: str = ""
    notes: list[str] = field(default_factory=list)
    probes: Probes | None = None
    deeds: list[Deed] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    agreement: Agreement = field(default_factory=lambda: Agreement(0, 0, ""))
    traffic: Mapping[str, Counters] = field(default_factory=dict)  # of the run alone
    metered: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by site: sent and received
    parameters: int = 0
    complete: bool = True
    seconds: float = 0.0  # from the command's start to here

    @property
    def steady(self) -> list[Round]:
        """All rounds but the first, which begins with a model that is still cold; or that one alone."""
        return self.rounds[1:] or self.rounds

    @property
    def tokens_per_second(self) -> float:
        """Of all nodes together, over :attr:`steady`."""
        seconds = sum(one.seconds for one in self.steady)
        return sum(one.tokens for one in self.steady) / seconds if seconds > 0 else math.nan

    @property
    def round_seconds(self) -> float:
        """Median over :attr:`steady`."""
        return statistics.median(one.seconds for one in self.steady) if self.rounds else math.nan

    @property
    def utilisation(self) -> float:
        """Share of the nodes' time in which they did not wait for an exchange."""
        return utilisation([node["seconds"] for one in self.steady for node in one.nodes.values()])

    def to_json(self) -> dict[str, Any]:
        """For programs; what was not measured is null."""
        values: dict[str, Any] = _finite(
            {
                "run": dict(self.run),
                "complete": self.complete,
                "parameters": self.parameters,
                "shaped": not self.why_plain,
                "why_plain": self.why_plain,
                "probed": self.probes is not None,
                "notes": self.notes,
                "machine_bits_per_second": self.probes.machine if self.probes else None,
                "links": {link.name: self._link_json(link.name) for link in self.layout.shaped},
                "rounds": [asdict(one) for one in self.rounds],
                "events": [asdict(deed) for deed in self.deeds],
                "digests_equal": self.agreement.holds,
                "rounds_compared": self.agreement.rounds,
                "tokens_per_second": self.tokens_per_second,
                "round_seconds": self.round_seconds,
                "utilisation": self.utilisation,
                "seconds": self.seconds,
            }
        )
        return values

    def _link_json(self, name: str) -> dict[str, Any]:
        link = self.layout.link(name)
        values: dict[str, Any] = {
            "nodes": link.nodes,
            "asked": None if self.why_plain else as_json(link.shape),
        }
        if self.probes is not None and name in self.probes.readings:
            values["probe"] = asdict(self.probes.readings[name])
        if name in self.traffic:
            values["interface"] = asdict(self.traffic[name])
        if name in self.metered:
            sent, received = self.metered[name]
            values["metered"] = {"sent": sent, "received": received}
        return values


def utilisation(phases: Sequence[Mapping[str, float]]) -> float:
    """Share of the seconds by phase, of rounds and nodes, that is no waiting; validation is left out."""
    total = sum(seconds for one in phases for name, seconds in one.items() if name != "evaluate")
    waiting = sum(one.get(EXCHANGE, 0.0) for one in phases)
    return 1 - waiting / total if total > 0 else math.nan


def rounds_from(
    coordinator: Sequence[Mapping[str, Any]], nodes: Mapping[str, Sequence[dict[str, Any]]]
) -> tuple[list[Round], float | None]:
    """The rounds from the logs of events, and when the first was opened (seconds since 1970), if it was."""
    committed: dict[int, tuple[float, int]] = {}
    begun = math.nan
    for number_, event in enumerate(coordinator):
        at = Line(number_, str(event["event"]), event).at
        if event["event"] == "RoundOpened" and math.isnan(begun):
            begun = at
        elif event["event"] == "RoundCommitted":
            committed[int(event["round"])] = (at, len(event["voters"]))
    told: dict[int, dict[str, dict[str, Any]]] = {}
    for name, events in nodes.items():
        before = (0, 0)
        for event in rounds_of(events):
            sent, received = int(event["bytes_up"]), int(event["bytes_down"])
            if sent < before[0]:  # another life of the node
                before = (0, 0)
            told.setdefault(int(event["round"]), {})[name] = {
                "seconds": dict(event["seconds"]),
                "tokens": event["tokens"],
                "counted": event["counted"],
                "loss": event["loss"],
                "bytes_up": sent - before[0],
                "bytes_down": received - before[1],
                "steps": event.get("micro_steps", 1),
            }
            before = (sent, received)
    rounds, last = [], begun
    for index in sorted(committed):
        at, voters = committed[index]
        there = told.get(index, {})
        losses = [node["loss"] for node in there.values() if node["tokens"] and node["loss"] is not None]
        rounds.append(
            Round(
                round=index,
                ended=at - begun,
                seconds=at - last,
                tokens=sum(node["tokens"] for node in there.values() if node["counted"]),
                loss=sum(losses) / len(losses) if losses else math.nan,
                voters=voters,
                nodes=there,
            )
        )
        last = at
    return rounds, None if math.isnan(begun) else begun


def metered(layout: Layout, nodes: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, tuple[int, int]]:
    """Bytes that the nodes of each site have counted, sent and received, up to their last rounds."""
    found = {}
    for site in layout.sites:
        last = [rounds_of(nodes.get(node, ()))[-1:] for node in site.nodes]
        events = [event for events in last for event in events]
        found[site.name] = (
            sum(int(event["bytes_up"]) for event in events),
            sum(int(event["bytes_down"]) for event in events),
        )
    return found


def agreement(nodes: Mapping[str, Sequence[dict[str, Any]]]) -> Agreement:
    """Whether nodes that have told of the same round held the same bits after it."""
    digests: dict[int, set[str]] = {}
    for events in nodes.values():
        for event in rounds_of(events):
            digests.setdefault(int(event["round"]), set()).add(str(event["digest"]))
    if not digests:
        return Agreement(0, 0, "")
    equal = sum(len(found) == 1 for found in digests.values())
    return Agreement(len(digests), equal, next(iter(digests[max(digests)])))


def summary(results: Results) -> RenderableType:
    """The tables at the end."""
    return Group(_facts(results), _links(results))


def _facts(results: Results) -> Table:
    run, rounds = results.run, results.rounds
    first, last = (rounds[0].loss, rounds[-1].loss) if rounds else (math.nan, math.nan)
    many = [node for one in results.steady for node in one.nodes.values()]
    up = sum(node["bytes_up"] for node in many) / len(many) if many else math.nan
    down = sum(node["bytes_down"] for node in many) / len(many) if many else math.nan
    bytes_text = MISSING if not many else f"{format_bytes(up)} up, {format_bytes(down)} down at a node"
    seconds = results.round_seconds
    agreed = results.agreement
    return facts(
        [
            ("run", f"{run['method']}, {results.parameters:,} parameters, {run['nodes']} nodes"),
            ("rounds", f"{len(rounds)}, {format_duration(seconds)} each" if rounds else "0"),
            ("speed", f"{results.tokens_per_second:,.0f} tokens/s" if rounds else MISSING),
            ("utilisation", percent(results.utilisation)),
            ("a round", bytes_text),
            ("loss", f"{number(first)} to {number(last)} nats per token"),
            ("state", f"equal after {agreed.equal} of {agreed.rounds} rounds"),
        ],
        title="summary",
    )


def _links(results: Results) -> RenderableType:
    if results.why_plain:
        return f"no links: {results.why_plain}"
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("link", no_wrap=True)
    for name in ("asked for, each way", "up", "down", "round trip", "sent", "metered", "received", "metered"):
        table.add_column(name, justify="right")
    for link in results.layout.shaped:
        reading = results.probes.readings.get(link.name) if results.probes else None
        traffic, own = results.traffic.get(link.name), results.metered.get(link.name)
        table.add_row(
            link.name,
            str(link.shape),
            format_rate(reading.up) if reading and reading.up else MISSING,
            format_rate(reading.down) if reading and reading.down else MISSING,
            format_duration(reading.rtt.least) if reading else MISSING,
            format_bytes(traffic.sent) if traffic else MISSING,
            format_bytes(own[0]) if own else MISSING,
            format_bytes(traffic.received) if traffic else MISSING,
            format_bytes(own[1]) if own else MISSING,
        )
    return table


def write(results: Results, indent: int | None = 2) -> str:
    """The text of the results' file."""
    return json.dumps(results.to_json(), indent=indent, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
