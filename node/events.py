"""Events: what a node tells about its work, for a display, a log or metrics. Plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias


@dataclass(frozen=True)
class Notice:
    """A sentence for people: what is waited for, what was refused. May come from the network thread."""

    text: str


@dataclass(frozen=True)
class Started:
    """Model, data and optimizer are there."""

    run: str
    method: str
    parameters: int  # that are trained
    payload_bytes: int  # of a contribution, as a mean over the rounds
    device: str
    threads: int
    round: int  # the first to be trained
    result_bytes: int = 0  # of a result, as a mean over the rounds
    ranks: int = 1  # of the node


@dataclass(frozen=True)
class Resumed:
    """The state comes from a checkpoint of this node."""

    round: int  # the next to be trained
    path: Path


@dataclass(frozen=True)
class Joined:
    """Admitted to a run."""

    node: str
    address: str
    needs_state: bool


@dataclass(frozen=True)
class Abstained:
    """Nothing was contributed to a round."""

    round: int
    reason: str


@dataclass(frozen=True)
class MicroStep:
    """How far a round of several micro-steps is; told every few seconds only."""

    round: int
    micro_step: int  # made so far
    micro_steps: int  # of the round
    loss: float  # nats per token of the last one


@dataclass(frozen=True)
class RoundDone:
    """A round has been applied.

    ``seconds`` is wall time by phase: data, compute, propose, exchange, apply, digest, evaluate. Bytes are
    totals since the node started. ``loss`` is in nats per token of the node's own samples; NaN if none.
    ``exchange`` counts the wait only: what is computed meanwhile is in its own phases. ``skipped`` of the
    ``micro_steps`` were left out, as a gradient was not finite.

    ``spans`` tell when the phases went on, and when contribution and result were on their way while something
    was computed (``flight``): name, begin and end, in seconds since the round ``began`` (seconds since 1970).
    """

    round: int
    rounds: int
    loss: float
    tokens: int
    counted: bool
    voters: tuple[str, ...]
    agreement: float
    reason: str
    digest: str
    bytes_up: int
    bytes_down: int
    compute_seconds: float
    busy_seconds: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    validation_loss: float | None = None
    bits_per_byte: float | None = None
    micro_steps: int = 1
    skipped: int = 0
    began: float = 0.0
    spans: tuple[tuple[str, float, float], ...] = ()
    update_norm: float | None = None  # Euclidean, of what the result has changed of all weights
    others_up: int = 0  # bytes of the ranks that do not lead
    others_down: int = 0


@dataclass(frozen=True)
class RoundMissed:
    """What this node had computed for a round is lost; the coordinator orders what follows."""

    round: int
    reason: str


@dataclass(frozen=True)
class Replayed:
    """Rounds that had been committed without this node were applied from their results."""

    first: int
    count: int
    nbytes: int  # of the results
    seconds: float


@dataclass(frozen=True)
class StateLoaded:
    """The shared state before ``round`` came from a snapshot."""

    round: int
    nbytes: int
    digest: str
    seconds: float


@dataclass(frozen=True)
class StateSent:
    """This node's part of a snapshot of the shared state before ``round`` has been uploaded. May come from
    the network thread."""

    round: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class TransferFailed:
    """A transfer of shared state, or of results to catch up with, broke off; the coordinator decides what
    follows. May come from the network thread."""

    round: int
    reason: str


@dataclass(frozen=True)
class Evaluated:
    """A validation loss outside of a round, asked for with the stop."""

    round: int  # the last one applied
    validation_loss: float  # nats per token
    bits_per_byte: float


@dataclass(frozen=True)
class Saved:
    """A checkpoint is complete on disk."""

    round: int  # the next to be trained
    path: Path


@dataclass(frozen=True)
class Stopped:
    """The node leaves the run."""

    done: bool  # the run has reached its last round
    reason: str


@dataclass(frozen=True)
class Summary:
    """What a node did, from its first round to its stop."""

    done: bool  # the run has reached its last round
    reason: str
    round: int  # the next that would be trained
    trained: int  # rounds this node contributed to and was counted in
    abstained: int
    tokens: int
    loss: float  # nats per token, the node's own in its last round
    validation_loss: float  # last measured here, NaN if never
    bits_per_byte: float
    digest: str
    bytes_up: int
    bytes_down: int
    seconds: float
    compute_share: float  # of the process's CPU time


Event: TypeAlias = (
    Notice
    | Started
    | Resumed
    | Joined
    | Abstained
    | MicroStep
    | RoundDone
    | RoundMissed
    | Replayed
    | StateLoaded
    | StateSent
    | TransferFailed
    | Evaluated
    | Saved
    | Stopped
)
Listener = Callable[[Event], None]
