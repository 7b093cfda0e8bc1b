"""A run over the swarm loses the node that all others began with, and then its coordinator moves."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.bed import ENVIRONMENT, Bed
from bench.faults import Fault, stopped
from bench.forked import ForkedChildren
from bench.ports import free_port
from coordinator.audit import audit
from coordinator.journal_reading import JournalReader
from deploy.processes import Children
from tests.system.conftest import alive
from tests.system.notices import swarm_address, told
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("hivemind") is None,
        reason="hivemind is missing: pip install '.[swarm]'",
    ),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from Linux's /proc"),
]

PACE = Fault(compute=0.03)  # or nodes that train leave one that starts no processor
DEADLINE = 30.0  # of a round, seconds
RUN = {
    "run": {"rounds": 1_000_000, "nodes": 3},
    "model": {"d_model": 64, "layers": 2, "heads": 4},
    "method": {"name": "sign-muon", "warmup": 0},
    "round": {"adaptive": False, "deadline": DEADLINE, "start_timeout": 60.0},
    "exchange": {"transport": "swarm"},
}
MORE = 3  # rounds that have to be committed after a loss


class SwarmBed(Bed):
    """A run whose nodes reach each other over libp2p."""

    def __init__(self, folder: Path, children: Children, temporary: Path) -> None:
        environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
        super().__init__(folder, children, command=(), environment=environment)
        self.temporary = temporary
        self.write(RUN)

    def enter(self, name: str, begin_with: str = "", fault: Fault = PACE) -> str:
        """A node joins and begins with another one; returns its own address in the swarm."""
        options = ["--swarm-listen", "127.0.0.1:0"]
        if begin_with:
            options += ["--swarm-bootstrap", begin_with]
        self.join(name, *options, fault=fault)
        return swarm_address(self, name)

    def go_on(self, *names: str) -> None:
        last = max(self.last(name) for name in names)
        for name in names:
            self.reached(name, last + MORE)

    def daemon(self, name: str) -> int:
        """The process id of a node's libp2p."""
        tasks = Path(f"/proc/{self.nodes[name].pid}/task").iterdir()
        children = [child for task in tasks for child in (task / "children").read_text().split()]
        (found,) = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "p2pd\n"]
        return int(found)

    def gone(self, *pids: int) -> None:
        """Wait for the end of processes that nobody ends but they themselves."""
        until(lambda: not any(map(alive, pids)), "the end of libp2p's processes", deadline=30.0)


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[SwarmBed]:
    with tempfile.TemporaryDirectory(prefix="at-", dir="/tmp") as short, ForkedChildren() as children:
        yield SwarmBed(tmp_path, children, Path(short))


def test_the_swarm_outlives_who_it_began_with_and_finds_the_coordinator_again(bed: SwarmBed) -> None:
    bed.lead("--snapshot-every", "5")
    first = bed.enter("first", fault=Fault("collecting", 9, compute=0.03))
    second = bed.enter("second", first)
    bed.enter("third", first)
    victim = bed.nodes["first"]

    # The one to begin with is a reducer, and dies in the middle of a round.
    bed.until(lambda: stopped(victim.pid), "the middle of a round", watch=victim)
    daemon = bed.daemon("first")
    held = max(bed.last(name) for name in ("second", "third"))
    bed.kill(victim)
    bed.go_on("second", "third")
    took = [sum(bed.rounds("second")[held + more]["seconds"].values()) for more in range(1, MORE)]
    assert max(took) < DEADLINE, took
    bed.gone(daemon)

    # Who comes later begins with another one, and sweeps up what the dead one has left.
    for folder in bed.temporary.glob("atoll-swarm-*"):
        os.utime(folder, (0, 0))
    bed.enter("late", second)
    bed.go_on("second", "third", "late")
    assert len(list(bed.temporary.glob("atoll-swarm-*"))) == 3

    # The coordinator comes back at another port: one new node is told, the others hear of it.
    hub, bed._port, bed.invite = bed.coordinator, free_port("127.0.0.1"), ""
    assert hub is not None
    bed.kill(hub)
    bed.lead("--snapshot-every", "5")
    bed.enter("told", second)
    bed.go_on("second", "third", "late", "told")
    for name in ("second", "third", "late"):
        assert f"the coordinator is at 127.0.0.1:{bed._port} now" in " ".join(told(bed, name))

    # Nothing of the run is left.
    daemons = [bed.daemon(name) for name in ("second", "third", "late", "told")]
    assert bed.coordinator is not None
    bed.kill(bed.coordinator, signal.SIGINT)
    for name in ("second", "third", "late", "told"):
        bed.ended(bed.nodes[name])
    bed.gone(*daemons)
    assert not list(bed.temporary.iterdir())
    bed.digests()
    with JournalReader(bed.journal) as reader:
        found = audit(reader.ledger)
    assert found.violations == []
    assert found.trained + found.returned == found.frontier
