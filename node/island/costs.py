"""What each way of gathering and reducing a layout costs, and which is the cheapest.

Pure arithmetic on a layout and a network card; the ways are those of :mod:`node.island.collectives`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import Literal, NamedTuple

from node.island.layout import GroupLayout

GatherMode = Literal["chunks", "roots", "peers"]
ReduceMode = Literal["fused", "chunks", "roots"]


@dataclass(frozen=True)
class Link:
    """The network card of a rank: ``bandwidth`` in bytes a second, ``latency`` in seconds a message."""

    bandwidth: float = 125e6
    latency: float = 1e-4


class Choice(NamedTuple):
    """A way and the reason for it, in words."""

    mode: str
    reason: str


def gather_costs(layout: GroupLayout, itemsize: int, link: Link) -> dict[GatherMode, float]:
    """Seconds that each way of gathering takes, were the network cards the only limit.

    ``chunks`` sends the excess and then (N - 1)/N of the buffer around a ring. A broadcast is relayed along
    a tree of depth ceil(log2 N), so every byte is paid for at each level, or at its root. The fan-out sends
    the largest segment N - 1 times from one card.
    """
    ranks = layout.ranks
    if ranks == 1:
        return {"chunks": 0.0, "roots": 0.0, "peers": 0.0}
    total, chunk = layout.total * itemsize, layout.total // ranks * itemsize
    largest = max(layout.resident(rank) for rank in range(ranks)) * itemsize
    roots = sum(layout.resident(rank) > 0 for rank in range(ranks))
    depth = ceil(log2(ranks))
    around = total * (ranks - 1) / ranks
    excess = _excess(layout) * itemsize
    return {
        "chunks": (excess + chunk * (ranks - 1)) / link.bandwidth
        + link.latency * (ranks - 1 + (0 if layout.equal else 1)),
        "roots": depth * max(around, largest) / link.bandwidth + link.latency * depth * roots,
        "peers": max(around, largest * (ranks - 1)) / link.bandwidth + link.latency * (ranks - 1),
    }


def reduce_costs(layout: GroupLayout, itemsize: int, link: Link, backend: str) -> dict[ReduceMode, float]:
    """Seconds that each way of reducing takes; the factors are those measured on gloo at 2 to 8 ranks.

    gloo runs a reduce-scatter as an all-reduce, so ``fused`` is left out there.
    """
    ranks = layout.ranks
    if ranks == 1:
        return {"roots": 0.0}
    total = layout.total * itemsize
    around = total * (ranks - 1) / ranks
    roots = sum(layout.resident(rank) > 0 for rank in range(ranks))
    costs: dict[ReduceMode, float] = {
        "roots": total * (1 + 0.09 * ranks) / link.bandwidth + link.latency * 2 * roots,
        "chunks": 1.7 * (around + _excess(layout) * itemsize) / link.bandwidth + 2 * link.latency,
    }
    if layout.equal and backend != "gloo":
        costs["fused"] = around / link.bandwidth + link.latency * (ranks - 1)
    return costs


def _excess(layout: GroupLayout) -> int:
    """Elements that the busiest rank sends or receives to turn the segments into equal chunks."""
    worst = 0
    for rank in range(layout.ranks):
        kept = overlap(layout, rank, rank)
        worst = max(worst, layout.resident(rank) - kept, layout.total // layout.ranks - kept)
    return worst


def overlap(layout: GroupLayout, rank: int, chunk: int) -> int:
    """Elements that the segment of ``rank`` shares with the equal chunk number ``chunk``."""
    size = layout.total // layout.ranks
    begin, end = max(layout.cuts[rank], chunk * size), min(layout.cuts[rank + 1], (chunk + 1) * size)
    return max(0, end - begin)


def choose(costs: dict[GatherMode, float] | dict[ReduceMode, float]) -> Choice:
    """The cheapest way (the first of equals), with all costs as the reason."""
    best = min(costs.items(), key=lambda item: item[1])[0]
    table = ", ".join(f"{mode} {seconds * 1e3:.3g} ms" for mode, seconds in costs.items())
    return Choice(best, f"{best} is the cheapest of {table}")
