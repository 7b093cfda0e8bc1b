"""A long run in which three of ten contributions fail: what memory and open files of its processes come to.

A node either breaks all its connections as it begins to send, and comes back, or sends a payload that is
refused. The coordinator keeps its journal, as it does for users.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.bed import Bed
from bench.faults import Fault
from bench.forked import ForkedChildren
from bench.report import Report, median

NODES: Final = 4
FAILING: Final = 0.3
EVERY: Final = 20  # rounds between two looks
WARM: Final = 0.3  # of the rounds: threads start, allocators reach their size
RUN: Final[dict[str, dict[str, Any]]] = {
    "run": {"nodes": NODES},
    "method": {"name": "sign-muon"},
    "round": {"deadline": 5.0, "start_timeout": 60.0},
}


@dataclass
class Course:
    """What was seen of one process, look by look: rounds committed by then, resident bytes, open files."""

    rounds: list[int] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)

    def look(self, pid: int, round_index: int) -> None:
        """Take another look."""
        self.rounds.append(round_index)
        self.resident.append(resident_bytes(pid))
        self.handles.append(open_files(pid))

    @property
    def slope(self) -> float:
        """Resident bytes a round, by least squares, after the warm-up."""
        return slope(self.rounds, self.resident)

    def ends(self) -> tuple[float, float]:
        """Open files after the warm-up and at the end, each the median of several looks."""
        kept = self.handles[int(len(self.handles) * WARM) :]
        part = max(1, len(kept) // 4)
        return median(kept[:part]), median(kept[-part:])


def resident_bytes(pid: int) -> int:
    """Memory that a process has in use."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def open_files(pid: int) -> int:
    """Open file handles of a process, sockets among them."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def slope(rounds: Sequence[int], values: Sequence[float]) -> float:
    """Rise of the values a round, by least squares, without the warm-up."""
    start = int(len(rounds) * WARM)
    return float(np.polyfit(np.array(rounds[start:], float), np.array(values[start:], float), 1)[0])


def soak(folder: Path, rounds: int, failing: float = FAILING) -> tuple[dict[str, Course], Mapping[str, int]]:
    """Carry out a run; what was seen of its processes, and how often what happened to its nodes."""
    names = [f"n{index}" for index in range(NODES)]
    with ForkedChildren() as children:
        bed = Bed(folder, children, command=())
        bed.write({**RUN, "run": {**RUN["run"], "rounds": rounds}})
        pids = {"coordinator": bed.lead().pid}
        for index, name in enumerate(names):
            pids[name] = bed.join(name, fault=Fault(failing=failing, seed=index)).pid
        courses = {who: Course() for who in pids}
        for number in range(EVERY, rounds - EVERY, EVERY):
            bed.until(lambda n=number: max(map(bed.last, names)) >= n, f"round {number + 1}")  # type: ignore[misc]
            children.check()
            for who, course in courses.items():
                course.look(pids[who], number)
        for child in bed.nodes.values():
            bed.ended(child)
        bed.digests()
        told = {
            kind: sum(len(bed.events(name, kind)) for name in names)
            for kind in ("RoundDone", "RoundMissed", "StateLoaded")
        }
        counted = [event["counted"] for name in names for event in bed.events(name, "RoundDone")]
        return courses, {**told, "counted": sum(counted)}


def run(quick: bool) -> Report:
    """The bench."""
    report = Report("soak")
    rounds = 400 if quick else 2000
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        courses, told = soak(Path(folder), rounds)
    nodes = [course for who, course in courses.items() if who != "coordinator"]
    hub = courses["coordinator"]
    first, last = hub.ends()
    report.add("rss_slope_bytes_per_round", hub.slope)
    report.add("handles_first", first)
    report.add("handles_last", last)
    report.add("node_rss_slope_bytes_per_round", max(course.slope for course in nodes))
    report.add("node_handles_first", max(course.ends()[0] for course in nodes))
    report.add("node_handles_last", max(course.ends()[1] for course in nodes))
    report.add("rounds", rounds)
    report.add("contributions_counted", told["counted"] / (rounds * NODES))
    report.add("rounds_missed", told["RoundMissed"])
    table = report.table(
        "Resident memory and open files", "process", "MB first", "MB last", "files", "files last"
    )
    for who, course in courses.items():
        start = int(len(course.rounds) * WARM)
        files = course.ends()
        table.row(who, course.resident[start] / 1e6, course.resident[-1] / 1e6, *files)
    report.note(
        f"{FAILING:.0%} of {NODES} nodes' contributions fail: half by a broken connection, half refused"
    )
    report.note(
        "nodes: the worst of them; files: median of the first, and of the last, looks after the warm-up"
    )
    return report
