"""One dial: from a link and a number of nodes to a method, its local steps and a transport.

What `atoll plan` computes, and its recommendation, for each way that the bytes can take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from deploy.plan import BUSY, Estimate, Situation, estimate, recommend
from deploy.plan_command import measured_methods
from deploy.ranking import CANDIDATES, Candidate

if TYPE_CHECKING:
    from optim.role import ParameterRole


@dataclass(frozen=True)
class Choice:
    """What to write in a run file, and why."""

    method: Candidate
    transport: str
    reason: str
    busy: float

    def values(self) -> dict[tuple[str, str], Any]:
        """By section and key."""
        chosen: dict[tuple[str, str], Any] = {("method", "name"): self.method.name}
        chosen |= {("method", key): value for key, value in self.method.values}
        return chosen | {("exchange", "transport"): self.transport}


def between_nodes(situation: Situation) -> Situation:
    """The same links where nodes reduce a slice each: 2 (M - 1) / M payloads each way, none over the
    coordinator's."""
    share = 2 * (situation.nodes - 1) / situation.nodes if situation.nodes > 1 else 1.0
    return replace(
        situation,
        uplink=situation.uplink / share,
        downlink=situation.downlink / share,
        hub_uplink=math.inf,
        hub_downlink=math.inf,
    )


def choose(roles: Sequence[ParameterRole], situation: Situation, busy: float = BUSY) -> Choice:
    """Take the transport with which the recommended method is better, and the coordinator's where they are
    equal: first whether a node computes for the share ``busy`` of the time, then the measured loss."""
    offers = measured_methods(roles, None)
    found = []
    for transport, links in (("hub", situation), ("direct", between_nodes(situation))):
        estimates = [estimate(offer, links) for offer in offers]
        recommended = recommend(estimates, busy)
        one = next(each for each in estimates if each.label == recommended.label)
        found.append((_rank(one, busy), transport, recommended.reason, one))
    _, transport, reason, one = min(found, key=lambda each: each[0])
    method = next(candidate for candidate in CANDIDATES if candidate.label == one.label)
    return Choice(method, transport, reason, one.utilisation)


def _rank(one: Estimate, busy: float) -> tuple[float, float]:
    if one.utilisation < busy:
        return math.inf, -one.utilisation
    return one.loss, 0.0
