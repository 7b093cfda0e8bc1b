"""Faults by phase: a node, a donor, a joiner or the coordinator is killed, stands still, or is cut off.

One run goes through all cases: the process that is to be hit stops itself where it is to be hit
(:mod:`bench.faults`), so that no clock decides. At the end the journal and the events of all nodes must
agree: no sample lost, none trained twice, one state after every round.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from bench import namespaces
from bench.bed import Bed, BedError, merged
from bench.faults import NONE, Fault, stopped
from bench.forked import ForkedChildren
from bench.report import Report
from coordinator.audit import Audit, Violation, audit
from coordinator.journal_reading import JournalReader
from deploy.processes import Child, ProcessError
from protos.waits import HEARTBEAT_SECONDS

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
CEILING: Final = 60.0  # seconds within which the run commits again
LINK: Final = 1_000_000_000
PACE: Final = Fault(compute=0.05)  # or two nodes that train leave a third no processor to start on
COORDINATOR_SPACE, VICTIM_SPACE = len(STEADY), len(STEADY) + 1
RUN: Final = {
    "run": {"rounds": 1_000_000, "nodes": len(STEADY)},
    "model": {"d_model": 192, "layers": 2, "heads": 4},  # 4 chunks: every member is a donor
    "method": {"name": "sign-muon", "warmup": 0},
    "round": {"adaptive": False},  # a victim that is slow to start gets to its phase
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
        bed.folder.mkdir(parents=True, exist_ok=True)
        bed.write(merged(RUN, {"round": {"deadline": ceiling / 4, "start_timeout": ceiling / 2}}))
        self._lead()
        for index, name in enumerate(STEADY):
            bed.join(name, "--wait", "120s", namespace=self._space(index), fault=PACE)
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
        return self._audit()

    def give_up(self) -> Audit:
        """Kill all that is left, and check the same."""
        for child in self.bed.children.children:
            if child.code is None:
                self.bed.kill(child)
        return self._audit()

    def _audit(self) -> Audit:
        self.bed.digests()
        with JournalReader(self.bed.journal) as reader:
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


@dataclass
class Course:
    """What has become of the cases that were played."""

    cases: list[Case]
    failures: list[str] = field(default_factory=list)
    standstills: dict[Case, float] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)
    rounds: int = 0
    trained: int = 0

    def go_on(self, played: Scene) -> None:
        """Play the cases that are left, up to the first one that fails."""
        finish = played.close
        while self.cases:
            case = self.cases.pop(0)
            try:
                played.play(case)
            except (BedError, ProcessError) as error:
                self._failed(f"{case}: {error}")
                finish = played.give_up
                break
            self.standstills[case] = played.standstills[case]
            _say(f"{case}: {self.standstills[case]:.1f} s; {len(self.cases)} to go")
        try:
            found = finish()
        except (BedError, ProcessError) as error:
            self._failed(f"in the end: {error}")
            return
        self.violations += found.violations
        self.rounds += found.rounds
        self.trained += found.trained

    def _failed(self, text: str) -> None:
        _say(f"FAILED: {text}")
        self.failures.append(text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """The bench."""
    report = Report("matrix")
    seconds = getattr(options, "seconds", None) or (3.0 if quick else 30.0)
    reason = namespaces.why_not()
    cases = all_cases(cuts=reason is None)
    if quick:
        cases = [case for case in cases if case.event == "kill" or case.phase in ("waiting", "open")]
    course = Course([case for case in cases if getattr(options, "only", "") in str(case)])
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        for number in itertools.count():
            made = scene(
                Path(folder) / str(number),
                cuts=reason is None,
                seconds=seconds,
                heartbeat=0.5 if quick else HEARTBEAT_SECONDS,
                ceiling=CEILING,
            )
            with made as played:
                course.go_on(played)
            if not course.cases:
                break
    table = report.table("Until the run goes on", "case", "seconds")
    for case, standstill in course.standstills.items():
        table.row(str(case), standstill)
    kinds = [violation.kind for violation in course.violations]
    report.add("cases", len(course.standstills))
    report.add("failed", len(course.failures), ceiling=0)
    report.add("samples_lost", kinds.count("account"), ceiling=0)
    report.add("samples_twice", kinds.count("twice"), ceiling=0)
    report.add("other_violations", len(kinds) - kinds.count("account") - kinds.count("twice"), ceiling=0)
    report.add("rounds", course.rounds)
    report.add("samples_trained", course.trained)
    report.add("longest_standstill_seconds", max(course.standstills.values(), default=0.0), ceiling=CEILING)
    report.add("stood_or_cut_seconds", seconds)
    for text in (*course.failures, *(violation.text for violation in course.violations)):
        report.note(text)
    report.note(
        f"from the fault until both other nodes have applied {MORE} rounds more than the one in flight; of a "
        "coordinator that stood still or was cut off, from its return"
    )
    report.note("digests are equal after every round at all nodes, or a case has failed")
    if reason is not None:
        report.note(f"no cuts of the network: {reason}")
    return report
