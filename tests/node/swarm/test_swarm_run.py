"""A run over the swarm whose daemons are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from node.events import RoundDone
from node.exchange.swarm import ports, swarm
from node.exchange.swarm.identity import hold
from node.exchange.swarm.setting import SwarmSetting
from tests.node.fleet import Fleet, Log
from tests.node.peers.mesh_rig import played
from tests.node.swarm.swarm_rig import children_named

ROUNDS = 24


@pytest.fixture
def swarms(monkeypatch: pytest.MonkeyPatch) -> dict[str, swarm.Swarm]:
    """Those of the nodes of this process, by name."""
    made: dict[str, swarm.Swarm] = {}

    class Noted(swarm.Swarm):
        def __init__(self, setting: SwarmSetting, token: str, node: str, *args: Any, **more: Any) -> None:
            super().__init__(setting, token, node, *args, **more)
            made[node] = self

    monkeypatch.setattr(swarm, "Swarm", Noted)
    return made


def test_rounds_go_on_while_daemons_are_killed(
    fleet: Fleet, sockets: Path, tmp_path: Path, swarms: dict[str, swarm.Swarm]
) -> None:
    """First that of one node, then that of the node with which the others began."""
    key = hold(tmp_path / "first.key")
    key.release()
    port = ports.choose(["127.0.0.1"], 0, quic=False)
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{key.peer}"
    first = SwarmSetting(("127.0.0.1",), port, quic=False, identity=key.path)
    other = SwarmSetting(("127.0.0.1",), quic=False, bootstrap=(address,))
    killed: list[int] = []

    def kill(log: Log) -> None:
        for name, after in (("n1", 3), ("n0", 10)):
            log.wait(name, RoundDone, after)
            killed.append(swarms[name].daemon.pid)
            os.kill(killed[-1], signal.SIGKILL)

    transports = ("swarm",) * 3
    digests, _ = played(
        fleet, "sign-muon", transports, rounds=ROUNDS, swarms=(first, other, other), meanwhile=kill
    )
    assert len(set(killed)) == 2
    assert digests == played(fleet, "sign-muon", ("hub",) * 3, rounds=ROUNDS)[0]
    assert not children_named("p2pd")
    assert not list(sockets.iterdir())


def test_rounds_open_no_streams_once_some_are_there(
    fleet: Fleet, sockets: Path, swarms: dict[str, swarm.Swarm]
) -> None:
    """Three nodes send each other two slices a round each: one raw stream for each would be six a round."""
    setting = SwarmSetting(("127.0.0.1",))
    played(fleet, "sign-muon", ("swarm",) * 3, rounds=ROUNDS, swarms=(setting,) * 3)
    opened = sum(one.carrier.opened for one in swarms.values())
    assert 0 < opened <= 2 * ROUNDS
