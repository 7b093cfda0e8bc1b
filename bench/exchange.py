"""``python -m bench exchange``: a vote by each transport, beside hivemind's averager and gloo, on thin links.

Four nodes vote on 50 million parameters, 6.25 MB of packed signs each: through the hub, between the nodes
over gRPC, and between them over the swarm. Timed is the exchange alone, from the payload in each node's
memory to the result there, of the slowest node. In the same run, in turn, hivemind's own averager brings as
many values to their mean in fp16, and gloo sums them in fp32. On links of 1 Gbit/s and 100 Mbit/s every node
and the coordinator has a network namespace of its own. The floor is what a link has to carry in its busier
direction, at its rate. Beside it, the same bytes over the same transport with nothing of ours
(:mod:`bench.bare_mesh`): what is the transport's and the machine's.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import multiprocessing
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.exchange_hivemind import AveragerFailed, Averagers, Seat, averagers
from bench.exchange_work import (
    Call,
    Carried,
    all_reduce,
    coordinate,
    join,
    join_bare,
    leave,
    meet_bare,
    swap_bare,
    vote,
)
from bench.island_ranks import Ranks, world
from bench.namespaces import INTERFACE, LOOPBACK, NamespacesUnavailable, address, linked
from bench.processes import started
from bench.report import Report, median
from deploy.processes import cpu_seconds

NODES: Final = 4
PARAMETERS: Final = 50_000_000
THIN_RATE: Final = 1_000_000  # bits a second, of the link of the coordinator that must not matter
TRANSPORTS: Final[tuple[Carried, ...]] = ("hub", "direct", "swarm")
THIN: Final = "direct-thin"
BARE: Final[dict[str, Carried]] = {"direct-bare": "direct", "swarm-bare": "swarm"}
BARE_WARM: Final = 6
CONGESTION: Final = "cubic"  # Linux's default, whatever this machine's is: it decides how links are shared
GLOO: Final = "gloo"
HIVEMIND: Final = "hivemind"


@dataclass(frozen=True)
class Place:
    """Where the nodes are: a suffix of the figures, a rate in bits a second, and how long it is measured.

    Attributes:
        repeats: of the whole sequence of contenders.
        rounds: of each of our transports in a repetition.
        warm: rounds before. Until a node keeps as many results as it ever does, each takes memory that the
            process has never had, which costs a fast link's round a tenth of its time.
        nodes: how many vote. Other numbers than four are of our transports alone.
    """

    title: str
    suffix: str
    rate: int | None
    repeats: int
    rounds: int
    warm: int = 6
    nodes: int = NODES

    @property
    def bandwidth(self) -> float | None:
        """Bytes a second."""
        return None if self.rate is None else self.rate / 8


PLACES: Final = (
    Place("loopback", "_loopback", None, 3, 5, warm=34),
    Place("1 Gbit/s", "_1g", 1_000_000_000, 3, 5, warm=34),
    # Two nodes have a core each even on a small machine: beyond the floor is not for want of cores there.
    Place("1 Gbit/s", "_1g_two", 1_000_000_000, 3, 5, warm=34, nodes=2),
    Place("100 Mbit/s", "_100m", 100_000_000, 3, 3),
)
QUICK: Final = Place("loopback", "_loopback", None, 2, 3)
QUICK_PARAMETERS: Final = 4_000_000


@dataclass(frozen=True)
class Outcome:
    """What was measured at one place.

    Attributes:
        place: where.
        parameters: that were voted on.
        calls: of each contender, by round and by node.
        problem: why hivemind's averager was given up, if it was.
        coordinators: CPU seconds of a transport's coordinator, by round.
    """

    place: Place
    parameters: int
    calls: dict[str, list[list[Call]]]
    problem: str = ""
    coordinators: dict[str, list[float]] = field(default_factory=dict)

    def seconds(self, contender: str) -> float:
        """Median over rounds, from the first node that was ready to the last one that was done."""
        spans = (max(c.end for c in calls) - min(c.start for c in calls) for calls in self.calls[contender])
        return median(list(spans))

    def megabytes(self, contender: str) -> float:
        """That left a node by its interface, on average."""
        calls, nodes = self.calls[contender], self.place.nodes
        if self.place.rate is None:  # all nodes have one interface: each has read of all
            return median([float(max(c.sent for c in of)) for of in calls]) / nodes / 1e6
        return median([sum(c.sent for c in of) / nodes for of in calls]) / 1e6

    def counted(self, contender: str, field: str) -> float:
        """Bytes, or CPU seconds, of a node, on average of the median round."""
        calls, nodes = self.calls[contender], self.place.nodes
        return median([sum(float(getattr(c, field)) for c in of) / nodes for of in calls])

    def busiest(self, contender: str) -> float:
        """CPU seconds of a round, of a node or of the coordinator, whichever has more to do."""
        return max(self.counted(contender, "cpu"), median(self.coordinators[contender]))

    def floor(self, contender: str) -> float:
        """Seconds that the link with the most to carry needs for its busier direction."""
        assert self.place.bandwidth is not None
        return link_bytes(contender, self.place.nodes, self.parameters) / self.place.bandwidth


def node_bytes(contender: str, nodes: int, parameters: int) -> float:
    """Bytes of a vote that a node sends, and that it receives: all of its payload, or (M - 1)/M of it up as
    contributions and as much down as results, and the same for the slice that it reduces."""
    payload = parameters / 8
    return payload if contender == "hub" else 2 * (nodes - 1) / nodes * payload


def link_bytes(contender: str, nodes: int, parameters: int) -> float:
    """Bytes in one direction of the busiest link; the hub's is the coordinator's."""
    return parameters / 8 * nodes if contender == "hub" else node_bytes(contender, nodes, parameters)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which places and contenders."""
    parser.add_argument("--only", choices=[place.suffix[1:] for place in PLACES], help="one place only")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=[HIVEMIND, GLOO, "swarm"], help="leave out"
    )


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """Measure on loopback and, with root and ``ip``, on both links; quick: a small vote on loopback."""
    only = None if options is None else options.only
    left_out: Sequence[str] = () if options is None else options.without
    report = Report("exchange")
    bare = () if quick else BARE
    contenders = [name for name in (*TRANSPORTS, *bare, GLOO, HIVEMIND) if name not in left_out]
    contenders = [name for name in contenders if BARE.get(name) not in left_out]
    if importlib.util.find_spec("hivemind") is None:
        report.note("no figures of the swarm and of hivemind's averager: hivemind is not installed")
        contenders = [name for name in contenders if name not in ("swarm", "swarm-bare", HIVEMIND)]
    outcomes: list[Outcome] = []
    for place in (QUICK,) if quick else PLACES:
        if only is not None and place.suffix[1:] != only:
            continue
        try:
            outcomes.append(measure(place, contenders, QUICK_PARAMETERS if quick else PARAMETERS))
        except NamespacesUnavailable as reason:
            report.note(f"no figures for {place.title}: {reason}")
    fill(report, outcomes, bars=not quick)
    if quick:
        report.note("links of 1 Gbit/s and 100 Mbit/s, 50 M parameters and the bars: without --quick")
    return report


# --------------------------------------------------------------------------------------------- measuring


def measure(place: Place, contenders: Sequence[str], parameters: int) -> Outcome:
    """All contenders at ``place``, in turn."""
    with tempfile.TemporaryDirectory(prefix="atoll-exchange-") as folder:
        if place.rate is None:
            return _measure(place, contenders, parameters, [], Path(folder))
        if place.nodes != NODES:
            contenders = [name for name in contenders if name in (*TRANSPORTS, *BARE)]
        rates = [place.rate] * (place.nodes + 1) + [THIN_RATE]
        with linked(len(rates), rates, CONGESTION) as namespaces:
            return _measure(place, [*contenders, THIN], parameters, namespaces, Path(folder))


def _measure(
    place: Place, contenders: Sequence[str], parameters: int, namespaces: Sequence[str], folder: Path
) -> Outcome:
    hosts = [address(rank) for rank in range(len(namespaces))] or ["127.0.0.1"] * (place.nodes + 1)
    ours = [name for name in (*TRANSPORTS, THIN) if name in contenders]
    calls: dict[str, list[list[Call]]] = defaultdict(list)
    coordinators: dict[str, int] = {}
    spent: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(world(place.nodes, namespaces[: place.nodes] or None))
        forks = "forkserver" in multiprocessing.get_all_start_methods()  # its server has torch, see Ranks
        context = multiprocessing.get_context("forkserver" if forks else "spawn")
        for name in ours:
            seat = place.nodes + 1 if name == THIN else place.nodes
            carried: Carried = "direct" if name == THIN else name  # type: ignore[assignment]
            space = namespaces[seat] if namespaces else ""
            invite, coordinators[name] = stack.enter_context(
                started(context, coordinate, carried, place.nodes, parameters, hosts[seat], space)
            )
            ranks.run(join, place.nodes, name, carried, invite, parameters, hosts[: place.nodes], str(folder))
        stack.callback(_leave, ranks, place.nodes)
        bare = [name for name in BARE if name in contenders]
        for name in bare:
            addresses = ranks.run(join_bare, place.nodes, name, BARE[name], parameters, hosts)
            ranks.run(meet_bare, place.nodes, name, addresses)
        for name in ours:
            for _ in range(place.warm):
                ranks.run(vote, place.nodes, name)
        for name in bare:
            for _ in range(BARE_WARM):
                ranks.run(swap_bare, place.nodes, name)
        if GLOO in contenders:
            ranks.run(all_reduce, place.nodes, parameters // 8)  # connections
        group, problem = None, ""
        try:
            group = stack.enter_context(_hivemind(contenders, parameters, hosts, namespaces, folder))
        except AveragerFailed as error:
            problem = str(error)
        for _ in range(place.repeats):
            for name in ours:
                for _ in range(place.rounds):
                    before = cpu_seconds(coordinators[name])
                    calls[name].append(ranks.run(vote, place.nodes, name))
                    spent[name].append(cpu_seconds(coordinators[name]) - before)
            for name in bare:
                calls[name] += [ranks.run(swap_bare, place.nodes, name) for _ in range(place.rounds)]
            if GLOO in contenders:
                calls[GLOO].append(ranks.run(all_reduce, place.nodes, parameters))
            if group is not None:
                try:
                    calls[HIVEMIND].append(group.average())
                except AveragerFailed as error:
                    group, problem = None, str(error)
    return Outcome(place, parameters, dict(calls), problem, dict(spent))


def _leave(ranks: Ranks, nodes: int) -> None:
    if ranks.alive:  # else one has failed, and all were ended
        ranks.run(leave, nodes)


@contextlib.contextmanager
def _hivemind(
    contenders: Sequence[str], parameters: int, hosts: Sequence[str], namespaces: Sequence[str], folder: Path
) -> Iterator[Averagers | None]:
    if HIVEMIND not in contenders:
        yield None
        return
    interface = INTERFACE if namespaces else LOOPBACK
    seats = [
        Seat(NODES, parameters, hosts[rank], interface, namespaces[rank] if namespaces else "")
        for rank in range(NODES)
    ]
    with averagers(seats, folder) as group:
        group.average()
        yield group


# ------------------------------------------------------------------------------------------------ report


def fill(report: Report, outcomes: Sequence[Outcome], *, bars: bool) -> None:
    """Figures and tables."""
    for add in (_ratios, _bytes, _seconds, _cpu):
        for outcome in outcomes:
            add(report, outcome, bars)
    for outcome in outcomes:
        place = outcome.place
        if outcome.problem:
            report.note(f"{place.title}: hivemind's averager was given up: {outcome.problem}")
        table = report.table(
            f"{place.nodes} nodes, {outcome.parameters / 1e6:g} M parameters, {place.title}",
            *("exchange", "seconds", "floor", "MB sent by a node's link"),
        )
        for name in outcome.calls:
            floor = "" if place.rate is None or name in (GLOO, HIVEMIND) else outcome.floor(name)
            table.row(name, outcome.seconds(name), floor, outcome.megabytes(name))
    report.note("seconds: payload in memory until the result is there, of the slowest of the nodes; medians")
    report.note("hivemind: its DecentralizedAverager in fp16, group found before; gloo: all-reduce in fp32")
    report.note("ours without TLS, what it costs: python -m bench tls; hivemind's and the swarm's encrypt")
    report.note(
        "bare: as many bytes over the same transport, in chunks of the same size, and nothing of ours"
    )
    report.note(f"the links' TCP is {CONGESTION}, Linux's default")
    report.note("direct-thin: direct, with a coordinator whose link carries 1 Mbit/s")
    report.note(
        "cpu: of a node, its daemon included, and of the coordinator, seconds a round; over_floor: of the"
    )
    report.note("busier of the two: below 1 the link is what a machine with a core for each waits for")
    report.note("all processes, hivemind's and libp2p's too, share the cores of this machine")


def _ratios(report: Report, outcome: Outcome, bars: bool) -> None:
    place, calls, seconds = outcome.place, outcome.calls, outcome.seconds
    if HIVEMIND in calls and "swarm" in calls:
        floor = 12.0 if bars else None
        report.add(f"hivemind_over_swarm{place.suffix}", seconds(HIVEMIND) / seconds("swarm"), floor=floor)
    if GLOO in calls:
        slow = place.rate is not None and place.rate <= 100_000_000
        floor = 20.0 if bars and slow else None
        report.add(f"gloo_over_direct{place.suffix}", seconds(GLOO) / seconds("direct"), floor=floor)
    if place.rate is None:
        return
    for name in TRANSPORTS:
        if name in calls:
            over = seconds(name) / outcome.floor(name)
            report.add(f"{name}_over_floor{place.suffix}", over, ceiling=1.5 if bars else None)
    for bare, ours in BARE.items():
        if bare in calls:
            over = seconds(bare) / outcome.floor(bare)
            report.add(f"{bare.replace('-', '_')}_over_floor{place.suffix}", over)
            report.add(f"{ours}_over_bare{place.suffix}", seconds(ours) / seconds(bare))
    thin = seconds(THIN) / seconds("direct")
    report.add(f"direct_thin_coordinator{place.suffix}", thin, ceiling=1.2 if bars else None)


def _bytes(report: Report, outcome: Outcome, bars: bool) -> None:
    for name in TRANSPORTS:
        if name not in outcome.calls:
            continue
        formula = node_bytes(name, outcome.place.nodes, outcome.parameters)
        up, down = outcome.counted(name, "up"), outcome.counted(name, "down")
        ceiling = 1.01 if bars else None
        report.add(f"bytes_over_formula_{name}_up{outcome.place.suffix}", up / formula, ceiling=ceiling)
        report.add(f"bytes_over_formula_{name}_down{outcome.place.suffix}", down / formula, ceiling=ceiling)
        share = outcome.counted(name, "control") / (up + down)
        report.add(f"control_share_{name}{outcome.place.suffix}", share, ceiling=0.01 if bars else None)


def _seconds(report: Report, outcome: Outcome, bars: bool) -> None:
    for name in outcome.calls:
        report.add(f"{name.replace('-', '_')}_seconds{outcome.place.suffix}", outcome.seconds(name))


def _cpu(report: Report, outcome: Outcome, bars: bool) -> None:
    suffix = outcome.place.suffix
    for name in BARE:
        if name in outcome.calls:
            report.add(f"{name.replace('-', '_')}_cpu_seconds{suffix}", outcome.counted(name, "cpu"))
    for name in TRANSPORTS:
        if not outcome.coordinators.get(name):
            continue
        report.add(f"{name}_cpu_seconds{suffix}", outcome.counted(name, "cpu"))
        report.add(f"{name}_coordinator_cpu_seconds{suffix}", median(outcome.coordinators[name]))
        if outcome.place.rate is not None:
            report.add(f"{name}_cpu_over_floor{suffix}", outcome.busiest(name) / outcome.floor(name))
