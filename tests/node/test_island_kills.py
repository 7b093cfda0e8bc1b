"""A rank of an island is killed at every point of a round: the run goes on, and the island comes back; also
where slices travel between the nodes, one of which the island is."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.run import Run
from coordinator.training import Training
from node.checkpoint import Meta, newest
from node.model import model_on_meta
from optim.methods import build_method
from tests.node.fleet import Fleet
from tests.node.island_rig import Island, Single, small_run
from tests.node.peers.mesh_rig import transported

PHASES = ("forward", "backward", "encode", "exchange", "apply", "checkpoint")
KILLS = [*((phase, 1) for phase in PHASES), ("exchange", 0), ("publish", 0)]
BEFORE = 3  # rounds that a rank trains until it is killed in the last of them, or at a checkpoint after it
EVERY = 2  # rounds between two checkpoints
DEADLINE = 5.0  # seconds, of a round after its first contribution
SILENCE = 15.0  # of the leader, where nothing else tells that it is gone


class Pace:
    """Holds a run between two rounds while nothing is to happen in it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.round = 0  # the next to be opened, or that in flight
        self._going = False
        self._held: tuple[asyncio.AbstractEventLoop, Run] | None = None
        self._lock = threading.Lock()
        go_on = Training.open

        def open_round(training: Training) -> None:
            run = training._run
            with self._lock:
                self.round = run.round
                if not self._going:  # those who come meanwhile are let in by the next round
                    self._held = asyncio.get_running_loop(), run
                    return
            go_on(training)

        patch.setattr(Training, "open", open_round)

    def go(self) -> None:
        with self._lock:
            self._going, held, self._held = True, self._held, None
        if held is not None:
            loop, run = held
            loop.call_soon_threadsafe(run.between_rounds)

    def hold(self) -> None:
        self._going = False


class Scene:
    """A run of two nodes of one process each, and what an island that comes and goes has saved of it."""

    def __init__(self, fleet: Fleet, pace: Pace, folder: Path, transport: str, deadline: float) -> None:
        run = transported(small_run("sign-muon", nodes=2, rounds=100_000), transport)
        limits = run.round.model_copy(update={"deadline": deadline})
        run = run.model_copy(update={"round": limits})
        tables = build_method(run.method, model_on_meta(run.model)).tables
        self.coordinator = fleet.coordinator(run, tables)
        self.pace, self.folder = pace, folder
        self.islands: list[Island] = []
        self._singles = [Single(self.coordinator.invite) for _ in range(2)]

    def island(self, orders: Mapping[int, Mapping[str, Any]]) -> Island:
        """Has joined, with the newest checkpoint."""
        island = Island(2)
        self.islands.append(island)
        each = {rank: {"once": True, **orders.get(rank, {})} for rank in range(2)}
        folder = str(self.folder)
        island.join(self.coordinator.invite, each, save=folder, resume=folder, save_every=EVERY)
        return island

    def digests(self, last: int) -> dict[int, str]:
        """Of all rounds up to ``last``, in which the single nodes are at one."""
        for single in self._singles:
            single.reach(last)
        first, second = ({event.round: event.digest for event in single.rounds} for single in self._singles)
        common = first.keys() & second.keys()
        assert common >= set(range(last + 1))
        assert {index: first[index] for index in common} == {index: second[index] for index in common}
        return first

    def saved(self) -> Meta | None:
        """The newest checkpoint."""
        path = newest(self.folder)
        return None if path is None else Meta.read(path)

    def close(self) -> None:
        for island in self.islands:
            island.close()


@contextmanager
def staged(folder: Path, transport: str, deadline: float) -> Iterator[Scene]:
    fleet = Fleet()
    with pytest.MonkeyPatch.context() as patch:
        made = Scene(fleet, Pace(patch), folder, transport, deadline)
        yield made
        made.close()
        fleet.close()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with staged(tmp_path_factory.mktemp("saved"), "hub", DEADLINE) as made:
        yield made


def events(told: Sequence[Mapping[str, Any]], kind: str) -> list[int]:
    """The rounds of the events of a kind."""
    return [line["round"] for line in told if line.get("event") == kind]


def assert_same(told: Sequence[Mapping[str, Any]], digests: Mapping[int, str]) -> None:
    rounds = {line["round"]: line["digest"] for line in told if "digest" in line and "round" in line}
    assert rounds
    assert rounds == {index: digests[index] for index in rounds}


def come_back(scene: Scene) -> list[dict[str, Any]]:
    """The island takes part again, from its newest checkpoint; what it has told until the next one."""
    start = scene.saved()
    island = scene.island({})
    scene.pace.go()
    told: list[dict[str, Any]] = []
    while not events(told, "Saved"):
        line, before = island.ranks[1].until("round")
        told += [*before, line]
    assert events(told, "Resumed") == ([] if start is None else [start.round])
    assert not list(scene.folder.glob(".*"))
    assert_same(told, scene.digests(events(told, "Saved")[0]))
    scene.coordinator.close()
    for rank in island.ranks:
        code, rest = rank.end()
        assert code == 0 and rest[-1]["done"] is False
    return told


@pytest.mark.parametrize(("phase", "victim"), KILLS)
def test_run_goes_on_without_an_island_that_has_lost_a_rank(phase: str, victim: int, scene: Scene) -> None:
    start = scene.saved()
    orders: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    orders[victim]["dies"] = [phase, BEFORE]
    if (phase, victim) == ("exchange", 0):
        orders[1]["silence"] = SILENCE
    island = scene.island(orders)
    scene.pace.go()
    code, told = island.ranks[victim].end()
    assert code == -signal.SIGKILL
    digests = scene.digests(scene.pace.round + 2)
    scene.pace.hold()
    code, survived = island.ranks[1 - victim].end()
    assert code == 1
    failed = survived[-1]["failed"]
    assert re.search(
        f"rank {victim}( has not come|, or the store of the ranks, gives no sign of life)", failed
    )

    assert_same(told, digests)
    follower = (survived, told)[victim]
    assert events(follower, "Resumed") == ([] if start is None else [start.round])
    meta = scene.saved()
    assert meta is not None
    assert meta.round == events(follower, "Saved")[-1]
    assert meta.state_digest == digests[meta.round - 1]
    assert len(list(scene.folder.glob(".*"))) == (phase == "publish")


def test_island_comes_back(scene: Scene) -> None:
    come_back(scene)


def test_an_island_that_reduces_for_others_is_lost_in_the_exchange_and_comes_back(tmp_path: Path) -> None:
    with staged(tmp_path, "direct", deadline=2.0) as scene:
        island = scene.island({1: {"dies": ["exchange", BEFORE]}})
        scene.pace.go()
        # The run is held before the exit code is waited for: fifty rounds more, and the state would be fewer
        # bytes than the results.
        told = island.ranks[1].rest()
        digests = scene.digests(scene.pace.round + 2)
        scene.pace.hold()
        assert island.ranks[1].code() == -signal.SIGKILL
        assert_same(told, digests)
        assert island.ranks[0].end()[0] == 1
        assert events(come_back(scene), "Replayed"), "the other nodes have the results"
