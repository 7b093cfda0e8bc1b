"""What a node of a bench says of itself as it joins: one that exchanges payloads, and holds no model."""

from __future__ import annotations

from node.exchange.session import Claim
from protos.atoll_pb2 import GetRunReply


def claim(told: GetRunReply, name: str, state_bytes: int) -> Claim:
    """Of a node for the run that the coordinator has described.

    Args:
        told: by the coordinator.
        name: for people.
        state_bytes: of the shared state that it pretends to hold. Next to a small one results soon weigh so
            much that a node is told to give its state for a snapshot, which it cannot.
    """
    return Claim(
        name,
        told.run_digest,
        told.table_digest,
        data_digest="0" * 64,
        dtype="float32",
        state_digest="0" * 32,
        round=0,
        weight=1,
        state_bytes=state_bytes,
    )
