"""Load: two hundred nodes on one coordinator, and uploads of 64 MB that take all that the link carries.

The coordinator is a process of its own, as always; the nodes speak the real protocol over loopback (gRPC
without TLS, a connection each) and vote at random, so that the processor's time is the coordinator's as far
as possible. Rounds are counted with the nodes alone, and while pairs of them send each other uploads through
the coordinator.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.parser import text_string_to_metric_families

from bench.load_nodes import Fleet, tables
from bench.processes import started
from bench.report import Report
from protos.address import Address
from protos.waits import HEARTBEAT_SECONDS, MISSED

TOKEN: Final = "bench"
UPLOAD: Final = 64 << 20  # bytes
RUN_FILE: Final = """
[run]
name = "bench-load"
nodes = {nodes}
rounds = 1000000
evaluate_every = 0
"""


@dataclass(frozen=True)
class Size:
    """How much is done."""

    nodes: int
    vote: int  # bytes of a contribution
    rounds: int  # with the nodes alone, and at least as many beside the uploads
    pairs: int  # that upload at a time
    uploads: int  # of each pair, one after the other


FULL: Final = Size(nodes=200, vote=32 << 10, rounds=30, pairs=4, uploads=8)
QUICK: Final = Size(nodes=40, vote=32 << 10, rounds=5, pairs=2, uploads=1)


@dataclass
class Seen:
    """What the coordinator's metrics have shown.

    Attributes:
        silence: longest that a node seemed silent, seconds.
        memory: highest resident size, bytes.
        nodes: fewest that were there.
        voters: fewest of a round, among those that were seen.
    """

    silence: float = 0.0
    memory: float = 0.0
    nodes: float = float("inf")
    voters: float = float("inf")
    refusals: dict[str, float] = field(default_factory=dict)

    def take(self, page: str) -> None:
        """Read a scrape."""
        here = 0.0
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "atoll_member_silence_seconds":
                    self.silence = max(self.silence, sample.value)
                elif sample.name == "process_resident_memory_bytes":
                    self.memory = max(self.memory, sample.value)
                elif sample.name == "atoll_nodes":
                    here += sample.value
                elif sample.name == "atoll_round_voters" and sample.value:
                    self.voters = min(self.voters, sample.value)
                elif sample.name == "atoll_refusals_total":
                    self.refusals[sample.labels["kind"]] = sample.value
        self.nodes = min(self.nodes, here)


@dataclass(frozen=True)
class Span:
    """Some rounds: how many, in how many seconds, and what was seen meanwhile."""

    rounds: int
    seconds: float
    seen: Seen


async def watched(read: Callable[[], str], fleet: Fleet, work: Any, every: float = 1.0) -> Span:
    """Do ``work`` and look at the metrics meanwhile."""
    seen, task = Seen(), asyncio.ensure_future(work)
    first, since = min(node.rounds for node in fleet.nodes), time.monotonic()
    while not task.done():
        await asyncio.wait({task}, timeout=every)
        seen.take(await asyncio.to_thread(read))
    task.result()
    return Span(min(node.rounds for node in fleet.nodes) - first, time.monotonic() - since, seen)


async def play(address: Address, read: Callable[[], str], size: Size) -> tuple[Span, Span, Fleet]:
    """The nodes alone, then with uploads."""
    fleet = Fleet(address, TOKEN, tables(size.vote).tables[0], size.nodes)
    try:
        await fleet.join()
        await fleet.reached(2)
        alone = await watched(read, fleet, fleet.reached(2 + size.rounds))

        async def saturated() -> None:
            for _ in range(size.uploads):
                await fleet.uploads(size.pairs, UPLOAD)
            await fleet.reached(2 + 2 * size.rounds)

        beside = await watched(read, fleet, saturated())
        await fleet.reached(min(node.rounds for node in fleet.nodes) + 1)
        return alone, beside, fleet
    finally:
        await fleet.close()


def coordinate(nodes: int, vote: int, ready: Any) -> None:
    """The coordinator's process."""
    from coordinator.service import run_coordinator
    from protos.runfile import RunFile

    def tell(at: Any) -> None:
        ready.put((str(at.address), str(at.metrics)))

    run_coordinator(
        RunFile.parse(RUN_FILE.format(nodes=nodes)),
        tables(vote),
        TOKEN,
        listen=Address("127.0.0.1", 0),
        metrics_listen=Address("127.0.0.1", 0),
        on_started=tell,
    )


def run(quick: bool) -> Report:
    """The bench."""
    size = QUICK if quick else FULL
    context = multiprocessing.get_context("spawn")
    with started(context, coordinate, size.nodes, size.vote) as (address, metrics):

        def read() -> str:
            with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=60) as answer:
                return str(answer.read(), "utf-8")

        alone, beside, fleet = asyncio.run(play(Address.parse(address), read, size))
    return _report(size, alone, beside, fleet)


def _report(size: Size, alone: Span, beside: Span, fleet: Fleet) -> Report:
    report = Report("load")
    report.add("lost_nodes", size.nodes - min(alone.seen.nodes, beside.seen.nodes), ceiling=0)
    report.add("memory_ratio", beside.seen.memory / alone.seen.memory, ceiling=1.5)
    silence = max(alone.seen.silence, beside.seen.silence)
    report.add("longest_silence_s", silence, ceiling=MISSED * HEARTBEAT_SECONDS)
    report.add("nodes", size.nodes)
    report.add("rounds", alone.rounds + beside.rounds, floor=2 * size.rounds)
    report.add("least_voters", min(alone.seen.voters, beside.seen.voters))
    report.add("round_ms_alone", 1e3 * alone.seconds / max(1, alone.rounds))
    report.add("round_ms_beside", 1e3 * beside.seconds / max(1, beside.rounds))
    report.add("uploaded_mb", size.pairs * size.uploads * UPLOAD / 1e6)
    report.add("memory_mb", beside.seen.memory / 1e6)
    report.add("heartbeats", sum(node.heartbeats for node in fleet.nodes))
    report.add("votes_counted", sum(node.counted for node in fleet.nodes))
    table = report.table("Rounds", "phase", "rounds", "seconds", "ms each", "silence s", "MB", "voters")
    for name, span in (("nodes alone", alone), ("beside uploads", beside)):
        seen = span.seen
        each = 1e3 * span.seconds / max(1, span.rounds)
        table.row(name, span.rounds, span.seconds, each, seen.silence, seen.memory / 1e6, seen.voters)
    report.note(f"refused or ignored meanwhile: {beside.seen.refusals or 'nothing'}")
    report.note(
        f"{size.pairs} uploads of {UPLOAD >> 20} MiB at a time, each through the coordinator to a node; "
        "coordinator and nodes share the processors of this machine; loopback without TLS"
    )
    return report
