"""Whole runs of nodes that reduce for each other, in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from coordinator.events import TopologyMade
from node.events import RoundDone
from node.exchange.peers.setting import PeerSetting, Transport
from node.exchange.swarm.setting import SwarmSetting
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
SWARM = SwarmSetting(("127.0.0.1",), quic=False)


def transported(run: RunFile, transport: str) -> RunFile:
    return run.model_copy(update={"exchange": run.exchange.model_copy(update={"transport": transport})})


def _needed(transports: Sequence[Transport]) -> str:
    """What the run file has to allow."""
    kinds = set(transports) - {"hub"}
    if not kinds:
        return "hub"
    return kinds.pop() if len(kinds) == 1 else "auto"


def played(
    fleet: Fleet,
    case: str,
    transports: Sequence[Transport],
    *,
    rounds: int = ROUNDS,
    swarms: Sequence[SwarmSetting] = (),
    meanwhile: Callable[[Log], None] = lambda log: None,
) -> tuple[list[str], Log]:
    """The digest after each round, on which all nodes agree, and what was said.

    Args:
        fleet: that everything runs in.
        case: of :data:`CASES`.
        transports: of the nodes n0, n1, ...
        rounds: how many.
        swarms: how each node takes part in the swarm; :data:`SWARM` by default.
        meanwhile: is called with the log while they run.
    """
    method, settings = CASES[case]
    kind = _needed(transports)
    run = transported(run_file(rounds, method, settings, nodes=len(transports)), kind)
    log = Log()
    coordinator = fleet.coordinator(run, tiny_tables(run), on_event=log.listener("coordinator"))
    names = [f"n{index}" for index in range(len(transports))]
    swarms = swarms or [SWARM] * len(names)
    nodes = [
        fleet.pool.submit(
            tiny_node,
            run,
            coordinator.invite,
            name,
            log.listener(name),
            peers=None if kind == "hub" else PeerSetting(transport, LOOPBACK, swarm=swarm),
        )
        for name, transport, swarm in zip(names, transports, swarms, strict=True)
    ]
    try:
        meanwhile(log)
    except AssertionError:
        for node in nodes:  # it may be why nothing came
            if node.done():
                node.result()
        raise
    for node in nodes:
        assert node.result(DEADLINE).done
    digests = [[done.digest for done in log.of(name, RoundDone)] for name in names]
    assert all(one == digests[0] and len(one) == rounds for one in digests)
    assert coordinator.outcome.result(DEADLINE).phase == "done"
    return digests[0], log


def most_reducers(log: Log) -> int:
    """Of the topologies that were made, how many nodes reduced at most."""
    return max((len(made.reducers) for made in log.of("coordinator", TopologyMade)), default=0)
