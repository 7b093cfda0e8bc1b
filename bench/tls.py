"""``python -m bench tls``: what TLS costs a vote, in CPU seconds of a round.

The same four nodes vote through the hub and between each other, in turn with TLS and without, over loopback:
the work of :mod:`bench.exchange`, which leaves TLS out. CPU is that of a node (all its threads) and of the
coordinator; where a link carries less than a core encrypts, that is all that TLS costs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections import defaultdict
from contextlib import ExitStack
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
HOST: Final = "127.0.0.1"


def run(quick: bool) -> Report:
    """Both transports with and without; quick: a smaller vote, in a third of the rounds."""
    parameters = QUICK_PARAMETERS if quick else PARAMETERS
    names = [f"{carried}{end}" for carried in TRANSPORTS for end in ("", SECURE)]
    calls: dict[str, list[list[Call]]] = defaultdict(list)
    spent: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="atoll-tls-") as folder, ExitStack() as stack:
        ranks = stack.enter_context(world(NODES, None))
        forks = "forkserver" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        coordinators: dict[str, int] = {}
        for name in names:
            carried: Carried = "hub" if name.startswith("hub") else "direct"
            lead = partial(coordinate, secure=name.endswith(SECURE))
            invite, coordinators[name] = stack.enter_context(
                started(context, lead, carried, NODES, parameters, HOST, "")
            )
            ranks.run(join, NODES, name, carried, invite, parameters, [HOST] * NODES, folder)
        stack.callback(_leave, ranks)
        for index in range(WARM + (QUICK_ROUNDS if quick else ROUNDS)):
            for name in names:
                before = cpu_seconds(coordinators[name])
                voted = ranks.run(vote, NODES, name)
                if index >= WARM:
                    calls[name].append(voted)
                    spent[name].append(cpu_seconds(coordinators[name]) - before)
    report = Report("tls")
    table = report.table(
        f"{NODES} nodes, {parameters / 1e6:g} M parameters, loopback",
        *("exchange", "seconds", "CPU s of a node", "CPU s of the coordinator"),
    )
    nodes = {name: median([sum(c.cpu for c in of) / NODES for of in calls[name]]) for name in names}
    hubs = {name: median(spent[name]) for name in names}
    for carried in TRANSPORTS:
        secure = f"{carried}{SECURE}"
        report.add(f"{carried}_cpu_with_over_without", nodes[secure] / nodes[carried])
        if carried == "hub" and hubs[carried]:
            report.add("hub_coordinator_cpu_with_over_without", hubs[secure] / hubs[carried])
        carries = median([sum(c.up + c.down for c in of) / NODES for of in calls[secure]])
        added = max(0.0, nodes[secure] - nodes[carried])
        report.add(f"{carried}_added_cpu_seconds_a_gigabyte", added / (carries / 1e9))
    for name in names:
        spans = [max(c.end for c in of) - min(c.start for c in of) for of in calls[name]]
        table.row(name, median(spans), nodes[name], hubs[name])
        figure = name.replace("-", "_")
        report.add(f"{figure}_cpu_seconds", nodes[name])
        report.add(f"{figure}_coordinator_cpu_seconds", hubs[name])
    report.note("medians over rounds that take turns; a gigabyte: sent and received by a node")
    return report


def _leave(ranks: Ranks) -> None:
    if ranks.alive:
        ranks.run(leave, NODES)
