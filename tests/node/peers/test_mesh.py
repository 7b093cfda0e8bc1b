"""Whole runs whose slices travel between nodes: their states are the hub's, whatever carries the bytes."""

from __future__ import annotations

import pytest

from node.exchange.peers.setting import Transport
from tests.node.fleet import Fleet
from tests.node.peers.carriers_rig import NEEDS_SWARM
from tests.node.peers.mesh_rig import CASES, most_reducers, played

MIXED: tuple[Transport, ...] = ("direct", "hub", "direct")
MIXED_WITH_SWARM: tuple[Transport, ...] = ("direct", "swarm", "hub", "auto")


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


@NEEDS_SWARM
@pytest.mark.parametrize("case", ["sign-muon", "lordo"])
@pytest.mark.parametrize(
    ("transports", "reducers"), [(("swarm",) * 3, 3), (MIXED_WITH_SWARM, 3)], ids=["swarm", "mixed"]
)
def test_the_swarm_comes_to_the_same_states(
    case: str, transports: tuple[Transport, ...], reducers: int, fleet: Fleet
) -> None:
    expected, _ = played(fleet, case, ("hub",) * len(transports))
    digests, log = played(fleet, case, transports)
    assert digests == expected
    assert most_reducers(log) == reducers
