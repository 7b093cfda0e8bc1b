"""After any end nothing is left: no process, no zombie, no socket, no temporary file, no shared memory."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed import ENVIRONMENT, Bed
from deploy.processes import Children, Grace
from tests.waiting import DEADLINE, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/environ").exists(), reason="processes are read from Linux's /proc"
    ),
]

MARK = "ATOLL_BED"
SHARED = Path("/dev/shm")
SECONDS = DEADLINE  # in which everything is to be gone
STEPS, PASSES = 200_000, 50_000  # of a round, and of a micro-step, that nobody waits for


class Traces:
    """What the processes of a bed may leave behind: it all bears a mark, or lies in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.mark = secrets.token_hex(8)
        self.temporary, self.cache = folder / "temporary", folder / "cache"
        self.temporary.mkdir()
        self._shared = set[str]()
        self.environment = {
            **ENVIRONMENT,
            MARK: self.mark,
            "TMPDIR": str(self.temporary),
            "XDG_CACHE_HOME": str(self.cache),
        }

    def processes(self) -> list[str]:
        """Those that bear the mark, or are zombies of such; with their command lines."""
        found = []
        for entry in self._entries():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found.append(f"{entry.name}: {command}")
        return found

    def _entries(self) -> Iterator[Path]:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        yield entry

    def files(self) -> list[Path]:
        """Temporary ones, sockets among them, and parts of files of the cache.

        The folder that torch makes for compiled kernels, as soon as it is imported in some way, is a cache of
        its own.
        """
        left = [*self.temporary.rglob("*"), *self.cache.rglob(".*")]
        return [path for path in left if not path.name.startswith("torchinductor_") or any(path.iterdir())]

    def note(self) -> None:
        """Remember the shared memory that the processes hold now; what else lies there is not theirs."""
        for entry in self._entries():
            with contextlib.suppress(OSError):
                lines = (entry / "maps").read_text().splitlines()
                links = [os.readlink(link) for link in (entry / "fd").iterdir()]
                self._shared.update(re.findall(rf"{SHARED}/(\S+)", "\n".join([*lines, *links])))

    def segments(self) -> list[str]:
        """Shared memory that the processes have held, and that is there still."""
        return sorted(name for name in self._shared if (SHARED / name).exists())

    def gone(self) -> None:
        """Wait until nothing is left."""
        found: list[object] = []

        def nothing() -> bool:
            found[:] = [*self.processes(), *self.files(), *self.segments()]
            return not found

        until(nothing, "the end of all traces", deadline=SECONDS, fate=lambda: f"left: {found}")


def children_of(pid: int) -> list[int]:
    """Its child processes, zombies among them."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.fixture
def traces(tmp_path: Path) -> Traces:
    return Traces(tmp_path)


@pytest.fixture
def bed(tmp_path: Path, traces: Traces) -> Iterator[Bed]:
    with Children(Grace(interrupt=3.0, terminate=2.0, kill=5.0)) as children:
        yield Bed(tmp_path, children, environment=traces.environment)
        # Whatever a failed test has left is ended before the folder is.
    traces.gone()


def test_nothing_is_left_of_a_run_that_is_done(bed: Bed, traces: Traces) -> None:
    bed.write({"run": {"rounds": 30, "nodes": 2}, "method": {"name": "sign-muon"}})
    bed.lead()
    for name in ("a", "b"):
        bed.join(name)
    bed.reached("a", 5)
    traces.note()
    for child in (*bed.nodes.values(), bed.coordinator):
        assert child is not None and bed.ended(child) == 0, child and child.fate()
    traces.gone()
    assert not (bed.folder / "invite").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_nothing_is_left_of_a_node_and_a_coordinator_that_are_signalled(
    bed: Bed, traces: Traces, number: signal.Signals, code: int
) -> None:
    bed.write({"run": {"rounds": 100_000, "nodes": 2}, "method": {"name": "sign-muon"}})
    bed.lead()
    for name in ("a", "b"):
        bed.join(name, "--wait", "2s")
    bed.reached("b", 5)
    traces.note()
    assert bed.kill(bed.nodes["b"], number) == code, bed.nodes["b"].fate()
    bed.reached("a", bed.last("a") + 20)  # its samples are those of others now, the run goes on
    assert bed.coordinator is not None
    assert bed.kill(bed.coordinator, number) == code, bed.coordinator.fate()
    stopped = 1 if number == signal.SIGINT else 31  # else the coordinator may come again
    assert bed.ended(bed.nodes["a"]) == stopped, bed.nodes["a"].fate()
    traces.gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_node_ends_after_its_local_step_and_takes_its_leave(
    bed: Bed, traces: Traces, number: signal.Signals
) -> None:
    bed.write({"run": {"rounds": 10, "nodes": 1}, "method": {"name": "local-adamw", "local_steps": STEPS}})
    bed.lead()
    node = bed.join("a")
    bed.until(lambda: bool(bed.events("a", "MicroStep")), "a step of the round", watch=node)
    traces.note()
    assert bed.kill(node, number) == 128 + number, node.fate()
    assert not bed.rounds("a"), "nobody waits for the end of the round"
    assert "Traceback" not in node.tail(60), node.tail(60)
    # It has left by itself; nothing is committed, so the coordinator waits for anybody to begin anew with.
    assert bed.coordinator is not None
    bed.until(lambda: "(a) has left" in bed.coordinator.tail(), "the node's leave", watch=bed.coordinator)
    assert bed.kill(bed.coordinator, signal.SIGINT) == 130, bed.coordinator.fate()


def test_who_interrupts_again_does_not_wait_for_the_local_step(bed: Bed, traces: Traces) -> None:
    bed.write({"run": {"rounds": 10, "nodes": 1}, "data": {"batch": PASSES}, "method": {"name": "signum"}})
    bed.lead()
    node = bed.join("a", "--accumulate", str(PASSES))
    bed.until(lambda: bool(bed.events("a", "Joined")), "the node", watch=node)
    mark = cpu_seconds(node.pid)
    bed.until(lambda: cpu_seconds(node.pid) > mark + 1.5, "the first step", watch=node)
    traces.note()
    os.kill(node.pid, signal.SIGINT)
    mark = cpu_seconds(node.pid)
    bed.until(lambda: cpu_seconds(node.pid) > mark + 0.5, "more of the step", watch=node)  # it goes on
    os.kill(node.pid, signal.SIGINT)
    assert bed.ended(node, SECONDS) == 130, node.fate()
    assert not bed.rounds("a")


def cpu_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("victim", ["leader", "follower", "agent"])
def test_nothing_is_left_of_an_island_that_loses_a_process(bed: Bed, traces: Traces, victim: str) -> None:
    bed.write({"run": {"rounds": 100_000, "nodes": 2}, "method": {"name": "sign-muon"}})
    bed.lead()
    bed.join("a")
    island = bed.join("island", "--nproc", "2")
    bed.reached("island", 5)
    traces.note()
    ranks = {_rank(pid): pid for pid in children_of(island.pid)}
    os.kill({"leader": ranks["0"], "follower": ranks["1"], "agent": island.pid}[victim], signal.SIGKILL)
    left_by = {"leader": 18, "follower": 18, "agent": -signal.SIGKILL}  # its own code is the leader's
    assert bed.ended(island) == left_by[victim], island.fate()
    bed.reached("a", bed.last("a") + 20)
    assert bed.coordinator is not None and bed.kill(bed.coordinator, signal.SIGINT) == 130
    assert bed.ended(bed.nodes["a"]) == 1
    traces.gone()


def _rank(pid: int) -> str:
    """Of a process that torchrun has started; empty for another."""
    for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if line.startswith(b"RANK="):
            return line[5:].decode()
    return ""
