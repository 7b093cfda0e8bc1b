"""The nodes of a run as the coordinator knows them, and the orders that wait to be sent to each."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from coordinator.start import Claim
from protos.atoll_pb2 import CoordinatorMessage, Report
from protos.digests import sha256_text
from protos.lane_layout import LaneLayout

if TYPE_CHECKING:
    from coordinator.exchange import Exchange

OUTBOX_MESSAGES: Final = 64

NodeState = Literal["joining", "loading", "replaying", "active", "lagging", "left"]


class Outbox:
    """Orders for one node: bounded, read by one reader."""

    def __init__(self, limit: int = OUTBOX_MESSAGES) -> None:
        self._limit = limit
        self._messages: deque[CoordinatorMessage] = deque()
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self.on_close: Callable[[], None] | None = None  # set by the transport: wake a blocked write

    def put(self, message: CoordinatorMessage) -> bool:
        """Append; ``False`` if the outbox is full or closed."""
        if self._closed or len(self._messages) >= self._limit:
            return False
        self._messages.append(message)
        self._wake()
        return True

    def close(self, *, cleanly: bool = False) -> None:
        """No more orders; what is queued can still be read. A write that the reader holds up is broken off,
        unless the reader has taken its leave ``cleanly``: it may be reading its last order just now."""
        self._closed = True
        self._wake()
        if self.on_close is not None and not cleanly:
            self.on_close()

    async def get(self) -> CoordinatorMessage | None:
        """The next order, ``None`` after the last. A reader that has to end is cancelled."""
        while not self._messages:
            if self._closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def session_secret(former: str = "") -> str:
    """A new secret, for the next session of the node that had the ``former`` one.

    Its first half stays. A coordinator knows by it who comes back, whichever of a node's sessions was the
    last that it heard of, and the last that was noted: its predecessor may have died before it could note
    the newest, or have noted one that never reached the node.
    """
    return f"{lasting(former) or secrets.token_hex(16)}-{secrets.token_hex(16)}"


def lasting(secret: str) -> str:
    """The part of a session's secret that all sessions of a node have in common."""
    return secret.partition("-")[0]


def mark_of(secret: str, key: bytes) -> str:
    """By what a coordinator knows again who had a session with this secret and key; it lets nobody in."""
    return sha256_text(lasting(secret) + key.hex())


@dataclass(eq=False)
class Node:
    """One admitted node.

    Attributes:
        node: identity within the run.
        claim: the shared state that it held when it joined.
        position: first round whose result it has not been given.
        opened: last round whose RoundOpen it was sent.
        first_round: first round that it was a member of.
        since: round with which the momentum of a newcomer began; ``None``: its votes weigh in full.
        known: it has proved to be a node that was here before, under the same name.
        held: before it is a member: the round whose shared state it certainly holds, ``None`` for none.
        goal: the round whose state it holds once it has carried out its last order to load or replay; -1
            while it has none.
        loading: the snapshot that it was told to load.
        loaded: it has been told to load one: its momentum, if it has any, is not that of this state.
        progress_at: when bytes of such an order last moved.
        seen_at: when it last said something, on the coordinator's clock.
        ranks: its processes; each may have a stream of its own in a round.
        batch: samples that it takes for a micro-step; 0 = as many as the run file says.
        key: its public key, which it has proved to own; empty: it has none.
        token: sha256 (hex) of the secret of the token by which it was let in.
        topology: number of the one that it was told of last; 0: of none.
        exchanges: its open streams, the oldest first.
    """

    node: str
    name: str
    address: str
    secret: str
    weight: int
    claim: Claim
    seen_at: float
    ranks: int = 1
    batch: int = 0
    state: NodeState = "joining"
    position: int = 0
    opened: int = -1
    first_round: int = 0
    key: bytes = b""
    token: str = ""
    since: int | None = None
    known: bool = False
    held: int | None = None
    goal: int = -1
    loading: str = ""
    waits: bool = False  # for a snapshot that is still to be made
    retry_at: float = 0.0  # no order before that
    loaded: bool = False
    progress_at: float = 0.0
    outbox: Outbox | None = None  # while its session is open
    topology: int = 0
    exchanges: list[Exchange] = field(default_factory=list)
    given_round: int = -1
    given: set[int] = field(default_factory=set)  # buckets of that round's result which its lanes receive
    stopping: str = ""  # why it was told to leave
    left_cleanly: bool = False
    cut_off: bool = False  # it has left without a word
    deviated: bool = False  # its last state was not the common one
    bytes_in: int = 0  # from the node, messages as they travel
    bytes_out: int = 0
    report: Report = field(default_factory=lambda: Report(loss=math.nan))
    compute_seconds: float = 0.0
    busy_seconds: float = 0.0
    agreement: float = math.nan
    missed: int = 0
    late_round: int = -1  # last round to which it contributed too late
    silent_at: int = -1  # last round at whose deadline it had sent nothing
    silent_streak: int = 0  # how many such rounds since it was last in time
    abstained: int = 0
    reason: str = ""

    @property
    def in_session(self) -> bool:
        """Whether it can be given orders."""
        return self.outbox is not None and not self.stopping

    @property
    def seated(self) -> bool:
        """Whether it is a member that can be given orders."""
        return self.in_session and self.state in ("active", "lagging")

    @property
    def joining(self) -> bool:
        """Whether it is, for now, no member and can be given orders."""
        return self.in_session and self.state in ("joining", "loading", "replaying")

    def send(self, message: CoordinatorMessage) -> bool:
        """Queue an order; ``False`` if the node does not read its orders."""
        return self.outbox is not None and self.outbox.put(message)

    def give(self, round_index: int, lanes: Iterable[LaneLayout]) -> bool:
        """Streams of these lanes receive the result of a round; whether all of it is under way by now."""
        if self.given_round != round_index:
            self.given_round, self.given = round_index, set()
        whole = False
        for lane in lanes:
            if lane.part:
                self.given.update(lane.buckets)
            whole = whole or not lane.part or len(self.given) == lane.total
        return whole

    def take(self, report: Report) -> int:
        """Keep the node's last report; returns how many bytes it has sent and received since the one before.
        Before the first report of a node that was here before, they are not known: 0."""
        moved = report.bytes_up + report.bytes_down - self.report.bytes_up - self.report.bytes_down
        first = not self.report.state_digest
        self.report = report
        self.compute_seconds += max(0.0, report.compute_seconds)
        self.busy_seconds += max(0.0, report.busy_seconds)
        return 0 if first and self.known else max(0, moved)
