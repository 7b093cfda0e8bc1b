"""The nodes of the load bench, a few of them, on a coordinator of this process."""

from __future__ import annotations

from prometheus_client import generate_latest

from bench.load import Seen
from bench.load_nodes import Fleet, tables
from coordinator.hub import Hub
from coordinator.metrics import Metrics
from coordinator.pool import ThreadPool
from coordinator.rounds import Policy
from coordinator.run import Run
from coordinator.server import serve
from coordinator.timer import LoopTimer
from optim.bits import tally
from tests.coordinator.coordinator_rig import make_plan, soon

NODES = 6


async def test_rounds_go_on_beside_uploads() -> None:
    votes = tables(64)
    pool = ThreadPool()
    patient = Policy(deadline=120.0, start_timeout=240.0, quorum=0.6)  # every round waits for all
    plan = make_plan(nodes=NODES, rounds=1000, policy=patient, adaptive=False)
    hub = Hub(Run(plan, votes, timer=LoopTimer(), pool=pool, tally=tally))
    metrics, seen = Metrics(hub), Seen()
    server = await serve(hub, "127.0.0.1:0", "token")
    fleet = Fleet(server.address, "token", votes.tables[0], NODES)
    try:
        await fleet.join()
        await fleet.reached(2)
        await fleet.uploads(pairs=2, nbytes=4 << 20)
        await fleet.reached(fleet.nodes[0].rounds + 2)
        seen.take(generate_latest(metrics.registry).decode())
        assert hub.tunnels.opened == 2
        assert hub.bytes_out > 8 << 20
        assert {node.name for node in fleet.nodes} == set(hub.run.registry.nodes)
        assert all(node.counted and node.heartbeats and not node.ended for node in fleet.nodes)
        assert (seen.nodes, seen.voters) == (NODES, NODES)
        assert seen.memory > 0
    finally:
        await fleet.close()
        await soon(server.stop(0.2))
        hub.close()
        pool.close()
