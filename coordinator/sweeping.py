"""Dropping what makes no progress: silent nodes, results that are not read, snapshots that stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.exchange import Exchange
from protos.refusal import STALLED, Refused

if TYPE_CHECKING:
    from coordinator.run import Run


def sweep(run: Run) -> None:
    """Drop it. To be called every heartbeat."""
    now, stall = run.now(), run.plan.stall
    for node in list(run.registry.nodes.values()):
        silent = now - node.seen_at
        if node.stopping:
            if silent >= stall:
                run.departed(node, node.stopping, cleanly=True)
        elif silent >= 3 * run.plan.heartbeat and node.outbox is not None:
            run.departed(node, f"no heartbeat for {silent:.0f} s")
        elif silent >= stall and node.outbox is None:
            run.departed(node, "it joined but never opened its session")
        for exchange in node.exchanges:
            if _stalled(exchange, now - stall):
                run.count(STALLED)
                text = f"{node.node} has not read its result for {stall:g} s"
                exchange.close(Refused("", text, "DEADLINE_EXCEEDED"))
    run.snapshots.sweep()
    for _ in range(run.newcomers.sweep()):
        run.count(STALLED)


def _stalled(exchange: Exchange, since: float) -> bool:
    done = exchange.result is not None and exchange.result.committed
    return done and exchange.refusal is None and exchange.progress_at <= since
