"""Events: what a coordinator tells about its run, for a log, a replay or a diagnosis. Plain data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class RunBegun:
    """It is settled with which state the run begins."""

    run: str
    method: str
    round: int  # the first to be trained
    rounds: int  # of the whole run
    nodes: tuple[str, ...]  # that begin it
    reason: str
    deadline: float = math.nan  # the longest, seconds
    start_timeout: float = math.nan  # seconds


@dataclass(frozen=True)
class RunResumed:
    """A coordinator goes on with the run of its journal."""

    run: str
    method: str
    round: int  # the next to commit
    rounds: int
    members: tuple[str, ...]  # of the last roster, who are waited for
    reason: str
    deadline: float = math.nan
    start_timeout: float = math.nan


@dataclass(frozen=True)
class NodeJoined:
    """A node has been admitted for the first time."""

    node: str
    name: str
    address: str
    round: int  # whose state it holds
    weight: int = 1
    ranks: int = 1
    token: str = ""  # by which it was let in, its name
    key: str = ""  # its public key: 16 hex digits of the sha256


@dataclass(frozen=True)
class NodeRejoined:
    """A node whose session had ended has taken up its name and its place again."""

    node: str
    name: str
    address: str
    round: int
    weight: int = 1
    ranks: int = 1
    token: str = ""  # by which it was let in, its name
    key: str = ""  # its public key: 16 hex digits of the sha256


@dataclass(frozen=True)
class NodeLeft:
    """A node's session has ended."""

    node: str
    name: str
    reason: str
    cleanly: bool  # it has said so itself, or was told to leave


@dataclass(frozen=True)
class NodeReported:
    """What a node has said of a round; losses in nats per token, NaN if it has trained nothing."""

    node: str
    round: int
    loss: float
    digest: str  # of its state after the round
    validation_loss: float | None = None
    bits_per_byte: float | None = None


@dataclass(frozen=True)
class TopologyMade:
    """It is settled anew who reduces what, as the nodes or the ways between them have changed."""

    number: int
    round: int  # the next to commit
    reducers: tuple[str, ...]  # none: everything goes to the coordinator
    reason: str


@dataclass(frozen=True)
class RoundOpened:
    """A round has been opened; it waits ``deadline`` seconds after its first contribution."""

    round: int
    epoch: int  # of the roster
    members: tuple[str, ...]  # in slot order
    lagging: tuple[str, ...]  # of them, who are not waited for
    deadline: float
    waits: str  # why so long, in words


@dataclass(frozen=True)
class RoundCommitted:
    """A round is kept and announced."""

    round: int
    epoch: int
    voters: tuple[str, ...]
    silent: tuple[str, ...]  # who were waited for in vain
    reason: str
    seconds: float  # since its opening
    after_first: float  # seconds since its first contribution
    nbytes: int  # of the result
    agreement: float = math.nan  # mean over voters
    weights: tuple[int, ...] = ()  # of the voters
    margin: float = math.nan  # of the votes: 1 unanimous, 0 a tie, mean over the bits


@dataclass(frozen=True)
class CatchUpPlanned:
    """How a node gets to the state of the run: ``action`` is ``replay``, ``load`` or ``wait``."""

    node: str
    action: str
    round: int  # whose state it will hold then
    nbytes: int  # that it receives
    reason: str


@dataclass(frozen=True)
class SnapshotBegun:
    """The members were asked for the state of a round, each for a part."""

    snapshot: str
    round: int
    donors: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class SnapshotComplete:
    """All chunks of a snapshot are kept and its digest is the agreed one."""

    snapshot: str
    round: int
    nbytes: int
    digest: str
    seconds: float


@dataclass(frozen=True)
class SnapshotFailed:
    """A snapshot was given up; another will be made when one is needed."""

    snapshot: str
    round: int
    reason: str


@dataclass(frozen=True)
class NodeDeviated:
    """A node holds another state than the majority after a round."""

    node: str
    round: int
    digest: str
    agreed: str
    times: int  # that it has happened to this node
    reason: str


@dataclass(frozen=True)
class DigestAgreed:
    """The nodes agree on the state after a round."""

    round: int
    digest: str


@dataclass(frozen=True)
class JournalTrouble:
    """Something about the journal: found damaged and mended, or not to be written."""

    text: str
    fatal: bool = False  # the run cannot go on


@dataclass(frozen=True)
class RunPaused:
    """The administrator has stopped the opening of rounds."""

    round: int  # the next to commit
    reason: str
    by: str = ""  # whose order it was: the name of the administrator's token


@dataclass(frozen=True)
class RunUnpaused:
    """Rounds are opened again."""

    round: int
    by: str = ""  # as above


@dataclass(frozen=True)
class NodeExpelled:
    """The administrator has a node leave for good."""

    node: str
    name: str
    reason: str
    by: str = ""  # as above; empty: by the coordinator itself


@dataclass(frozen=True)
class TokenAdded:
    """The book of tokens has a new one."""

    token: str  # its name
    role: str  # "node", "observer" or "admin"
    expires: float | None = None  # seconds since 1970


@dataclass(frozen=True)
class TokenEnded:
    """A token is valid no more; the sessions of nodes that came with it end."""

    token: str
    role: str
    reason: str  # "revoked", "expired" or "replaced"


@dataclass(frozen=True)
class TokenUsed:
    """The first call with a token from a host since the coordinator began."""

    token: str
    role: str
    host: str


@dataclass(frozen=True)
class AccessRefused:
    """A call was not let in; of one kind from one host, at most one such event a minute."""

    kind: str  # as in the counters of refusals
    token: str  # the name of the token it came with; empty: none of this run
    host: str
    key: str  # of the node, 16 hex digits of the sha256; empty: none was looked at
    reason: str
    times: int = 1  # since the last such event


@dataclass(frozen=True)
class NodeSuspected:
    """What is done about a node that is under suspicion has changed; docs/security.md says what for."""

    node: str
    name: str
    round: int  # after which
    action: str  # "none", "warn", "downweight" or "expel"
    cause: str  # "disagrees", "constant", "copies", "replays", "invalid", "abstains" or "lies"
    score: float  # of its suspicion
    reason: str


@dataclass(frozen=True)
class SliceDisputed:
    """Drawn lines of a slice are not what the contributions give; docs/security.md says what follows."""

    node: str  # that reduced it
    name: str
    round: int
    outcome: str  # "lied", "evaded" or "disputed"
    against: tuple[str, ...]  # who contradict it
    reason: str


@dataclass(frozen=True)
class CoordinatorStopped:
    """The run has ended, or its coordinator ends while the nodes wait for the next one."""

    phase: str  # "done", "failed" or "suspended"
    reason: str
    round: int  # the next to commit


Event: TypeAlias = (
    RunBegun
    | RunResumed
    | NodeJoined
    | NodeRejoined
    | NodeLeft
    | NodeReported
    | TopologyMade
    | RoundOpened
    | RoundCommitted
    | CatchUpPlanned
    | SnapshotBegun
    | SnapshotComplete
    | SnapshotFailed
    | NodeDeviated
    | DigestAgreed
    | JournalTrouble
    | RunPaused
    | RunUnpaused
    | NodeExpelled
    | NodeSuspected
    | SliceDisputed
    | TokenAdded
    | TokenEnded
    | TokenUsed
    | AccessRefused
    | CoordinatorStopped
)
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """A listener that does nothing."""
