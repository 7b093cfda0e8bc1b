"""The round in flight: contributions come in, pieces are reduced once complete, a verdict closes it.

Reduction is speculative: pieces are made and sent as soon as every member that is still waited for has
delivered them. If the set of voters changes after pieces have been sent, they are void and a new attempt
starts. CPU work runs on a pool thread, one job at a time; tiny payloads are reduced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from coordinator.contribution import Contribution, check_header
from coordinator.journal import Done
from coordinator.lane_layout import LaneLayout
from coordinator.member import Member
from coordinator.ramp import ramped
from coordinator.reducer import Reduction
from coordinator.reducing import Reducing
from coordinator.refusal import DUPLICATE, WRONG_ROUND, Refused
from coordinator.result import Result
from coordinator.rounds import Policy, RoundView, Seat, State, Verdict, decide
from coordinator.timer import Alarm, Timer
from optim.aggregate import Aggregation, casting_voter
from protos.atoll_pb2 import ContributionHeader
from protos.buckets import BucketTable

INLINE_BYTES: Final = 256 << 10  # of votes: less than a millisecond of work is done at once
MAX_ALARM_DELAY: Final = 1.0  # seconds; more means that the process was stopped or starved
MAX_BROKEN_STREAMS: Final = 3  # of one member in one round; then it is not waited for


class ActiveRound:
    """One round from its opening to its commit.

    A round that is to be committed is given to ``keep`` first, which makes it last and then calls the
    function that it is given, with an error if that failed: a commit is not announced before. ``on_close`` is
    called exactly once, on the event loop, with the closing verdict, and never after :meth:`stop`; after a
    commit the result is complete and valid by then.
    """

    def __init__(
        self,
        round_index: int,
        epoch: int,
        members: Iterable[Member],
        *,
        policy: Policy,
        reducing: Reducing,
        timer: Timer,
        on_close: Callable[[ActiveRound, Verdict], None],
        keep: Callable[[ActiveRound, Done], None] = lambda active, done: done(None),
    ) -> None:
        self.round = round_index
        self.epoch = epoch
        self.members = {member.node: member for member in members}
        self.result = Result(round_index, epoch)
        self.opened_at = timer.now()
        self.first_at: float | None = None
        self.whole_at: list[float] = []  # when each contribution was there
        self.verdict: Verdict | None = None  # the closing one
        self._policy = policy
        self._shared = reducing
        self._timer = timer
        self._on_close = on_close
        self._keep = keep
        self._alarm: Alarm | None = None
        self._alarm_at = 0.0
        self._reduction: Reduction | None = None
        self._voters: tuple[str, ...] = ()  # of the reduction
        self._busy = False
        self._closed = False

    @property
    def missing(self) -> int:
        """Members from whom a contribution may still come."""
        return sum(member.live and member.pending for member in self.members.values())

    @property
    def closing(self) -> bool:
        """Whether it is decided who counts, though it is not announced yet: nobody can come in any more."""
        return self.verdict is not None

    @property
    def settled(self) -> bool:
        """Whether it has come to a result, announced or not."""
        return self.result.settled

    @property
    def table(self) -> BucketTable:
        """What travels in this round."""
        return self._shared.table

    # --------------------------------------------------------------------------------------------- events

    def begin(self) -> None:
        """Start the clock."""
        self._voters = self._likely_voters()
        self._settle()

    def expect(self, node: str) -> None:
        """A member that lagged is behind no more and is waited for."""
        member = self.members[node]
        if member.state is State.LAGGING and self.verdict is None:
            self._change(member, State.EXPECTED)

    def accept(self, node: str, header: ContributionHeader, lane: LaneLayout) -> Contribution | None:
        """A member's stream announces its contribution, or a lane of it; ``None`` if it has nothing to take.

        One lane that abstains takes its member out, whatever the others have delivered; but whoever asks with
        an abstention for the result of what has arrived whole asks for no more than that.

        Raises:
            Refused: the header does not fit; a duplicate has kind ``DUPLICATE`` and leaves the member as it
                was.
        """
        member = self.members[node]
        delivered = not member.pending or member.lanes.delivered(lane)
        if delivered and not (header.abstain or lane.idle):
            raise Refused(
                DUPLICATE, f"{node} has already delivered for round {self.round + 1} ({member.state.value})"
            )
        if header.epoch != self.epoch:
            raise Refused(
                WRONG_ROUND,
                f"round {self.round + 1} belongs to epoch {self.epoch}, the header says {header.epoch}",
            )
        check_header(header, self.table, lane, member.weight)
        if header.abstain:
            if not delivered:
                member.reason = header.reason[:256]
                self._exclude(member, State.ABSTAINED)
            return None
        if lane.idle:
            return None
        contribution = Contribution(member.row, self._shared.inspection, lane)
        member.lanes.add(contribution, self.table)
        return contribution

    def delivered(self, node: str, contribution: Contribution) -> None:
        """More of a contribution has arrived."""
        member = self.members[node]
        if contribution not in member.lanes:
            return
        if contribution.complete and member.lanes.complete and member.pending:
            now = self._timer.now()
            self.first_at = now if self.first_at is None else self.first_at
            self.whole_at.append(now)
            self._change(member, State.COMPLETE)
        else:
            self._advance()

    def refuse(self, node: str, contribution: Contribution | None) -> None:
        """A member's contribution, or a stream that has none, was refused: nobody waits for the member in
        this round."""
        member = self.members[node]
        if member.pending and (contribution is None or contribution in member.lanes):
            self._exclude(member, State.FAILED)

    def lost(self, node: str, contribution: Contribution) -> None:
        """The stream of an unfinished contribution broke; the member may send it again."""
        member = self.members[node]
        if contribution not in member.lanes or contribution.complete:
            return
        broken = member.lanes.drop(contribution)
        if not member.pending:
            return
        if broken >= MAX_BROKEN_STREAMS:
            self._exclude(member, State.FAILED)
        elif node in self._voters:
            self._form(self._voters)  # a part of the row will be written again

    def returned(self, node: str, weight: int) -> bool:
        """A member whose session had ended is back, under the same name; whether it has its seat again."""
        member = self.members.get(node)
        if member is None or member.live or self.closing or member.weight != weight:
            return False
        if member.state not in (State.GONE, State.COMPLETE):
            return False
        member.live = True
        if member.state is State.GONE:
            member.lanes.clear()
            member.state = State.EXPECTED
        self._change(member, member.state)
        return not self.closing

    def departed(self, node: str) -> None:
        """A member's session ended."""
        member = self.members.get(node)
        if member is None or not member.live:
            return
        member.live = False
        self._change(member, member.state if member.state is State.COMPLETE else State.GONE)

    def stop(self, error: Refused) -> None:
        """End without a result."""
        if not self.result.committed:
            self._finish()
            self.result.fail(error)

    # --------------------------------------------------------------------------------------------- decisions

    def view(self) -> RoundView:
        """What the verdict is made of."""
        seats = tuple(Seat(member.node, member.state, member.live) for member in self.members.values())
        return RoundView(self.round, seats, self.opened_at, self.first_at, self._timer.now())

    def waiting(self) -> str:
        """In words, what the round waits for."""
        return self.verdict.reason if self.verdict else decide(self.view(), self._policy).reason

    def _exclude(self, member: Member, state: State) -> None:
        """A member has nothing to count any more; what its streams still bring goes nowhere."""
        member.lanes.clear()
        self._change(member, state)

    def _change(self, member: Member, state: State) -> None:
        member.state = state
        if self.verdict is None:
            voters = self._likely_voters()
            if voters != self._voters:
                self._form(voters)
        self._advance()
        self._settle()

    def _settle(self) -> None:
        if self._closed:
            return
        if self.verdict is not None:
            self._close_if_reduced()
            return
        verdict = decide(self.view(), self._policy)
        if verdict.action == "wait":
            self._wake_at(verdict.until)
            return
        self.verdict = verdict
        if verdict.action == "fail":
            self._finish()
            self._on_close(self, verdict)
            return
        if verdict.voters != self._voters:
            self._form(verdict.voters)
        self._advance()
        self._close_if_reduced()

    def _wake_at(self, until: float | None) -> None:
        if until is None or (self._alarm is not None and self._alarm_at == until):
            return
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = until
        self._alarm = self._timer.call_at(until, self._rang)

    def _rang(self) -> None:
        self._alarm = None
        slept = self._timer.now() - self._alarm_at
        if slept > MAX_ALARM_DELAY:  # this process did not run: what came meanwhile is still to be read
            extra = slept + MAX_ALARM_DELAY
            self.opened_at += extra
            self.first_at = None if self.first_at is None else self.first_at + extra
        self._settle()

    def _close_if_reduced(self) -> None:
        verdict = self.verdict
        if verdict is None or self._closed:
            return
        if not verdict.voters:
            self.result.restart()
            self._commit(verdict, "", {})
        elif self._reduction is not None and self._reduction.done and not self._busy:
            shares = self._reduction.agreement(self._shared.padding)
            self._reduction.commit()
            self._commit(verdict, self._reduction.digest(), dict(zip(verdict.voters, shares, strict=True)))

    def _commit(self, verdict: Verdict, digest: str, agreement: dict[str, float]) -> None:
        self._finish()
        self.result.settle(
            verdict.voters,
            self._weights(verdict.voters),
            casting=casting_voter(self.round, len(verdict.voters)),
            nbytes=self.table.result_nbytes if verdict.voters else 0,
            digest=digest,
            reason=verdict.reason,
            agreement=agreement,
        )

        def kept(error: BaseException | None) -> None:
            if self.result.error is not None:
                return  # stopped meanwhile: whoever goes on with the journal tells the nodes
            if error is not None:
                self.verdict = Verdict("fail", str(error))
            else:
                self.result.commit()
            self._on_close(self, self.verdict or verdict)

        self._keep(self, kept)

    def _finish(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    # --------------------------------------------------------------------------------------------- reduction

    def _likely_voters(self) -> tuple[str, ...]:
        """Who will decide the round if everybody who is waited for delivers."""
        return tuple(
            member.node
            for member in self.members.values()
            if member.state in (State.EXPECTED, State.COMPLETE)
        )

    def _weights(self, voters: Iterable[str]) -> list[int]:
        """Of their votes."""
        members = [self.members[node] for node in voters]
        return ramped([member.weight for member in members], [member.share for member in members])

    def _form(self, voters: tuple[str, ...]) -> None:
        """Start the reduction afresh for ``voters``."""
        self._voters = voters
        self._reduction = None
        self.result.restart()

    def _advance(self) -> None:
        """Reduce what every voter has delivered, unless a job is running: its end comes back here."""
        if self._busy or self._closed or not self._voters:
            return
        lanes = [self.members[node].lanes for node in self._voters]
        if not all(lanes):
            return
        delivered = min(member.received for member in lanes)
        reduction = self._reduction or self._begin_reduction()
        cost = reduction.cost(delivered)
        if not cost:
            return
        if cost * len(self._voters) <= INLINE_BYTES:
            try:
                frames = reduction.advance(delivered)
            except Exception as error:
                self._reduced(reduction, None, error)
            else:
                self.result.extend(frames)
            return
        self._busy = True
        self._shared.pool.submit(
            lambda: reduction.advance(delivered),
            lambda frames, error: self._reduced(reduction, frames, error),
        )

    def _begin_reduction(self) -> Reduction:
        members = [self.members[node] for node in self._voters]
        aggregation = Aggregation(
            self.table,
            len(members),
            round_index=self.round,
            tally=self._shared.tally,
            memory=self._shared.memory,
            weights=self._weights(self._voters),
            mean_weights=[member.weight * member.samples for member in members],
        )
        self._reduction = Reduction(
            self._shared.pieces,
            aggregation,
            [member.row for member in members],
            attempt=self.result.attempt,
            phase=self.round,
        )
        return self._reduction

    def _reduced(self, reduction: Reduction, frames: list[bytes] | None, error: BaseException | None) -> None:
        self._busy = False
        if self._closed:
            return
        current = reduction is self._reduction  # another attempt may have read rows that were written again
        if error is not None and current:
            self.verdict = Verdict("fail", f"the reducer failed in round {self.round + 1}: {error!r}")
            self._finish()
            self._on_close(self, self.verdict)
            return
        if current:
            self.result.extend(frames or [])
        self._advance()
        self._settle()
