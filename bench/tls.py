"""``python -m bench tls``: what TLS costs a vote, in CPU seconds of a round.

The same four nodes vote through the hub and between each other, in turn with TLS and without, over loopback:
the work of :mod:`bench.exchange`, which leaves TLS out. CPU is that of a node (all its threads) and of the
coordinator; where a link carries less than a core encrypts, that is all that TLS costs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from bench.exchange_work import Call, Carried, coordinate, join, leave, vote
from bench.island_ranks import Ranks, world
from bench.processes import started
from bench.report import Report, median
from deploy.processes import cpu_seconds

NODES: Final = 4
PARAMETERS: Final = 50_000_000
QUICK_PARAMETERS: Final = 8_000_000
ROUNDS: Final = 24
QUICK_ROUNDS: Final = 6
WARM: Final = 3
TRANSPORTS: Final[tuple[Carried, ...]] = ("hub", "direct")
SECURE: Final = "-tls"
NAMES: Final = tuple(f"{carried}{end}" for carried in TRANSPORTS for end in ("", SECURE))
HOST: Final = "127.0.0.1"


@dataclass
class Measured:
    """What one way of voting cost, round by round: the calls of its nodes, the coordinator's CPU seconds."""

    calls: list[list[Call]] = field(default_factory=list)
    coordinator: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of a round, from the first node's vote to the last node's result."""
        return median([max(c.end for c in of) - min(c.start for c in of) for of in self.calls])

    @property
    def cpu(self) -> float:
        """CPU seconds of a node in a round."""
        return median([sum(c.cpu for c in of) / len(of) for of in self.calls])

    @property
    def nbytes(self) -> float:
        """Sent and received by a node in a round."""
        return median([sum(c.up + c.down for c in of) / len(of) for of in self.calls])


def run(quick: bool) -> Report:
    """Both transports with and without; quick: a smaller vote, in a quarter of the rounds."""
    parameters, rounds = (QUICK_PARAMETERS, QUICK_ROUNDS) if quick else (PARAMETERS, ROUNDS)
    return fill(Report("tls"), parameters, measure(parameters, rounds))


def measure(parameters: int, rounds: int) -> dict[str, Measured]:
    """Rounds that take turns, by :data:`NAMES`."""
    measured = {name: Measured() for name in NAMES}
    with tempfile.TemporaryDirectory(prefix="atoll-tls-") as folder, ExitStack() as stack:
        ranks = stack.enter_context(world(NODES, None))
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        coordinators: dict[str, int] = {}
        for name in NAMES:
            carried: Carried = "hub" if name.startswith("hub") else "direct"
            lead = partial(coordinate, secure=name.endswith(SECURE))
            invite, coordinators[name] = stack.enter_context(
                started(context, lead, carried, NODES, parameters, HOST, "")
            )
            ranks.run(join, NODES, name, carried, invite, parameters, [HOST] * NODES, folder)
        stack.callback(_leave, ranks)
        for index in range(WARM + rounds):
            for name, one in measured.items():
                before = cpu_seconds(coordinators[name])
                voted = ranks.run(vote, NODES, name)
                if index >= WARM:
                    one.calls.append(voted)
                    one.coordinator.append(cpu_seconds(coordinators[name]) - before)
    return measured


def fill(report: Report, parameters: int, measured: Mapping[str, Measured]) -> Report:
    """The report's figures and table from what :func:`measure` returns."""
    table = report.table(
        f"{NODES} nodes, {parameters / 1e6:g} M parameters, loopback",
        *("exchange", "seconds", "CPU s of a node", "CPU s of the coordinator"),
    )
    hubs = {name: median(one.coordinator) for name, one in measured.items()}
    for carried in TRANSPORTS:
        plain, secure = measured[carried], measured[f"{carried}{SECURE}"]
        report.add(f"{carried}_cpu_with_over_without", secure.cpu / plain.cpu)
        if carried == "hub" and hubs[carried]:
            report.add("hub_coordinator_cpu_with_over_without", hubs[f"{carried}{SECURE}"] / hubs[carried])
        added = max(0.0, secure.cpu - plain.cpu)
        report.add(f"{carried}_added_cpu_seconds_a_gigabyte", added / (secure.nbytes / 1e9))
    for name, one in measured.items():
        table.row(name, one.seconds, one.cpu, hubs[name])
        figure = name.replace("-", "_")
        report.add(f"{figure}_cpu_seconds", one.cpu)
        report.add(f"{figure}_coordinator_cpu_seconds", hubs[name])
    report.note("medians over rounds that take turns; a gigabyte: sent and received by a node")
    return report


def _leave(ranks: Ranks) -> None:
    if ranks.alive:
        ranks.run(leave, NODES)
