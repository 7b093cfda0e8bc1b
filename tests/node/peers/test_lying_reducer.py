"""A whole run between nodes, one of which sends a false result of its slice to all: it is caught in time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from coordinator import inquiry, sliced_round
from coordinator.events import NodeSuspected, RoundCommitted, SliceDisputed, TopologyMade
from coordinator.overdue import overdue
from node.events import RoundDone
from node.exchange.peers import deliveries, setup
from node.exchange.peers.desk import Desk
from node.exchange.peers.plan import Plan
from node.exchange.peers.setting import PeerSetting, Transport
from optim.aggregate import Bytes
from optim.bits import tally
from protos import atoll_pb2 as pb
from protos.buckets import LINE_BYTES
from protos.runfile import RunFile
from tests.node.fleet import DEADLINE, Fleet, Log, tiny_node, tiny_tables
from tests.node.peers.mesh_rig import LOOPBACK, played, transported
from tests.node.tiny import run_file

ROUNDS, NODES = 4, 4


def false_tally(*args: Any, out: Bytes | None = None, **kwargs: Any) -> Bytes:
    """The opposite of the majority."""
    made = np.bitwise_not(tally(*args, **kwargs))
    if out is not None:
        out[:] = made
    return made


class LyingDesk(Desk):
    """That of node-2, which reduces one of the three lines, makes false results from the first on."""

    def set_topology(self, message: pb.Topology, me: str) -> Plan:
        if me == "node-2":
            self._work = {digest: replace(work, tally=false_tally) for digest, work in self._work.items()}
        return super().set_topology(message, me)


def looking_at_all(run: RunFile) -> RunFile:
    byzantine = run.byzantine.model_copy(update={"retally": 256, "retally_cost": 10.0})
    return run.model_copy(update={"byzantine": byzantine})


def run_between_nodes(fleet: Fleet) -> tuple[list[str], Log]:
    run = transported(looking_at_all(run_file(ROUNDS, "sign-muon", {}, nodes=NODES)), "direct")
    log = Log()
    coordinator = fleet.coordinator(run, tiny_tables(run), on_event=log.listener("coordinator"))
    names = [f"n{index}" for index in range(NODES)]
    peers = PeerSetting("direct", LOOPBACK)
    nodes = [
        fleet.pool.submit(tiny_node, run, coordinator.invite, name, log.listener(name), peers=peers)
        for name in names
    ]
    for node in nodes:
        assert node.result(DEADLINE).done
    assert coordinator.outcome.result(DEADLINE).phase == "done"
    digests = [[done.digest for done in log.of(name, RoundDone)] for name in names]
    assert all(one == digests[0] and len(one) == ROUNDS for one in digests)
    return digests[0], log


def wait_for_the_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine nobody is late."""
    vote = np.zeros(LINE_BYTES, np.uint8)
    tally([vote, vote], casting=0)  # so that it is compiled
    monkeypatch.setattr(inquiry, "answer_patience", lambda took: DEADLINE)
    monkeypatch.setattr(sliced_round, "overdue", partial(overdue, floor=DEADLINE))
    monkeypatch.setattr(deliveries, "standing_still", lambda coming, began_at, now: ((), None))


def test_a_reducer_that_lies_is_caught_before_anybody_applies_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_the_slow(monkeypatch)
    hub: tuple[Transport, ...] = ("hub",) * NODES
    expected, _ = played(fleet, "sign-muon", hub, rounds=ROUNDS)
    honest, log = run_between_nodes(fleet)
    assert honest == expected and not log.of("coordinator", SliceDisputed)
    monkeypatch.setattr(setup, "Desk", LyingDesk)
    digests, log = run_between_nodes(fleet)
    assert digests == expected, "the states are those of an honest run"
    (found,) = log.of("coordinator", SliceDisputed)
    assert (found.node, found.round, found.outcome) == ("node-2", 0, "lied")
    (suspected,) = log.of("coordinator", NodeSuspected)
    assert (suspected.node, suspected.cause, suspected.action) == ("node-2", "lies", "warn")
    first, *later = log.of("coordinator", TopologyMade)
    assert "node-2" in first.reducers and all("node-2" not in made.reducers for made in later)
    assert all(len(committed.voters) == NODES for committed in log.of("coordinator", RoundCommitted))
