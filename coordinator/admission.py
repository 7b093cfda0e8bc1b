"""Who may join: a pure check of what a newcomer claims against what the run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from coordinator.start import Start, ahead, conflict
from protos.atoll_pb2 import JoinRequest
from protos.wire import PROTOCOL

MAX_NAME: Final = 128  # characters of a node's name
MAX_DIGEST: Final = 128
MAX_WEIGHT: Final = 65535
MAX_RANKS: Final = 1024  # processes of one node
MAX_BATCH: Final = 1 << 20  # samples of a micro-step, as in a run file
MAX_STATE_BYTES: Final = 1 << 46
MAX_SAMPLES: Final = 1 << 60  # of a run: what a round adds stays within 64 bits


@dataclass(frozen=True)
class RunFacts:
    """What every node must agree on; an empty digest, or 0 bytes, is not known yet: the first node says it.

    ``start`` is what the run would begin with if nobody else came. Once it has begun, with ``committed``
    rounds by now, newcomers load the shared state from another node.
    """

    run_digest: str
    table_digest: str
    dtype: str
    data_digest: str
    rounds: int
    start: Start
    state_bytes: int = 0
    state_limit: int = MAX_STATE_BYTES
    committed: int | None = None
    max_weight: int = MAX_WEIGHT


def other_version(protocol: int) -> str:
    """Why a node that speaks ``protocol`` cannot take part, and who has to upgrade; empty if it can."""
    if protocol == PROTOCOL:
        return ""
    said = f"this node speaks protocol {protocol}, the coordinator protocol {PROTOCOL}"
    if protocol < PROTOCOL:
        return f"{said}: the node's version of atoll is too old: install the coordinator's there"
    return f"{said}: the coordinator's version of atoll is too old: install the node's there"


def refusal(request: JoinRequest, facts: RunFacts) -> str | None:
    """Why ``request`` cannot be admitted, with both values and what to do; ``None`` if it can."""
    if problem := other_version(request.protocol):
        return problem
    for field in ("run_digest", "table_digest", "data_digest", "dtype", "state_digest"):
        if len(getattr(request, field)) > MAX_DIGEST:
            return f"{field} has more than {MAX_DIGEST} characters"
    if len(request.name) > MAX_NAME or not request.name.isprintable():
        return f"a node's name has at most {MAX_NAME} characters, all printable: choose another with --name"
    if not 1 <= request.weight <= facts.max_weight:
        return (
            f"the weight of a node of this run is 1 to {facts.max_weight}, not {request.weight}: join with "
            "less, or have the run file's [byzantine] max_weight raised"
        )
    if request.ranks > MAX_RANKS:
        return f"a node has at most {MAX_RANKS} ranks, not {request.ranks}: split it into several nodes"
    if request.batch > MAX_BATCH:
        return f"the batch of a node is 1 to {MAX_BATCH} samples, not {request.batch}"
    if request.samples > MAX_SAMPLES:
        return f"a run reads at most {MAX_SAMPLES} samples, not {request.samples}"
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
    if not request.state_digest:
        return "a node must state the digest of the state it starts from"
    if not 1 <= request.state_bytes <= facts.state_limit:
        return f"the shared state of this run has 1 to {facts.state_limit} bytes, not {request.state_bytes}"
    if facts.state_bytes and request.state_bytes != facts.state_bytes:
        return (
            f"the shared state of this node has {request.state_bytes} bytes, this run's "
            f"{facts.state_bytes}: install the same version of atoll on every node"
        )
    if request.lease_count > MAX_BATCH or request.lease_start > MAX_SAMPLES:
        return f"the work in hand is {request.lease_count} samples from {request.lease_start}: too many"
    if request.round > facts.rounds:
        return f"this node holds the state after {request.round} rounds, the run has {facts.rounds}"
    if facts.committed is not None:
        return ahead(request.round, facts.committed)
    return conflict(request.round, request.state_digest, facts.start)
