"""A round whose slices travel between nodes: the coordinator sees who has delivered what, and no payload.

Reducers tell which contributions to their slice are there, and the digest of what they have made of them. The
round is committed once there is, for one set of voters, the digest of every slice. Until then a slice may be
taken from its reducer and given to another one, which then needs all contributions to it anew.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from coordinator.inquiry import Finding, Inquiries, Inquiry, Reduced
from coordinator.leases import Lease
from coordinator.open_round import MAX_ALARM_DELAY, Made, Opening, OpenRound
from coordinator.overdue import Standing, overdue
from coordinator.retally import Verdict
from coordinator.rounds import State
from coordinator.timer import Alarm
from coordinator.topology import Assigned
from protos import atoll_pb2 as pb
from protos.atoll_pb2 import CoordinatorMessage, Reduce, Shown, SliceDigest, SliceNews
from protos.digests import slices_digest

DIGEST_BYTES: Final = 16  # xxh3_128
MAX_TROUBLES: Final = 3  # slices that one member has moved in one round; then the trouble is its own


@dataclass
class _Part:
    """One slice: who reduces it since which topology, and what that one has told."""

    assigned: Assigned
    since: int
    arrived: set[str] = field(default_factory=set)
    digest: bytes = b""  # of the result of the present attempt; empty: not made yet
    differing: tuple[int, ...] = ()
    compared: int = 0
    whole_at: float | None = None
    trouble: str = ""

    def restart(self) -> None:
        """Another attempt."""
        self.digest, self.differing, self.compared, self.whole_at = b"", (), 0, None


class SlicedRound(OpenRound):
    """A round that is reduced by nodes; see :class:`OpenRound`.

    Args:
        assigned: who reduces what.
        topology: number of the topology that says so.
        send: gives a node an order.
        move: asks for other reducers of the slices of these nodes; answers through :meth:`reassign`, perhaps
            within the call, or through :meth:`OpenRound.stop`.
        inquiries: by which some of what reducers have made is made a second time; ``None``: nothing is.
        accuse: is told of reducers about which these have come to a verdict that is not clear; whether other
            reducers have been asked for, as by ``move``.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        assigned: Sequence[Assigned],
        topology: int,
        send: Callable[[str, CoordinatorMessage], None],
        move: Callable[[SlicedRound, Mapping[str, str]], None],
        inquiries: Inquiries | None = None,
        accuse: Callable[[SlicedRound, Sequence[Finding]], bool] = lambda active, findings: False,
    ) -> None:
        super().__init__(opening)
        self.topology = topology
        self._parts = [_Part(one, topology) for one in assigned]
        self._send = send
        self._move = move
        self._attempt = topology  # above those of a coordinator before
        self._watch: Alarm | None = None
        self._began_at = self.opened_at
        self._holders: dict[str, bytes] = {}  # who holds the whole result of some attempt: its digest
        self._failed: dict[str, str] = {}  # who cannot reduce in this round, and why
        self._troubles: Counter[str] = Counter()  # how often a member had a slice moved
        self._absent: set[str] = set()  # who wait for the announcement, and receive nothing before
        self._inquiries, self._accuse = inquiries, accuse
        self._drawn: bool | None = None  # whether an inquiry is made; None: not drawn yet
        self._inquiry: Inquiry | None = None  # about the present attempt
        self._judged: Inquiry | None = None
        self._back: set[str] = set()  # who may have computed their contribution anew since it arrived

    # --------------------------------------------------------------------------------------------- events

    def begin(self) -> None:
        """Start the clock, and tell the reducers whose contributions to wait for."""
        super().begin()
        self._look()

    def news(self, node: str, message: SliceNews) -> bool:
        """A reducer tells about its slice; whether that is of this round, and true to form."""
        if message.round != self.round or message.slice >= len(self._parts):
            return False
        part = self._parts[message.slice]
        if part.assigned.reducer != node or message.topology < part.since:
            return False
        if len(message.arrived) != len(message.leases):
            return False
        if self._closed:
            return True
        changes = message.attempt == self._attempt and message.digest not in (b"", part.digest)
        if self._inquiry is not None and (message.failed or changes):
            reason = "it took back what it had made once lines of it had been asked for"
            if self._accuse(self, [Finding(node, Verdict("evaded", reason))]):
                return True
            self._end_inquiry()  # nobody else is left to reduce: what it had made is no more
            part.restart()
        if message.failed:
            self._failed[node] = part.trouble = f"{node} cannot reduce it: {message.failed[:256]}"
            if all(one.node in self._failed for one in self.members.values() if one.live):
                self._fail(f"no node can reduce round {self.round + 1}: {'; '.join(self._failed.values())}")
                return True
        for refusal in message.refused:
            member = self.members.get(refusal.node)
            if member is not None and member.pending:
                member.reason = f"{node} refused its contribution: {refusal.reason[:256]}"
                member.refused = True
                self._exclude(member, State.FAILED)
        for name, made_of in zip(message.arrived, message.leases, strict=True):
            member = self.members.get(name)
            # What was brought to this round before this coordinator began may be of other samples.
            if member is not None and member.lease == Lease(made_of.start, made_of.count):
                part.arrived.add(name)
        if message.attempt == self._attempt and message.digest:
            if len(message.digest) != DIGEST_BYTES or len(message.differing) != len(self._voters):
                return False
            part.digest, part.compared = message.digest, message.compared
            part.differing = tuple(message.differing)
            if part.whole_at is None:
                part.whole_at = self._timer.now()
            part.arrived.update(self._voters)
        for member in list(self.members.values()):
            pending = member.pending or member.state is State.GONE
            if pending and all(member.node in other.arrived for other in self._parts):
                self._arrived(member)
        self._settle()
        self._look()
        return True

    def holding(self, node: str, digest: bytes) -> None:
        """A member holds the results of all slices."""
        if node in self.members and not self._closed:
            self._holders[node] = digest
            self._settle()

    def shown(self, node: str, answer: Shown) -> None:
        """A member shows lines that it was asked for."""
        if self._inquiry is not None and not self._closed and self._inquiry.take(node, answer):
            self._inquired()

    def able(self) -> list[str]:
        """Members that have not said that they cannot reduce."""
        return [node for node, member in self.members.items() if member.live and node not in self._failed]

    def holders(self, nodes: Sequence[str]) -> list[str]:
        """Some nodes, those first that have said that they hold the whole result."""
        return sorted(nodes, key=lambda node: node not in self._holders)

    def trouble(self, node: str, index: int, topology: int, reason: str) -> None:
        """A member cannot deliver a slice to its reducer, or get the result from it."""
        if index < len(self._parts) and node in self.members and not self._closed:
            part = self._parts[index]
            if topology < part.since:
                return
            self._troubles[node] += 1
            words = f"{node} cannot reach {part.assigned.reducer}: {reason[:256]}"
            if self._troubles[node] <= MAX_TROUBLES:
                part.trouble = words
            elif (member := self.members[node]).pending:
                member.reason = words
                self._exclude(member, State.FAILED)
            else:
                self._absent.add(node)
                self._settle()
            self._look()

    def abstain(self, node: str, reason: str) -> None:
        """See :class:`OpenRound`; one whose contribution has come whole stays a voter, and waits for the
        commit."""
        if node in self.members and not self._closed:
            self._absent.add(node)
            super().abstain(node, reason)
            self._settle()

    def returned(self, node: str, weight: int) -> bool:
        """See :class:`OpenRound`."""
        self._back.add(node)
        return super().returned(node, weight)

    def departed(self, node: str) -> None:
        """See :class:`OpenRound`; its slices go to others."""
        super().departed(node)
        self._look()

    def reassign(self, assigned: Sequence[Assigned], topology: int) -> None:
        """Others reduce some of the slices, whose bounds stay, from now on.

        What was decided is open again: nobody has been told, and the contributions to those slices have to
        come anew.
        """
        self.topology = topology
        for part, one in zip(self._parts, assigned, strict=True):
            part.trouble = ""
            if part.assigned != one:
                part.assigned, part.since = one, topology
                part.arrived.clear()
                part.restart()
        for member in self.members.values():
            if member.state is State.COMPLETE:
                if member.node in self._absent:
                    member.state = State.ABSTAINED
                else:
                    member.state = State.EXPECTED if member.live else State.GONE
        self.verdict, self.whole_at = None, []
        now = self._timer.now()
        self.opened_at, self.first_at = now, None if self.first_at is None else now
        self._form(self._likely_voters())
        self._settle()
        self._look()

    # --------------------------------------------------------------------------------------------- reduction

    def _form(self, voters: tuple[str, ...]) -> None:
        self._voters = voters
        self._attempt += 1
        self._end_inquiry()
        for part in self._parts:
            part.restart()
        if not voters:
            return
        order = Reduce(
            round=self.round,
            topology=self.topology,
            attempt=self._attempt,
            voters=voters,
            weights=self._weights(voters),
            mean_weights=self._mean_weights(voters),
            tell=True,
            leases=[_lease(self.members[node].lease) for node in voters],
        )
        for reducer in dict.fromkeys(part.assigned.reducer for part in self._parts):
            self._send(reducer, CoordinatorMessage(reduce=order))

    def _advance(self) -> None:
        """Nodes do."""

    def _made(self, voters: tuple[str, ...]) -> Made | None:
        if not all(part.digest for part in self._parts):
            return None
        digest = slices_digest(part.digest for part in self._parts)
        if not self._examined(voters, digest) or self._closed or not self._outlasts(voters, digest):
            return None
        slices = [
            SliceDigest(
                out_start=part.assigned.slice.out_start,
                out_end=part.assigned.slice.out_end,
                digest=part.digest,
                reducer=part.assigned.reducer,
            )
            for part in self._parts
        ]
        compared = sum(part.compared for part in self._parts)
        differing = [sum(counts) for counts in zip(*(part.differing for part in self._parts), strict=True)]
        shares = [1.0 - count / compared if compared else math.nan for count in differing]
        return Made(digest.hex(), dict(zip(voters, shares, strict=True)), slices)

    def _examined(self, voters: tuple[str, ...], digest: bytes) -> bool:
        """Whether nothing that the reducers have made is in question: no lines were drawn for this round, or
        those that were are what they should be, or nobody else is left to reduce."""
        if self._inquiries is None:
            return True
        if self._drawn is None:
            self._drawn = self._inquiries.drawn(self.table)
        if not self._drawn:
            return True
        inquiry = self._inquiry
        if inquiry is None:
            reduced = Reduced(
                self.round,
                self.table,
                digest,
                [part.assigned for part in self._parts],
                voters,
                self._weights(voters),
                self._mean_weights(voters),
                self._back | self._inquiries.distrusted,
                self._timer.now() - self.whole_at[-1],
            )
            inquiry = self._inquiries.about(reduced, self._send, self._timer, self._inquired)
            if inquiry is None:
                self._drawn = False
                return True
            self._inquiry = inquiry
            inquiry.begin()
            if self._inquiry is not inquiry:  # somebody left as it was asked, and another attempt has begun
                return False
        live = {node for node, member in self.members.items() if member.live}
        findings = inquiry.look(live - self._absent)
        if findings is None or not findings or inquiry is self._judged:
            return findings is not None
        self._judged = inquiry
        return not self._accuse(self, findings)

    def _inquired(self) -> None:
        """An inquiry has gone on, or its time is over."""
        self._settle()
        self._look()  # what was not looked at meanwhile

    def _end_inquiry(self) -> None:
        if self._inquiry is not None:
            self._inquiry.cancel()
            self._inquiry = None

    def waiting(self) -> str:
        """See :class:`OpenRound`."""
        inquiry = self._inquiry
        return f"{super().waiting()}; {inquiry.waiting}" if inquiry and inquiry.waiting else super().waiting()

    def _outlasts(self, voters: Sequence[str], digest: bytes) -> bool:
        """Whether the result can still be had if any one node is lost, as far as there is somebody who
        receives it: a commit cannot be taken back. A reducer may be the only one to have its own slices,
        so that another one has to hold the whole."""
        live = [node for node, member in self.members.items() if member.live]
        holders = {node for node in live if self._holders.get(node) == digest}
        receivers = {node for node in live if node in voters} - self._absent
        reducers = {part.assigned.reducer for part in self._parts}
        return all(holders - {one} or not receivers - {one} for one in reducers)

    # --------------------------------------------------------------------------------- reducers that fail

    def _look(self) -> None:
        """Take slices from reducers that have failed, and look again when that may next be so."""
        if self._closed:
            return
        # A liar's friends must not void what it has made, and what was asked of it, once they see that.
        asking = self._inquiry is not None and bool(self._inquiry.waiting)
        view = [
            Standing(
                reducer=part.assigned.reducer,
                live=(member := self.members.get(part.assigned.reducer)) is not None and member.live,
                trouble="" if asking else part.trouble,
                whole_at=part.whole_at,
            )
            for part in self._parts
        ]
        verdict = overdue(view, opened_at=self._began_at, now=self._timer.now())
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if verdict.taken:
            self._move(self, verdict.taken)
        elif verdict.until is not None:
            self._watch = self._timer.call_at(verdict.until, partial(self._rang_for, verdict.until))

    def _rang_for(self, due: float) -> None:
        slept = self._timer.now() - due
        if slept > MAX_ALARM_DELAY:  # as for the round's own alarm: what came meanwhile is still to be read
            extra = slept + MAX_ALARM_DELAY
            self._began_at += extra
            for part in self._parts:
                part.whole_at = None if part.whole_at is None else part.whole_at + extra
        self._look()

    def _finish(self) -> None:
        super()._finish()
        self._end_inquiry()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


def _lease(lease: Lease | None) -> pb.Lease:
    return pb.Lease() if lease is None else pb.Lease(start=lease.start, count=lease.count)
