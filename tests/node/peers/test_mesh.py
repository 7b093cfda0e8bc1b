"""Whole runs whose slices travel between nodes: their states are the hub's, whatever carries the bytes."""

from __future__ import annotations

from typing import Any

import pytest

from node.events import RoundDone
from node.exchange.peers.setting import PeerSetting, Transport
from protos.address import Address
from protos.runfile import RunFile
from tests.node.fleet import DEADLINE, Fleet, Log, tiny_node, tiny_tables
from tests.node.tiny import run_file

ROUNDS = 5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sign-muon": ("sign-muon", {}),
    "ddp-adamw": ("ddp-adamw", {}),
    "lordo": ("lordo", {"local_steps": 2, "rank": 2}),
    "muloco-1bit": ("muloco-1bit", {"local_steps": 2}),
    "diloco": ("diloco", {"local_steps": 2}),
}
LOOPBACK = Address("127.0.0.1", 0)
MIXED: tuple[Transport, ...] = ("direct", "hub", "direct")


def transported(run: RunFile, transport: str) -> RunFile:
    return run.model_copy(update={"exchange": run.exchange.model_copy(update={"transport": transport})})


def played(fleet: Fleet, case: str, transports: tuple[Transport, ...]) -> tuple[list[str], Log]:
    """The digest after each round, on which all nodes agree."""
    method, settings = CASES[case]
    kind = "hub" if set(transports) == {"hub"} else "direct"
    run = transported(run_file(ROUNDS, method, settings, nodes=len(transports)), kind)
    coordinator = fleet.coordinator(run, tiny_tables(run))
    log = Log()
    names = [f"n{index}" for index in range(len(transports))]
    nodes = [
        fleet.pool.submit(
            tiny_node,
            run,
            coordinator.invite,
            name,
            log.listener(name),
            peers=None if kind == "hub" else PeerSetting(transport, LOOPBACK),
        )
        for name, transport in zip(names, transports, strict=True)
    ]
    for node in nodes:
        assert node.result(DEADLINE).done
    digests = [[done.digest for done in log.of(name, RoundDone)] for name in names]
    assert all(one == digests[0] and len(one) == ROUNDS for one in digests)
    assert coordinator.outcome.result(DEADLINE).phase == "done"
    return digests[0], log


@pytest.mark.parametrize("case", CASES)
def test_all_transports_come_to_the_same_states(case: str, fleet: Fleet) -> None:
    expected, _ = played(fleet, case, ("hub",) * 3)
    assert played(fleet, case, ("direct",) * 3)[0] == expected
    assert played(fleet, case, MIXED)[0] == expected


@pytest.mark.parametrize("case", ["sign-muon", "lordo"])
@pytest.mark.parametrize("members", [1, 2, 5, 8])
def test_with_any_number_of_nodes(case: str, members: int, fleet: Fleet) -> None:
    expected, _ = played(fleet, case, ("hub",) * members)
    assert played(fleet, case, ("direct",) * members)[0] == expected
