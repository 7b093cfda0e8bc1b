"""Nodes that reduce slices die, stand still, or cannot reach each other: the rounds between them go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench import namespaces
from bench.bed import Bed, Log
from bench.faults import NONE, Fault, stopped
from bench.forked import ForkedChildren
from coordinator.audit import audit
from coordinator.journal_reading import JournalReader
from deploy.processes import Child, Children

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from Linux's /proc"),
]

NO_LINKS = namespaces.why_not()
PACE = Fault(compute=0.03)  # or nodes that train leave one that starts no processor
STEADY = ("a", "b", "c")
MORE = 3  # rounds that have to be committed after a fault
RUN = {
    "run": {"rounds": 1_000_000, "nodes": len(STEADY)},
    "model": {"d_model": 64, "layers": 2, "heads": 4},
    "method": {"name": "sign-muon", "warmup": 0},
    "round": {"adaptive": False, "deadline": 15.0, "start_timeout": 60.0},
    "exchange": {"transport": "direct"},
}
# How often a reducer comes there before it is hit; by then it has reduced whole rounds.
KILLED = {"ordered": 4, "collecting": 12, "told": 9, "committed": 3}


class Mesh(Bed):
    """A run whose slices travel between nodes."""

    def __init__(self, folder: Path, children: Children, *, host: str = "127.0.0.1") -> None:
        super().__init__(folder, children, command=(), host=host)
        self.write(RUN)
        self.log = Log(folder / "coordinator.jsonl")

    def start_hub(self, fault: Fault = NONE, **more: str) -> Child:
        # Three heartbeats fit into a standstill: who stands still is taken for gone.
        armed = Fault(fault.point, fault.times, heartbeat=1.0)
        return self.lead("--snapshot-every", "15", "--events", str(self.log.path), fault=armed, **more)

    def go_on(self, rounds: int = MORE) -> None:
        """All steady nodes apply more rounds than any has by now."""
        last = max(self.last(name) for name in STEADY)
        for name in STEADY:
            self.reached(name, last + rounds)

    def hit(self, name: str, fault: Fault) -> Child:
        """A node joins, and stops itself."""
        victim = self.join(name, fault=fault)
        self.until(lambda: stopped(victim.pid), f"{name} {fault.point}", watch=victim)
        return victim

    def reducers(self) -> list[list[str]]:
        """Of each topology."""
        return [event["reducers"] for event in self.log.read() if event["event"] == "TopologyMade"]

    def left(self) -> list[str]:
        return [event["name"] for event in self.log.read() if event["event"] == "NodeLeft"]

    def close(self) -> None:
        """End the run; its states and its journal have to be sound."""
        assert self.coordinator is not None
        self.kill(self.coordinator, signal.SIGINT)
        for name in STEADY:
            self.ended(self.nodes[name])
        self.digests()
        with JournalReader(self.journal) as reader:
            found = audit(reader.ledger)
        assert found.violations == []
        assert found.rounds >= max(self.last(name) for name in STEADY)
        assert found.trained + found.returned == found.frontier


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """One run for all: of its steady nodes one is called directly, one through the coordinator as it wants
    it so, and one as nobody gets to the address that it names."""
    with ForkedChildren() as children:
        made = Mesh(tmp_path_factory.mktemp("mesh"), children)
        made.start_hub()
        made.join("a", fault=PACE)
        made.join("b", "--transport", "hub", fault=PACE)
        made.join("c", "--peer-address", "127.0.0.1:9", fault=PACE)
        made.go_on()
        yield made


def test_only_who_can_be_called_reduces(mesh: Mesh) -> None:
    assert {len(reducers) for reducers in mesh.reducers()} == {1}


@pytest.mark.parametrize("phase", KILLED)
def test_a_reducer_is_killed(phase: str, mesh: Mesh) -> None:
    name = f"killed-{phase}"
    victim = mesh.hit(name, Fault(phase, KILLED[phase]))
    assert len(mesh.reducers()[-1]) == 2
    mesh.kill(victim)
    mesh.go_on()
    assert len(mesh.reducers()[-1]) == 1
    assert mesh.last(name) >= 0


def test_a_reducer_stands_still_and_comes_back(mesh: Mesh) -> None:
    victim = mesh.hit("frozen", Fault("collecting", 8))
    mesh.until(lambda: "frozen" in mesh.left(), "the end of its session")
    missed = mesh.last("a")
    mesh.go_on(4 * MORE)  # more than the last results
    os.kill(victim.pid, signal.SIGCONT)
    mesh.until(lambda: len(mesh.reducers()[-1]) == 2, "its return")
    mesh.reached("frozen", mesh.last("a") + 1)
    assert any(event["event"] == "CatchUpPlanned" and event["round"] > missed for event in mesh.log.read())
    mesh.kill(victim, signal.SIGINT)
    mesh.go_on()  # or a coordinator that is started again would wait for it


@pytest.mark.parametrize("phase", ["open", "journaled"])
def test_the_coordinator_is_killed(phase: str, mesh: Mesh) -> None:
    assert mesh.coordinator is not None
    mesh.kill(mesh.coordinator)
    hub = mesh.start_hub(Fault(phase, 3))
    mesh.until(lambda: stopped(hub.pid), f"a coordinator that is {phase}", watch=hub)
    mesh.kill(hub)
    mesh.start_hub()
    mesh.go_on()


def test_states_and_journal_are_sound(mesh: Mesh) -> None:
    mesh.close()


def test_rounds_go_by_the_coordinator_while_nobody_can_be_called(tmp_path: Path) -> None:
    with ForkedChildren() as children:
        mesh = Mesh(tmp_path, children)
        mesh.start_hub()
        for name in STEADY:
            mesh.join(name, "--transport", "hub", fault=PACE)
        mesh.go_on()
        late = mesh.join("late", fault=PACE)  # it can: from now on its slices are all
        mesh.until(lambda: mesh.reducers()[-1] != [], "a reducer", watch=late)
        mesh.go_on()
        mesh.kill(late)
        mesh.go_on()
        assert mesh.reducers()[-1] == []
        mesh.close()


@pytest.mark.root
@pytest.mark.skipif(NO_LINKS is not None, reason=str(NO_LINKS))
def test_two_nodes_without_a_route_meet_at_the_coordinator(tmp_path: Path) -> None:
    with namespaces.linked(len(STEADY) + 1, 1_000_000_000) as spaces, ForkedChildren() as children:
        mesh = Mesh(tmp_path, children, host=namespaces.address(len(STEADY)))
        mesh.start_hub(namespace=spaces[-1])
        for index, name in enumerate(STEADY):
            mesh.join(name, fault=PACE, namespace=spaces[index])
        mesh.go_on()
        assert len(mesh.reducers()[-1]) == len(STEADY)
        namespaces.part(spaces[0], namespaces.address(1))
        namespaces.part(spaces[1], namespaces.address(0))
        mesh.go_on(2 * MORE)

        def told() -> bool:
            said = "".join((mesh.folder / f"{name}.log").read_text() for name in "ab")
            return "is reached through the coordinator now" in said

        mesh.until(told, "a node to say how it reaches the other")
        mesh.close()
