"""Who may join: a pure check of what a newcomer claims against what the run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from protos.atoll_pb2 import JoinRequest
from protos.wire import PROTOCOL

MAX_NAME: Final = 128  # characters of a node's name
MAX_DIGEST: Final = 128
MAX_WEIGHT: Final = 65535


@dataclass(frozen=True)
class RunFacts:
    """What every node must agree on; an empty digest is not known yet: the first node defines it.

    ``started`` is true once round 0 has opened: newcomers then load the shared state from another node.
    """

    run_digest: str
    table_digest: str
    dtype: str
    data_digest: str
    state_digest: str
    started: bool


def refusal(request: JoinRequest, facts: RunFacts) -> str | None:
    """Why ``request`` cannot be admitted, with both values and what to do; ``None`` if it can."""
    if request.protocol != PROTOCOL:
        return (
            f"this node speaks protocol {request.protocol}, the coordinator protocol {PROTOCOL}: "
            "install the same version of atoll on both sides"
        )
    for field in ("run_digest", "table_digest", "data_digest", "dtype", "state_digest"):
        if len(getattr(request, field)) > MAX_DIGEST:
            return f"{field} has more than {MAX_DIGEST} characters"
    if len(request.name) > MAX_NAME or not request.name.isprintable():
        return f"a node's name has at most {MAX_NAME} characters, all printable: choose another with --name"
    if not 1 <= request.weight <= MAX_WEIGHT:
        return f"the weight of a node is 1 to {MAX_WEIGHT}, not {request.weight}"
    pairs = (
        (
            "run file",
            request.run_digest,
            facts.run_digest,
            "join with an invite of this run and no edited run file",
        ),
        (
            "bucket table",
            request.table_digest,
            facts.table_digest,
            "node and coordinator lay the model out differently: install the same version of atoll on both",
        ),
        ("dtype of the parameters", request.dtype, facts.dtype, "all nodes must keep the same dtype"),
        (
            "data",
            request.data_digest,
            facts.data_digest,
            "use the same text, tokenizer and split on every node",
        ),
    )
    for what, theirs, ours, advice in pairs:
        if ours and theirs != ours:
            return f"the {what} of this node is {theirs or 'missing'}, this run's is {ours}: {advice}"
    if not request.data_digest:
        return "a node must state the digest of its data"
    if facts.started:
        return None
    if request.round != 0:
        return (
            f"this node holds the state of round {request.round}, but the run has not begun (round 0): "
            "start the node afresh"
        )
    if not request.state_digest:
        return "a node must state the digest of the state it starts from"
    if facts.state_digest and request.state_digest != facts.state_digest:
        return (
            f"the initial state of this node is {request.state_digest}, the other nodes' is "
            f"{facts.state_digest}: the same seed must give the same weights; use the same versions of atoll "
            "and torch on every node"
        )
    return None
