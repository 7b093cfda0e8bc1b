"""The status of a run, for people and for the ``status`` command."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from coordinator.nodes import Node
from protos.atoll_pb2 import NodeStatus, StatusReply
from protos.buckets import SCALE, TableSchedule

if TYPE_CHECKING:
    from coordinator.run import Run


def reason_of(run: Run) -> str:
    """Why the run is in its phase, in words."""
    if run.phase == "training" and run.active is not None:
        return f"round {run.round + 1}: {run.active.waiting()}"
    return run.reason


def node_status(node: Node, *, between_nodes: bool = False) -> NodeStatus:
    """One node's line; bytes as this side counted them, or, where they travel ``between_nodes``, as the node
    says."""
    busy = node.busy_seconds
    told = (node.report.bytes_up, node.report.bytes_down) if between_nodes else (0, 0)
    return NodeStatus(
        node=node.node,
        name=node.name,
        state=node.state,
        round=node.report.round,
        loss=node.report.loss,
        bytes_up=max(node.bytes_in, told[0]),
        bytes_down=max(node.bytes_out, told[1]),
        agreement=node.agreement,
        missed=node.missed,
        abstained=node.abstained,
        compute_share=min(1.0, node.compute_seconds / busy) if busy > 0 else math.nan,
        address=node.address,
        ranks=node.ranks,
    )


def parameters_of(tables: TableSchedule) -> int:
    """Model parameters that travel, each counted once, without an optimizer's state and the scales of
    votes."""
    sizes: dict[str, int] = {}
    for table in tables.tables:
        for bucket in table.buckets:
            if not bucket.name.endswith(SCALE):
                for member in bucket.members:
                    sizes[member.name] = max(sizes.get(member.name, 0), member.elements)
    return sum(size for name, size in sizes.items() if not name.startswith("optimizer/"))


def status_of(run: Run, now: float, bytes_in: int, bytes_out: int) -> StatusReply:
    """The whole status; nodes that have left come last, in the state ``"left"``."""
    plan, tables, registry = run.plan, run.tables, run.registry
    up, down = tables.mean_nbytes
    between_nodes = plan.transport != "hub"
    return StatusReply(
        run=plan.name,
        run_digest=plan.run_digest,
        method=plan.method,
        phase=run.phase,
        reason=reason_of(run),
        round=run.round,
        rounds=plan.rounds,
        epoch=run.registry.roster.epoch,
        parameters=parameters_of(tables),
        payload_bytes=round(up),
        result_bytes=round(down),
        bytes_in=bytes_in,
        bytes_out=bytes_out,
        agreement=run.history.agreement,
        nodes=[
            node_status(node, between_nodes=between_nodes)
            for node in (*registry.nodes.values(), *registry.left)
        ],
        curve=run.history.curve(),
        counters=dict(run.counters),
        seconds=0.0 if run.started_at is None else (run.ending.at or now) - run.started_at,
        state_digest=run.history.agreed_digest,
        security=run.security,
        ways=f"{plan.transport}: {run.mesh.reason}" if between_nodes else "",
    )
