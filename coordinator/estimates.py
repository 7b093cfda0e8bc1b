"""Rates of links that transfers have shown: rough ones, of which only what is far apart counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median
from typing import Final

from coordinator.shares import Site

ROUGH: Final = 2.0  # times more, or less, than it is: so far may a rate be off that transfers have shown


def evened(sites: Sequence[Site], measured_up: Collection[str], measured_down: Collection[str]) -> list[Site]:
    """The same sites, with rates to plan by.

    What a node hands to its sockets at first stays in their buffers, and what it sends may wait for the other
    side: transfers of some MB show equal links as unequal ones. Slices of unequal size make a round on equal
    links slower. So a rate that transfers have shown counts as the median of all that are known in its
    direction, unless it is more than :data:`ROUGH` times that or less than that share of it.

    Args:
        sites: as they were announced.
        measured_up: nodes whose uplink is what transfers have shown.
        measured_down: likewise, the downlink.
    """
    up = _median([site.uplink for site in sites])
    down = _median([site.downlink for site in sites])
    return [
        replace(
            site,
            uplink=_planned(site.uplink, up) if site.node in measured_up else site.uplink,
            downlink=_planned(site.downlink, down) if site.node in measured_down else site.downlink,
        )
        for site in sites
    ]


def _median(rates: Sequence[float | None]) -> float:
    known = [rate for rate in rates if rate is not None]
    return median(known) if known else 0.0


def _planned(rate: float | None, middle: float) -> float | None:
    if rate is None or not middle / ROUGH <= rate <= middle * ROUGH:
        return rate
    return middle
