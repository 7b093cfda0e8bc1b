"""Probing all links of a test bed before its run: first without shapes, then with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from deploy.testbed.layout import Link
from deploy.testbed.network import Network
from deploy.testbed.probe import ALIKE, LONGEST, ProbeError, Reading, parallel, rate, round_trips
from deploy.testbed.verdict import REACH, Verdict, judge
from protos.units import format_rate

ATTEMPTS: Final = 3  # at a link that seems to be off: other work holds a transfer up for seconds


@dataclass(frozen=True)
class Probes:
    """What the probes of a bed have found.

    Attributes:
        machine: bits per second over a link without a shape.
        readings, verdicts: by the link's name.
    """

    machine: float
    readings: dict[str, Reading] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """Of all links."""
        return [problem for verdict in self.verdicts.values() for problem in verdict.problems]

    @property
    def notes(self) -> list[str]:
        """Of all links."""
        return [note for verdict in self.verdicts.values() for note in verdict.notes]


def probe_links(network: Network, say: Callable[[str], None]) -> Probes:
    """Give all links their shapes, and measure whether they have them.

    Raises:
        ProbeError: nothing passes a link.
        ShapingError: a shape cannot be made.
    """
    layout = network.layout
    say("measuring what a link without a shape carries")
    machine = max(_rate(network, layout.sites[0], up=up, windows=ALIKE) for up in (True, False))
    say(f"a link without a shape carries {format_rate(machine)} on this machine")
    probes = Probes(machine)
    left = [link for link in layout.shaped if link.shape]
    total = sum(link.shape.rate or 0 for link in left)
    for attempt in range(ATTEMPTS):
        if not left:
            break
        names = ", ".join(link.name for link in left)
        say(f"measuring {names} again: not yet what was asked for" if attempt else f"measuring {names}")
        # All at once do not hold each other up, if this machine can do so much.
        _measure(network, left, probes, together=not attempt and total * REACH <= machine)
        left = [link for link in left if not probes.verdicts[link.name].holds]
    return probes


def _measure(network: Network, links: Sequence[Link], probes: Probes, *, together: bool) -> None:
    """Read each of ``links``, in both directions, and judge it."""
    found: dict[tuple[str, bool], float] = {}

    def measure(link: Link, up: bool) -> None:
        found[link.name, up] = _rate(network, link, up=up, delay=2 * link.shape.delay)

    network.shape(lossless=True)
    for up in (True, False):
        works = [partial(measure, link, up) for link in links if link.shape.rate is not None]
        if together:
            parallel(works)
        else:
            for work in works:
                work()
    network.shape()

    def judged(link: Link) -> None:
        target = network.layout.operator.addresses.end
        operator, end = network.place(network.layout.operator.name), network.place(link.name)
        trips = round_trips(operator, end, target, lossy=bool(link.shape.loss))
        up, down = (found.get((link.name, up), 0.0) for up in (True, False))
        reading = Reading(up, down, trips)
        probes.readings[link.name] = reading
        probes.verdicts[link.name] = judge(link.name, link.shape, reading, probes.machine)

    parallel([partial(judged, link) for link in links])


def _rate(network: Network, link: Link, *, up: bool, delay: float = 0.0, windows: int = LONGEST) -> float:
    operator = network.layout.operator
    return rate(
        network.place(operator.name),
        network.place(link.name),
        operator.addresses.end,
        up=up,
        delay=delay,
        windows=windows,
    )


def refused(probes: Probes) -> ProbeError:
    """What is raised where links are not what was asked for."""
    return ProbeError(
        "the links are not what was asked for, so that figures would mean nothing:\n  "
        + "\n  ".join(probes.problems)
        + "\nother work on this machine may be the cause; --no-probe trains all the same, and says so"
    )
