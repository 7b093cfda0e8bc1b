"""Probing all links of a test bed before its run: first without shapes, then with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from deploy.testbed.layout import Link
from deploy.testbed.network import Network
from deploy.testbed.probe import ALIKE, LONGEST, ProbeError, Reading, parallel, rate, round_trips
from deploy.testbed.verdict import REACH, Verdict, judge
from protos.units import format_rate


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
    links = [link for link in layout.shaped if link.shape]
    probe = partial(_rate, network)
    machine = max(probe(layout.sites[0], up=up, windows=ALIKE) for up in (True, False))
    say(f"a link without a shape carries {format_rate(machine)} on this machine")
    network.shape(lossless=True)
    found: dict[tuple[str, bool], float] = {}

    def measure(link: Link, up: bool) -> None:
        found[link.name, up] = probe(link, up=up, delay=2 * link.shape.delay)

    limited = [link for link in links if link.shape.rate is not None]
    total = sum(link.shape.rate or 0 for link in limited)
    for up in (True, False):
        works = [partial(measure, link, up) for link in limited]
        if total * REACH <= machine:  # all at once do not hold each other up
            parallel(works)
        else:
            for work in works:
                work()
    network.shape()
    probes = Probes(machine)

    def judged(link: Link) -> None:
        target = layout.operator.addresses.end
        operator, end = network.place(layout.operator.name), network.place(link.name)
        shape = link.shape
        trips = round_trips(operator, end, target, lossy=bool(shape.loss))
        up, down = (found.get((link.name, up), 0.0) for up in (True, False))
        reading = Reading(up, down, trips)
        probes.readings[link.name] = reading
        probes.verdicts[link.name] = judge(link.name, shape, reading, machine)

    parallel([partial(judged, link) for link in links])
    return probes


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
