"""What joining costs: the rounds of those who train while others load the state, and memory to join with.

Three nodes train, each behind a link of its own, and eight others come at the same moment: the state goes up
from the three and down to the eight while the rounds go on. Before that moment the eight are there already,
with model and data, and stand still; what it takes to start a process is no part of what is compared.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from bench import namespaces
from bench.bed import Bed
from bench.faults import Fault, stopped
from bench.forked import ForkedChildren
from bench.report import Report, median
from deploy.processes import Child

STEADY: Final = ("a", "b", "c")
JOINERS: Final = 8
NODE_LINK: Final = 100_000_000  # bits a second, both ways: that of a donor, and of a joiner
COORDINATOR_LINK: Final = 1_000_000_000
BEFORE: Final = 40  # rounds to compare with; results of 33 are worth a new snapshot
MADE_AFTER: Final = 66  # rounds whose votes, a bit a parameter, are more than two states: the first is made
WARM: Final = 3  # rounds
MORE: Final = 20  # per cent of memory
RUN: Final[dict[str, dict[str, Any]]] = {
    "run": {"rounds": 1_000_000, "nodes": len(STEADY)},
    "method": {"name": "signum", "warmup": 0},
    "round": {"adaptive": False},  # measured are rounds with the votes of all
}
SMALL: Final = {"d_model": 256, "layers": 4, "heads": 4}
LARGE: Final = {"d_model": 320, "layers": 5, "heads": 4}
HEAVY: Final = {"d_model": 512, "layers": 7, "heads": 4}  # more than 20 million parameters
HOLDERS: Final = 2  # nodes that train where memory is measured


@dataclass(frozen=True)
class Wave:
    """Eight that joined at once.

    Attributes:
        before, meanwhile: seconds of every round of the others before they came, and until all had loaded.
        busy_before, busy: share of the machine's processors that was in use in these times.
        cpu: seconds of processor time that the joiners took meanwhile.
        seconds: until all had loaded the state.
        nbytes: of the state.
    """

    before: list[float]
    meanwhile: list[float]
    busy_before: float
    busy: float
    cpu: float
    seconds: float
    nbytes: int

    @property
    def ratio(self) -> float:
        """Median round time meanwhile, of that before."""
        return median(self.meanwhile) / median(self.before)


class Scene:
    """Three nodes that train, and those who come."""

    def __init__(self, bed: Bed, spaces: list[str], model: dict[str, int], compute: float) -> None:
        self._bed, self._spaces, self._waves = bed, spaces, 0
        bed.write({**RUN, "model": model})
        bed.lead(namespace=self._space(0))
        for index, name in enumerate(STEADY):
            bed.join(name, fault=Fault(compute=compute), namespace=self._space(1 + index))
        bed.reached("a", WARM)

    def _space(self, index: int) -> str:
        return self._spaces[index] if self._spaces else ""

    def wave(self) -> Wave:
        """Let eight join, and leave when they have loaded the state."""
        bed, self._waves = self._bed, self._waves + 1
        names = [f"joiner-{self._waves}-{index}" for index in range(JOINERS)]
        for index, name in enumerate(names):
            space = self._space(1 + len(STEADY) + index)
            bed.join(name, "--quiet", fault=Fault("joining"), namespace=space)
        for name in names:
            child = bed.nodes[name]
            bed.until(lambda c=child: stopped(c.pid), f"{name} before it joins", watch=child)  # type: ignore[misc]
        was, counters = time.time(), machine_seconds()
        bed.reached("a", max(MADE_AFTER, bed.last("a") + BEFORE))
        came, counters_then, last = time.time(), machine_seconds(), bed.last("a")
        cpu = -sum(process_seconds(bed.nodes[name].pid) for name in names)
        for name in names:
            os.kill(bed.nodes[name].pid, signal.SIGCONT)
        left = set(names)

        def loaded() -> bool:
            nonlocal cpu
            for name in sorted(left):
                if bed.events(name, "StateLoaded"):
                    cpu += process_seconds(bed.nodes[name].pid)
                    bed.kill(bed.nodes[name])  # it would train, on the same processors
                    left.discard(name)
            return not left

        bed.until(loaded, "the state of all joiners")
        end, counters_end = time.time(), machine_seconds()
        bed.reached("a", bed.last("a") + WARM)
        (first, *_) = bed.events(names[0], "StateLoaded")
        if first["round"] <= last:
            raise RuntimeError(f"the joiners loaded the state after {first['round']} rounds: no new snapshot")
        return Wave(
            self._rounds(was, came),
            self._rounds(came, end),
            busy_share(counters, counters_then),
            busy_share(counters_then, counters_end),
            cpu,
            end - came,
            first["nbytes"],
        )

    def _rounds(self, begin: float, end: float) -> list[float]:
        """Seconds of the rounds that began in that time; of one node, as all wait for each other."""
        began = [event["began"] for event in self._bed.events("a", "RoundDone")]
        return [after - at for at, after in pairwise(began) if begin <= at < end]


def machine_seconds() -> tuple[float, float]:
    """Processor time of this machine so far: in use, and in all; in units of the kernel."""
    values = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = values[3] + values[4]
    return float(sum(values) - idle), float(sum(values))


def busy_share(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Share in use between two readings."""
    return (after[0] - before[0]) / max(1.0, after[1] - before[1])


def process_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def status_bytes(pid: int, key: str) -> int:
    """An entry of a process's memory status: ``VmHWM``, the highest resident size, or ``VmData``.

    Raises:
        ProcessLookupError: the process has ended.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no memory any more")


def waves(count: int, model: dict[str, int], compute: float) -> list[Wave]:
    """Carry out a run into which so many waves come; ``compute``: seconds that a step takes besides."""
    shaped = namespaces.why_not() is None
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder, ForkedChildren() as children:
        rates = [COORDINATOR_LINK] + [NODE_LINK] * (len(STEADY) + JOINERS)
        if not shaped:
            bed = Bed(Path(folder), children, command=())
            scene = Scene(bed, [], model, compute)
            return [scene.wave() for _ in range(count)]
        with namespaces.linked(len(rates), rates) as spaces:
            bed = Bed(Path(folder), children, command=(), host=namespaces.address(0))
            scene = Scene(bed, spaces, model, compute)
            try:
                return [scene.wave() for _ in range(count)]
            finally:
                children.stop()


@dataclass(frozen=True)
class Memory:
    """Highest resident sizes over as many rounds, in bytes, and the limit under which another one joined."""

    steady: int
    joiner: int
    rounds: int
    data: int  # highest VmData of a steady node
    limited_rounds: int  # of the one under the limit, after it had loaded the state
    parameters: int


class Watch:
    """A node and the most data memory that it was seen with."""

    def __init__(self, bed: Bed, name: str) -> None:
        self._bed, self.name, self.data = bed, name, 0

    def trained(self, rounds: int) -> int:
        """Wait until it has taken part in so many rounds; its highest resident size by then."""
        bed, child = self._bed, self._bed.nodes[self.name]

        def holds() -> bool:
            self.data = max(self.data, status_bytes(child.pid, "VmData"))
            return [event["counted"] for event in bed.rounds(self.name).values()].count(True) >= rounds

        bed.until(holds, f"{rounds} rounds of {self.name}", watch=child)
        return status_bytes(child.pid, "VmHWM")


def limit(child: Child, nbytes: int) -> None:
    """Give a process that much data memory: heap, stacks of threads and private mappings, resident or not."""
    resource.prlimit(child.pid, resource.RLIMIT_DATA, (nbytes, nbytes))


def memory(model: dict[str, int], rounds: int, every: int) -> Memory:
    """Let two nodes join after one another, the second under a limit."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder, ForkedChildren() as children:
        bed = Bed(Path(folder), children, command=())
        bed.write({**RUN, "run": {**RUN["run"], "nodes": HOLDERS}, "model": model})
        told = bed.folder / "coordinator.jsonl"
        bed.lead("--snapshot-every", str(every), "--events", str(told))
        names = STEADY[:HOLDERS]
        for name in names:
            bed.join(name)
        watches = [Watch(bed, name) for name in names]
        steady = max(watch.trained(rounds) for watch in watches)
        bed.until(lambda: "SnapshotComplete" in told.read_text(), "a snapshot")
        bed.join("joiner")
        joiner = Watch(bed, "joiner").trained(rounds)
        if not bed.events("joiner", "StateLoaded"):
            raise RuntimeError("the joiner has replayed all rounds: it was to load a snapshot")
        data = max(watch.data for watch in watches)
        limit(bed.join("limited"), data + data * MORE // 100)
        watch = Watch(bed, "limited")
        watch.trained(MORE)
        if not bed.events("limited", "StateLoaded"):
            raise RuntimeError("the joiner under a limit has replayed all rounds: it was to load a snapshot")
        (started, *_) = bed.events("joiner", "Started")
        bed.digests()
        limited = len(bed.rounds("limited"))
        return Memory(steady, joiner, rounds, data, limited, started["parameters"])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of this bench alone."""
    parser.add_argument("--waves", type=int, metavar="N", help="of eight joiners (3; quick: 1)")


def run(quick: bool, options: argparse.Namespace | None = None) -> Report:
    """The bench."""
    report = Report("joiners")
    count = getattr(options, "waves", None) or (1 if quick else 3)
    compute = 0.05 if quick else 0.4
    came = waves(count, SMALL if quick else LARGE, compute)
    kept = memory(SMALL if quick else HEAVY, 10 if quick else 40, 40)
    report.add("round_time_ratio", median([wave.ratio for wave in came]), ceiling=1.10)
    report.add("join_memory", kept.joiner / kept.steady, ceiling=1.0 + MORE / 100)
    report.add("limited_joiner_rounds", kept.limited_rounds, floor=1)
    report.add("round_ms_before", median([1e3 * median(wave.before) for wave in came]))
    report.add("round_ms_meanwhile", median([1e3 * median(wave.meanwhile) for wave in came]))
    report.add("load_seconds", median([wave.seconds for wave in came]))
    report.add("state_bytes", came[0].nbytes)
    report.add("peak_rss_steady", kept.steady)
    report.add("peak_rss_joiner", kept.joiner)
    report.add("memory_parameters", kept.parameters)
    columns = ("wave", "ms before", "ms meanwhile", "ratio", "rounds", "s", "busy before", "busy", "CPU s")
    table = report.table(f"{JOINERS} joiners at once", *columns)
    for number, wave in enumerate(came, 1):
        ms = 1e3 * median(wave.before), 1e3 * median(wave.meanwhile)
        shares = wave.busy_before, wave.busy
        table.row(str(number), *ms, wave.ratio, len(wave.meanwhile), wave.seconds, *shares, wave.cpu)
    report.note(
        "rounds: medians, of one of three steady nodes; before: the joiners stand still with model and data; "
        "meanwhile: from their joining, over the upload of a new snapshot, until the last one has loaded it"
    )
    report.note(
        "busy: share of the processors of this machine in use, by whomever; all processes share them; "
        "CPU s: what the joiners used of them meanwhile"
    )
    report.note(
        f"memory: highest resident size (VmHWM) after {kept.rounds} rounds of a node's own; another joiner "
        f"did with RLIMIT_DATA at the highest VmData of a steady node, {kept.data / 1e6:.0f} MB, + {MORE} %"
    )
    report.note(
        f"a step of a steady node lasts {compute:g} s longer than it needs the processor, as on a device of "
        "its own; the rest is processor time and links"
    )
    reason = namespaces.why_not()
    links = f"nodes and joiners at {NODE_LINK / 1e6:g} Mbit/s, coordinator at {COORDINATOR_LINK / 1e6:g}"
    report.note(links if reason is None else f"loopback, no thin links: {reason}")
    return report
