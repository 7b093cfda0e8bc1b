"""How much of a round each member reduces: from what every link can carry, as an exact optimum.

With a share x of M members' work, where a contribution has V bytes and a result R, a member sends
``V (1 - x) + R x (M - 1)`` and receives ``R (1 - x) + V x (M - 1)``; a coordinator, which contributes
nothing, sends ``R x M`` and receives ``V x M``. The shares make the time of the slowest link least: a linear
program, solved in rational numbers by Newton's method on a piecewise linear function, so that the same sites
always get the same shares. With equal links all members have equal ones: a butterfly.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import median
from typing import Final

NOBODY: Final = "no member can be reached by others"


@dataclass(frozen=True)
class Site:
    """Somebody who may reduce.

    Attributes:
        node: name within the run.
        uplink, downlink: bytes per second; ``None``: not known. A member's counts as the median of those that
            are known, in the same direction if any is; a coordinator takes no share unless both are known.
        able: whether others can reach it.
    """

    node: str
    uplink: float | None = None
    downlink: float | None = None
    able: bool = True

    def __post_init__(self) -> None:
        for name, rate in (("uplink", self.uplink), ("downlink", self.downlink)):
            if rate is not None and not 0 < rate < math.inf:
                raise ValueError(f"{self.node}: its {name} of {rate} bytes/s must be a number above 0")


@dataclass(frozen=True)
class Shares:
    """How much of a round everybody reduces.

    Attributes:
        fractions: by node, in the order of the sites, the coordinator last; their sum is 1, or all are 0
            where nobody is able.
        seconds: of the slowest link; ``None`` where no link is known, or nobody is able.
        reason: in words.
    """

    fractions: dict[str, Fraction]
    seconds: float | None
    reason: str


@dataclass(frozen=True)
class Workload:
    """What moves in a round, and over which links.

    Attributes:
        members: how many contribute.
        nbytes, out_nbytes: of a whole contribution and of the whole result.
        rates: uplink and downlink of everybody in bytes per second, in the order of the sites, the
            coordinator last if it may reduce; those that are not known are filled in.
        able: who of them may reduce.
        coordinator: its name, if it may reduce.
        measured: whether any link is known.
        note: what was filled in, in words.
    """

    members: int
    nbytes: int
    out_nbytes: int
    rates: Mapping[str, tuple[Fraction, Fraction]]
    able: tuple[str, ...]
    coordinator: str | None
    measured: bool
    note: str

    def traffic(self, node: str, nbytes: int, out_nbytes: int) -> tuple[int, int]:
        """Bytes up and down of a node that makes ``out_nbytes`` of the result from ``nbytes`` of every
        contribution."""
        if node == self.coordinator:
            return self.members * out_nbytes, self.members * nbytes
        others = self.members - 1
        up = self.nbytes - nbytes + others * out_nbytes
        return up, self.out_nbytes - out_nbytes + others * nbytes

    def seconds(self, node: str, nbytes: int, out_nbytes: int) -> Fraction:
        """That the slower direction of that node needs."""
        up, down = self.traffic(node, nbytes, out_nbytes)
        uplink, downlink = self.rates[node]
        return max(up / uplink, down / downlink)


def shares(
    sites: Sequence[Site], contribution_bytes: int, result_bytes: int, coordinator: Site | None = None
) -> Shares:
    """The shares with which the slowest link of a round is done soonest.

    Of several such the members' are as equal as can be, and the coordinator's is as small as can be.

    Args:
        sites: all members of the round, able or not.
        contribution_bytes, result_bytes: of the whole round, from 1 on.
        coordinator: if it may reduce.

    Raises:
        ValueError: two sites have one name, or there are no bytes.
    """
    return best(workload(sites, contribution_bytes, result_bytes, coordinator))


def workload(
    sites: Sequence[Site], contribution_bytes: int, result_bytes: int, coordinator: Site | None = None
) -> Workload:
    """A round of these sites; arguments and errors as of :func:`shares`."""
    if coordinator is not None and not (coordinator.able and coordinator.uplink and coordinator.downlink):
        coordinator = None
    everybody = [*sites, coordinator] if coordinator is not None else list(sites)
    if len({site.node for site in everybody}) < len(everybody):
        raise ValueError(f"two of the sites {', '.join(site.node for site in everybody)} have one name")
    if contribution_bytes < 1 or result_bytes < 1:
        raise ValueError(f"{contribution_bytes} bytes up and {result_bytes} down: there is nothing to share")
    ups = [site.uplink for site in sites if site.uplink is not None]
    downs = [site.downlink for site in sites if site.downlink is not None]
    up, down = (Fraction(median(known)) if known else Fraction(1) for known in (ups or downs, downs or ups))
    unknown = sum(site.uplink is None or site.downlink is None for site in sites)
    measured = bool(ups or downs)
    note = ""
    if unknown:
        note = f"links of {unknown} are not known and taken for the median"
        note = note if measured else "no link is known, all are taken for equal"
    return Workload(
        members=len(sites),
        nbytes=contribution_bytes,
        out_nbytes=result_bytes,
        rates={
            site.node: (
                up if site.uplink is None else Fraction(site.uplink),
                down if site.downlink is None else Fraction(site.downlink),
            )
            for site in everybody
        },
        able=tuple(site.node for site in everybody if site.able),
        coordinator=None if coordinator is None else coordinator.node,
        measured=measured,
        note=note,
    )


def best(work: Workload) -> Shares:
    """The :func:`shares` of a round."""
    fractions = dict.fromkeys(work.rates, Fraction(0))
    if set(work.able) <= {work.coordinator}:
        return Shares(fractions, None, NOBODY)
    links = {node: _links(work, node) for node in work.rates}
    bounds = {node: _Bounds(links[node]) for node in work.able}
    seconds = max(
        bounds[node].soonest() if node in bounds else max(link.seconds(Fraction(0)) for link in links[node])
        for node in links
    )
    seconds = _feasible(list(bounds.values()), seconds)
    ranges = {
        node: (one.lower(seconds).at(seconds)[0], one.upper(seconds).at(seconds)[0])
        for node, one in bounds.items()
    }
    rest = Fraction(1)
    if work.coordinator is not None:
        del ranges[work.coordinator]
        rest = min(rest, sum((most for _, most in ranges.values()), Fraction(0)))
        fractions[work.coordinator] = 1 - rest
    level = _level(list(ranges.values()), rest)
    fractions.update((node, min(max(level, least), most)) for node, (least, most) in ranges.items())
    return Shares(fractions, float(seconds) if work.measured else None, _words(work, links, fractions))


def _words(work: Workload, links: Mapping[str, Sequence[_Link]], fractions: Mapping[str, Fraction]) -> str:
    found = [f"{sum(map(bool, fractions.values()))} reduce for {work.members} members"]
    if work.measured:
        everything = [link for both in links.values() for link in both]
        slowest = max(everything, key=lambda link: link.seconds(fractions[link.node]))
        found.append(f"the slowest link is the {slowest.direction} of {slowest.node}")
    return "; ".join([*found, work.note] if work.note else found)


@dataclass(frozen=True)
class _Link:
    """One direction of one site: ``base + slope * x`` bytes with a share of x, at ``rate`` bytes a second."""

    node: str
    direction: str
    base: int
    slope: int
    rate: Fraction

    def seconds(self, share: Fraction) -> Fraction:
        return (self.base + self.slope * share) / self.rate


@dataclass(frozen=True)
class _Line:
    """The function ``constant + slope * T``."""

    constant: Fraction
    slope: Fraction

    def at(self, seconds: Fraction) -> tuple[Fraction, Fraction]:
        """Its value, and, to choose between lines that meet there, how it goes on."""
        return self.constant + self.slope * seconds, self.slope


class _Bounds:
    """Between which two shares an able site is done within T seconds: both piecewise linear in T."""

    def __init__(self, links: Sequence[_Link]) -> None:
        self.links = links
        self.most = [_Line(Fraction(1), Fraction(0))]
        self.least = [_Line(Fraction(0), Fraction(0))]
        for link in links:
            if link.slope:
                line = _Line(Fraction(-link.base, link.slope), link.rate / link.slope)
                (self.most if link.slope > 0 else self.least).append(line)

    def soonest(self) -> Fraction:
        """The least T for which there is any share."""
        first, second = self.links
        found = [Fraction(0), Fraction(1)]
        across = first.slope * second.rate - second.slope * first.rate
        if across:
            found.append((second.base * first.rate - first.base * second.rate) / across)
        return min(max(link.seconds(x) for link in self.links) for x in found if 0 <= x <= 1)

    def upper(self, seconds: Fraction) -> _Line:
        return min(self.most, key=lambda line: line.at(seconds))

    def lower(self, seconds: Fraction) -> _Line:
        return max(self.least, key=lambda line: line.at(seconds))


def _links(work: Workload, node: str) -> tuple[_Link, _Link]:
    none, whole = work.traffic(node, 0, 0), work.traffic(node, work.nbytes, work.out_nbytes)
    uplink, downlink = work.rates[node]
    return (
        _Link(node, "uplink", none[0], whole[0] - none[0], uplink),
        _Link(node, "downlink", none[1], whole[1] - none[1], downlink),
    )


def _feasible(able: Sequence[_Bounds], seconds: Fraction) -> Fraction:
    """The least T, from ``seconds`` on, with which the largest shares reach 1 and the least do not exceed it.

    The one sum is concave in T, the other one convex: a step of Newton's method never goes too far, and ends
    on another piece or at the solution.
    """
    while True:
        most = [bounds.upper(seconds) for bounds in able]
        least = [bounds.lower(seconds) for bounds in able]
        if sum(line.at(seconds)[0] for line in most) < 1:
            lines = most
        elif sum(line.at(seconds)[0] for line in least) > 1:
            lines = least
        else:
            return seconds
        constant = sum((line.constant for line in lines), Fraction(0))
        seconds = (1 - constant) / sum((line.slope for line in lines), Fraction(0))


def _level(ranges: Sequence[tuple[Fraction, Fraction]], total: Fraction) -> Fraction:
    """The share that, cut to each range (least, most), gives ``total`` in sum."""

    def filled(level: Fraction) -> Fraction:
        return sum((min(max(level, least), most) for least, most in ranges), Fraction(0))

    points = sorted({bound for both in ranges for bound in both})
    at = bisect.bisect_right(points, total, key=filled) - 1
    growing = sum(least <= points[at] < most for least, most in ranges)
    return points[at] + (total - filled(points[at])) / growing if growing else points[at]
