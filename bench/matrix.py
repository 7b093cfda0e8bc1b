"""Faults by phase: a node, a donor, a joiner or the coordinator is killed, stands still, or is cut off.

One run goes through all cases: the process that is to be hit stops itself where it is to be hit
(:mod:`bench.faults`), so that no clock decides. At the end the journal and the events of all nodes must
agree: no sample lost, none trained twice, one state after every round.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from bench import namespaces
from bench.bed import Bed, merged
from bench.faults import NONE, Fault, stopped
from bench.forked import ForkedChildren
from bench.report import Report
from coordinator.audit import Audit, audit
from coordinator.journal_reading import JournalReader
from deploy.processes import Child

Who = Literal["node", "donor", "joiner", "coordinator"]
Event = Literal["kill", "freeze", "cut"]

PHASES: Final[dict[Who, tuple[str, ...]]] = {
    "node": ("computing", "sending", "waiting", "receiving", "applying"),
    "donor": ("uploading",),
    "joiner": ("loading", "replaying"),
    "coordinator": ("gathering", "open", "delivered", "journaling", "journaled"),
}
EVENTS: Final[tuple[Event, ...]] = ("kill", "freeze", "cut")
STEADY: Final = ("a", "b")
SNAPSHOTS: Final = 15  # rounds between two, so that somebody is a donor all the time
MORE: Final = 3  # rounds that must be committed after a fault
LINK: Final = 1_000_000_000
COORDINATOR_SPACE, VICTIM_SPACE = len(STEADY), len(STEADY) + 1
RUN: Final = {
    "run": {"rounds": 1_000_000, "nodes": len(STEADY)},
    "model": {"d_model": 192, "layers": 2, "heads": 4},  # 4 chunks: every member is a donor
    "method": {"name": "sign-muon", "warmup": 0},
}


@dataclass(frozen=True)
class Case:
    """One fault."""

    who: Who
    phase: str
    event: Event

    def __str__(self) -> str:
        return f"{self.who}-{self.phase}-{self.event}"


def all_cases(*, cuts: bool) -> list[Case]:
    """Every phase with every event; without ``cuts`` those that need a network of their own are left out."""
    events = [event for event in EVENTS if cuts or event != "cut"]
    return [Case(who, phase, event) for who, phases in PHASES.items() for phase in phases for event in events]


class Scene:
    """A run that goes on while one process after the other is hit.

    Args:
        bed: where its processes are.
        spaces: a network namespace of each steady node, of the coordinator, and of whoever else joins; empty
            for loopback.
        seconds: that a process stands still, or is cut off.
        heartbeat: of the coordinator; three missed ones are a departure.
        ceiling: seconds within which the run commits again after a fault.
    """

    def __init__(
        self, bed: Bed, spaces: list[str], *, seconds: float, heartbeat: float, ceiling: float
    ) -> None:
        self.bed = bed
        self.standstills: dict[Case, float] = {}
        self._spaces, self._seconds, self._heartbeat, self._ceiling = spaces, seconds, heartbeat, ceiling
        self._victims = 0
        bed.write(merged(RUN, {"round": {"deadline": ceiling / 4, "start_timeout": ceiling / 2}}))
        self._lead()
        for index, name in enumerate(STEADY):
            bed.join(name, "--wait", "120s", namespace=self._space(index))
        bed.reached("a", 2)

    def _space(self, index: int) -> str:
        return self._spaces[index] if self._spaces else ""

    def _lead(self, fault: Fault = NONE) -> Child:
        armed = Fault(fault.point, fault.times, heartbeat=self._heartbeat)
        every = ("--snapshot-every", str(SNAPSHOTS))
        return self.bed.lead(*every, fault=armed, namespace=self._space(COORDINATOR_SPACE))

    def play(self, case: Case) -> None:
        """Carry out a case, and leave the run as it was before.

        Raises:
            BedError: the run does not go on within the ceiling, or the process that was hit does not.
        """
        if case.who == "coordinator":
            self._hit_coordinator(case)
        else:
            self._hit_node(case)

    def close(self) -> Audit:
        """End the run, and check its journal and the states of its nodes.

        Raises:
            BedError: two nodes had different states after a round.
        """
        bed = self.bed
        assert bed.coordinator is not None
        bed.kill(bed.coordinator, signal.SIGINT)
        for name in STEADY:
            bed.ended(bed.nodes[name])
        bed.digests()
        with JournalReader(bed.journal) as reader:
            return audit(reader.ledger)

    def _hit_node(self, case: Case) -> None:
        bed = self.bed
        self._victims += 1
        name = f"victim-{self._victims}"
        times = 5 if case.who == "node" else 1
        fault = Fault(case.phase, times)
        victim = bed.join(name, "--wait", "60s", namespace=self._space(VICTIM_SPACE), fault=fault)
        bed.until(lambda: stopped(victim.pid), f"{name} {case.phase}", watch=victim)
        began, last = time.monotonic(), bed.last("a")
        if case.event == "kill":
            bed.kill(victim)
        else:
            with self._cut(case.event, VICTIM_SPACE), _held_until(victim, case.event):
                self._goes_on(case, began, last)
                _wait(began + self._seconds)
        self._goes_on(case, began, last)
        if case.event != "kill":
            bed.reached(name, bed.last("a") + 1)  # it has come back
            bed.kill(victim, signal.SIGINT)

    def _hit_coordinator(self, case: Case) -> None:
        bed = self.bed
        assert bed.coordinator is not None
        bed.kill(bed.coordinator)  # with the next one comes the fault
        hub = self._lead(Fault(case.phase, 1 if case.phase == "gathering" else 4))
        bed.until(lambda: stopped(hub.pid), f"a coordinator that is {case.phase}", watch=hub)
        began, last = time.monotonic(), bed.last("a")
        if case.event == "kill":
            bed.kill(hub)
            self._lead()
        else:
            with self._cut(case.event, COORDINATOR_SPACE), _held_until(hub, case.event):
                _wait(began + self._seconds)
            began = time.monotonic()  # until now nobody could go on
        self._goes_on(case, began, last)

    def _goes_on(self, case: Case, began: float, last: int) -> None:
        """Every steady node commits more rounds after the one in flight."""
        for name in STEADY:
            self.bed.reached(name, last + 1 + MORE, self._ceiling)
        self.standstills.setdefault(case, time.monotonic() - began)

    @contextlib.contextmanager
    def _cut(self, event: Event, space: int) -> Iterator[None]:
        if event != "cut":
            yield
            return
        namespaces.set_link(self._space(space), up=False)
        try:
            yield
        finally:
            namespaces.set_link(self._space(space), up=True)


@contextlib.contextmanager
def _held_until(child: Child, event: Event) -> Iterator[None]:
    """A stopped process goes on: at once, if it is only cut off, or at the end."""
    if event == "cut":
        os.kill(child.pid, signal.SIGCONT)
    yield
    if event == "freeze":
        os.kill(child.pid, signal.SIGCONT)


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


@contextlib.contextmanager
def scene(folder: Path, *, cuts: bool, seconds: float, heartbeat: float, ceiling: float) -> Iterator[Scene]:
    """A run to play cases in; with ``cuts`` each of its processes is behind a link of its own.

    Raises:
        NamespacesUnavailable: links cannot be made here.
    """
    with contextlib.ExitStack() as stack:
        count = VICTIM_SPACE + 1
        spaces = stack.enter_context(namespaces.linked(count, LINK)) if cuts else []
        children = stack.enter_context(ForkedChildren())
        host = namespaces.address(COORDINATOR_SPACE) if cuts else "127.0.0.1"
        bed = Bed(folder, children, command=(), host=host)
        yield Scene(bed, spaces, seconds=seconds, heartbeat=heartbeat, ceiling=ceiling)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this bench alone."""
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--seconds", type=float, metavar="S", help="of a standstill or a cut (30; quick: 3)")


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """The bench."""
    report = Report("matrix")
    seconds = getattr(options, "seconds", None) or (3.0 if quick else 30.0)
    reason = namespaces.why_not()
    cases = all_cases(cuts=reason is None)
    if quick:
        cases = [case for case in cases if case.event == "kill" or case.phase in ("waiting", "open")]
    cases = [case for case in cases if getattr(options, "only", "") in str(case)]
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        heartbeat = 0.5 if quick else 5.0
        made = scene(Path(folder), cuts=reason is None, seconds=seconds, heartbeat=heartbeat, ceiling=60.0)
        with made as played:
            for case in cases:
                played.play(case)
            found = played.close()
    table = report.table("Until the run goes on", "case", "seconds")
    for case, standstill in played.standstills.items():
        table.row(str(case), standstill)
    kinds = [violation.kind for violation in found.violations]
    report.add("cases", len(played.standstills))
    report.add("samples_lost", kinds.count("account"), ceiling=0)
    report.add("samples_twice", kinds.count("twice"), ceiling=0)
    report.add("other_violations", len(set(kinds) - {"account", "twice"}), ceiling=0)
    report.add("rounds", found.rounds)
    report.add("samples_trained", found.trained)
    report.add("longest_standstill_seconds", max(played.standstills.values()), ceiling=60.0)
    report.add("stood_or_cut_seconds", seconds)
    for violation in found.violations:
        report.note(violation.text)
    report.note(
        f"from the fault until both other nodes have applied {MORE} rounds more than the one in flight; of a "
        "coordinator that stood still or was cut off, from its return"
    )
    report.note("digests are equal after every round at all nodes, or the bench fails")
    if reason is not None:
        report.note(f"no cuts of the network: {reason}")
    return report
