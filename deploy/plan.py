"""What each method would cost over given links: bytes, seconds and utilisation, and which one to take.

An exchange: contributions and results flow at the same time, chunk by chunk, so that a node needs the longer
of its two directions and a chunk of the other, as what comes back lags behind by one; the coordinator's
machine takes in the contributions of all nodes and sends as many results. On a link every byte brings its
share of headers along. Steps made meanwhile (``overlap``) hide that much of it. `python -m bench sweep` holds
all this against real runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deploy.costs import Costs
from deploy.memory import StateBytes
from protos.units import format_bytes, format_duration, format_rate
from protos.upload import chunk_bytes

BUSY: Final = 0.9  # utilisation that is asked for
DECISION_SECONDS: Final = 0.02  # of an exchange, in the processes of nodes and coordinator
LATENCY_SECONDS: Final = 0.03 + DECISION_SECONDS  # of an exchange beside its bytes: there, back, the decision
HEADERS: Final = 1514 / 1448  # bytes on a link for each of a payload: Ethernet, IP, TCP


@dataclass(frozen=True)
class Situation:
    """Links and computing of all nodes, which are alike.

    Attributes:
        nodes: how many take part.
        uplink, downlink: of each node, bits per second.
        hub_uplink, hub_downlink: of the coordinator's machine, bits per second.
        step_seconds: of one step at a node: reading, forward, backward, optimizer.
        latency: seconds of an exchange beside its bytes.
    """

    nodes: int
    uplink: float
    downlink: float
    hub_uplink: float
    hub_downlink: float
    step_seconds: float
    latency: float = LATENCY_SECONDS


@dataclass(frozen=True)
class Offer:
    """A method with what it costs and how far it came in the benchmark (NaN where nobody has measured it)."""

    label: str
    costs: Costs
    overlap: int = 0
    loss: float = math.nan


@dataclass(frozen=True)
class Estimate:
    """What a method comes to in a situation. Bytes and seconds are means over the rounds.

    Attributes:
        label, loss: of the offer.
        steps: of a round at each node.
        bytes_up, bytes_down: payload of a round at a node.
        peak_bytes: of the largest contribution or result.
        node_seconds: of an exchange at a node's link; hub_seconds: at the coordinator's.
        exchange_seconds: of an exchange, the longer of the two and the latency.
        waiting_seconds: of it, that no step hides.
        compute_seconds: of the steps of a round.
        bits: sent for each parameter and step.
        parameters: of the model.
        state: memory of the optimizer.
    """

    label: str
    loss: float
    steps: int
    bytes_up: float
    bytes_down: float
    peak_bytes: int
    node_seconds: float
    hub_seconds: float
    exchange_seconds: float
    waiting_seconds: float
    compute_seconds: float
    bits: float
    parameters: int
    state: StateBytes

    @property
    def round_seconds(self) -> float:
        """Of a whole round."""
        return self.compute_seconds + self.waiting_seconds

    @property
    def utilisation(self) -> float:
        """Share of the time in which a node computes."""
        return self.compute_seconds / self.round_seconds

    @property
    def step_bytes(self) -> float:
        """Over a node's link for each step, both ways."""
        return (self.bytes_up + self.bytes_down) / self.steps


def estimate(offer: Offer, situation: Situation) -> Estimate:
    """What ``offer`` comes to in ``situation``, once its rounds are of the usual length."""
    costs, nodes = offer.costs, situation.nodes
    hidden = offer.overlap * situation.step_seconds
    node, hub, whole, waiting = [], [], [], []
    for index in costs.tables.cycle:
        table = costs.tables.tables[index]
        up, down = 8 * HEADERS * table.nbytes, 8 * HEADERS * table.result_nbytes
        share = min(1.0, chunk_bytes(table.nbytes) / max(1, table.nbytes))
        node.append(both_ways(up / situation.uplink, down / situation.downlink, share))
        hub.append(nodes * both_ways(up / situation.hub_downlink, down / situation.hub_uplink, share))
        whole.append(situation.latency + max(node[-1], hub[-1]))
        waiting.append(max(0.0, whole[-1] - hidden))
    return Estimate(
        label=offer.label,
        loss=offer.loss,
        steps=costs.steps,
        bytes_up=costs.bytes_up,
        bytes_down=costs.bytes_down,
        peak_bytes=max(costs.tables.nbytes, costs.tables.result_nbytes),
        node_seconds=_mean(node),
        hub_seconds=_mean(hub),
        exchange_seconds=_mean(whole),
        waiting_seconds=_mean(waiting),
        compute_seconds=costs.steps * situation.step_seconds,
        bits=8 * costs.bytes_up / costs.steps / costs.parameters,
        parameters=costs.parameters,
        state=costs.state,
    )


def both_ways(up: float, down: float, share: float) -> float:
    """Seconds of an exchange whose ways take ``up`` and ``down`` alone, in chunks of a ``share`` of both.

    Each chunk comes back once it has arrived.
    """
    return max(up + share * down, share * up + down)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


@dataclass(frozen=True)
class Recommendation:
    """The method to take, and why, in words."""

    label: str
    reason: str


def recommend(estimates: Sequence[Estimate], busy: float = BUSY) -> Recommendation:
    """The method with the lowest measured loss of those that keep a node computing for the share ``busy`` of
    the time; where there is none, the one with the fewest bytes a step of the others that do, or of all.

    Raises:
        ValueError: nothing to choose from.
    """
    if not estimates:
        raise ValueError("there is no method to recommend")
    measured = [one for one in estimates if math.isfinite(one.loss)]
    quick = [one for one in measured if one.utilisation >= busy]
    if not quick:
        return _fewest_bytes(estimates, busy)
    best = min(quick, key=lambda one: one.loss)
    time = f"computes for at least {100 * busy:.0f} % of the time: {_percent(best)}"
    text = f"the only measured method that {time}"
    if len(quick) > 1:
        lowest = f"with the lowest loss in the benchmark ({best.loss:.3f} nats)"
        text = f"of {len(quick)} methods the one {lowest} that {time}"
    better = [one for one in measured if one.loss < best.loss]
    if better:
        other = min(better, key=lambda one: one.loss)
        whose = "the coordinator's link" if other.hub_seconds > other.node_seconds else "a node's link"
        text += (
            f"; {other.label} ({other.loss:.3f}) would compute for {_percent(other)}, as an exchange takes "
            f"{format_duration(other.exchange_seconds)} over {whose}"
        )
    return Recommendation(best.label, text)


def _fewest_bytes(estimates: Sequence[Estimate], busy: float) -> Recommendation:
    """What is left where no measured method keeps a node computing."""
    share = f"{100 * busy:.0f} % of the time"
    open_ones = [one for one in estimates if one.utilisation >= busy]
    least = min(open_ones or estimates, key=lambda one: one.step_bytes)
    moves = f"moves the fewest bytes, {format_bytes(least.step_bytes)} a step both ways"
    if open_ones:
        many = f"of {len(open_ones)} that do without a measured loss it" if len(open_ones) > 1 else "this one"
        text = f"no measured method computes for {share}; {many} {moves}, and computes for {_percent(least)}"
        return Recommendation(least.label, f"{text}; 'atoll compare' measures its loss")
    return Recommendation(
        least.label,
        f"no method computes for {share}; this one {moves}, and computes for {_percent(least)} of it; "
        "more local_steps or more bandwidth would help",
    )


def _percent(one: Estimate) -> str:
    return f"{100 * one.utilisation:.1f} %"


def bottleneck(estimates: Sequence[Estimate], situation: Situation) -> str:
    """A sentence where the coordinator's link limits all methods more than the nodes' links, and any of them
    more than the latency does; else empty."""
    if not estimates or any(one.hub_seconds <= one.node_seconds for one in estimates):
        return ""
    if all(one.hub_seconds <= situation.latency for one in estimates):
        return ""
    return (
        f"the coordinator's link is the limit: it carries the bytes of {situation.nodes} nodes; with --hub "
        f"{format_rate(situation.nodes * max(situation.uplink, situation.downlink)).replace(' ', '')} it "
        "would not be"
    )
