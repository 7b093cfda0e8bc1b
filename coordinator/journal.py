"""The journal: what a coordinator remembers beyond its own end, as records and as an interface.

A round is in the journal before anybody is told that it is committed. What has not been written was never
announced, so a restarted coordinator opens that round again and nothing is lost or counted twice.

The core knows this module alone. Files are :mod:`coordinator.journal_file`'s; :class:`MemoryJournal` is the
reference that its tests, and simulations, compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from optim.mean import F32

Post = Callable[..., object]  # calls a function, with its arguments, on the event loop, from any thread
Done = Callable[[BaseException | None], None]
Loaded = Callable[["Kept | None"], None]


class JournalError(RuntimeError):
    """The journal cannot be used; the text says where, why, and what to do."""


@dataclass(frozen=True)
class NodeRecord:
    """A member of the roster, as far as a restarted coordinator needs it.

    ``secret`` is the sha256 (hex) of what the secrets of its sessions have in common and of the node's public
    key: the journal lets nobody in.
    """

    node: str
    name: str
    secret: str


@dataclass(frozen=True)
class RosterRecord:
    """The members of an epoch, in slot order; ``numbers`` names have been given to nodes so far."""

    epoch: int
    members: tuple[NodeRecord, ...]
    numbers: int


@dataclass(frozen=True)
class ExpelledNode:
    """A node that may not come back. ``host`` is where it called from, ``secret`` as in a
    :class:`NodeRecord`, ``key`` the fingerprint of its public key."""

    node: str
    name: str
    host: str
    secret: str
    reason: str
    key: str = ""


@dataclass(frozen=True)
class AdminRecord:
    """What an administrator has ordered and still holds.

    Attributes:
        paused: why no round is opened; empty: rounds are.
        expelled: in the order of the expulsions.
    """

    paused: str = ""
    expelled: tuple[ExpelledNode, ...] = ()


@dataclass(frozen=True)
class SliceRecord:
    """Bytes ``start`` to ``end`` of a result that lies at nodes: their xxh3_128 and who has made them."""

    start: int
    end: int
    digest: bytes
    reducer: str


@dataclass(frozen=True)
class RoundRecord:
    """A committed round.

    Attributes:
        voters, weights: whose contributions decided, in slot order, and their weights.
        casting: index into ``voters`` of the one whose bit decided ties.
        nbytes, digest: of the result; 0 and empty for a round without voters.
        reason: the verdict in words.
        agreement: share of voted bits of each voter that equal the result; NaN where nothing is voted.
        trained: (node, first sample, samples) of every voter.
        frontier: no sample from there on was leased up to the round's end.
        returned: (first sample, samples) below the frontier that are still to be trained.
        at: seconds since 1970.
        slices: of a result that lies at nodes: the journal has no payload then.
    """

    round: int
    epoch: int
    voters: tuple[str, ...]
    weights: tuple[int, ...]
    casting: int
    nbytes: int
    digest: str
    reason: str
    agreement: tuple[float, ...]
    trained: tuple[tuple[str, int, int], ...]
    frontier: int
    returned: tuple[tuple[int, int], ...]
    at: float = 0.0
    slices: tuple[SliceRecord, ...] = ()


@dataclass(frozen=True)
class StartRecord:
    """The state with which a run has begun: that before ``round``, of this digest.

    ``samples`` had been leased before; ``data_digest`` is what its nodes' data must be, ``state_bytes`` the
    size of the shared state.
    """

    round: int
    digest: str
    samples: int
    data_digest: str
    state_bytes: int


@dataclass(frozen=True)
class Kept:
    """A result that the journal holds: its round, and the payload of ``record.nbytes``; empty where that lies
    at nodes."""

    record: RoundRecord
    payload: bytes


@dataclass(frozen=True)
class Recovered:
    """What a run goes on with after its coordinator has been started again.

    Attributes:
        start: with which state the run began.
        round: the next to commit.
        last: the last committed round, ``None`` before the first.
        roster: the last one.
        trained: samples counted in commits.
        samples: no sample before this one is leased again, but for those that ``last`` returned.
        digests: agreed digest of the state after a round, for the last rounds.
        memory: what the reducer carries from round to round.
        notes: what was found damaged and mended, in words.
    """

    start: StartRecord
    round: int
    last: RoundRecord | None
    roster: RosterRecord
    trained: int = 0
    samples: int = 0
    digests: Mapping[int, str] = field(default_factory=dict)
    memory: Mapping[str, F32] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Journal(Protocol):
    """Called on the event loop; whatever may take long goes on elsewhere and calls back on the loop.

    Records are kept in the order of the calls: one that is there proves all before it.
    """

    @property
    def recovered(self) -> Recovered | None:
        """What was found when it was opened; ``None``: the run has not begun."""
        ...

    @property
    def administration(self) -> AdminRecord:
        """The administrator's orders that were found, also of a run that has not begun."""
        ...

    def begin(self, start: StartRecord) -> None:
        """The run begins; whatever was written of an earlier beginning is void, but for the administrator's
        orders."""
        ...

    def administer(self, record: AdminRecord) -> None:
        """The administrator's orders have changed."""
        ...

    def roster(self, record: RosterRecord) -> None:
        """The roster has changed."""
        ...

    def commit(
        self, record: RoundRecord, payload: Sequence[memoryview], memory: Mapping[str, F32] | None, done: Done
    ) -> None:
        """Keep a round, then call ``done(None)``, or ``done(error)`` with a :class:`JournalError`.

        Args:
            record: of it.
            payload: its result, in pieces end to end; they stay as they are until ``done``.
            memory: all that the reducer carries on, if it carries anything.
            done: see above; called exactly once, perhaps within this call.
        """
        ...

    def agreed(self, round_index: int, digest: str) -> None:
        """The nodes agree on the state after a committed round."""
        ...

    def first_kept(self, end: int) -> int:
        """The first round from which on the payloads of all results before ``end`` can be loaded; ``end``:
        none can."""
        ...

    def load(self, round_index: int, done: Loaded) -> None:
        """Read a result and call ``done`` with it, or with ``None`` if it is gone or damaged."""
        ...

    def forget(self, round_index: int) -> None:
        """Results before this round may be dropped when space is short: a later state is kept elsewhere."""
        ...

    def skipped(self, round_index: int, samples: int) -> None:
        """The nodes are ahead of this journal, whose last rounds were lost: the run goes on with
        ``round_index`` and no sample before ``samples`` is leased again."""
        ...

    def close(self) -> None:
        """Finish what was begun and let go; nothing may be called afterwards."""
        ...


class MemoryJournal:
    """A journal that lasts as long as this object; everything is kept at once.

    Args:
        keep: how many rounds; ``None``: all.
    """

    def __init__(self, keep: int | None = None) -> None:
        self._keep = keep
        self.trained = 0
        self.start: StartRecord | None = None
        self.rosters: list[RosterRecord] = []
        self.rounds: dict[int, Kept] = {}
        self.digests: dict[int, str] = {}
        self.memory: Mapping[str, F32] = {}
        self.next = 0
        self.samples = 0
        self.administration = AdminRecord()

    @property
    def recovered(self) -> Recovered | None:
        """See :class:`Journal`; of what has been written so far."""
        if self.start is None:
            return None
        last = self.rounds.get(self.next - 1)
        return Recovered(
            start=self.start,
            round=self.next,
            last=last.record if last else None,
            roster=self.rosters[-1] if self.rosters else RosterRecord(0, (), 0),
            samples=max(self.samples, self.start.samples, last.record.frontier if last else 0),
            trained=self.trained,
            digests=dict(self.digests),
            memory=dict(self.memory),
        )

    def begin(self, start: StartRecord) -> None:
        """See :class:`Journal`."""
        self.start, self.next, self.samples = start, start.round, start.samples
        self.rosters, self.rounds, self.digests, self.memory = [], {}, {}, {}
        self.trained = 0

    def administer(self, record: AdminRecord) -> None:
        """See :class:`Journal`."""
        self.administration = record

    def roster(self, record: RosterRecord) -> None:
        """See :class:`Journal`."""
        self.rosters.append(record)
        if self._keep is not None:
            del self.rosters[: -self._keep]

    def commit(
        self, record: RoundRecord, payload: Sequence[memoryview], memory: Mapping[str, F32] | None, done: Done
    ) -> None:
        """See :class:`Journal`."""
        self.rounds[record.round] = Kept(record, b"".join(payload))
        self.next = record.round + 1
        self.trained += sum(count for _, _, count in record.trained)
        if self._keep is not None:
            self.rounds.pop(record.round - self._keep, None)
            self.digests.pop(record.round - self._keep, None)
        if memory:
            self.memory = {key: np.array(array) for key, array in memory.items()}
        done(None)

    def agreed(self, round_index: int, digest: str) -> None:
        """See :class:`Journal`."""
        self.digests[round_index] = digest

    def first_kept(self, end: int) -> int:
        """See :class:`Journal`."""
        while (kept := self.rounds.get(end - 1)) is not None and not kept.record.slices:
            end -= 1
        return end

    def load(self, round_index: int, done: Loaded) -> None:
        """See :class:`Journal`."""
        done(self.rounds.get(round_index))

    def forget(self, round_index: int) -> None:
        """See :class:`Journal`."""

    def skipped(self, round_index: int, samples: int) -> None:
        """See :class:`Journal`."""
        self.next, self.samples = round_index, samples

    def close(self) -> None:
        """See :class:`Journal`."""
