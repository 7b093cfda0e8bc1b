"""A round from its opening to its commit: its seats, its clock, and the verdict that closes it.

How the result comes about is a subclass's: at the hub (:mod:`coordinator.active_round`), or between the nodes
(:mod:`coordinator.sliced_round`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from coordinator.journal import Done
from coordinator.member import Member
from coordinator.ramp import ramped
from coordinator.result import Result
from coordinator.rounds import Policy, RoundView, Seat, State, Verdict, decide
from coordinator.timer import Alarm, Timer
from optim.aggregate import casting_voter
from protos.atoll_pb2 import SliceDigest
from protos.buckets import BucketTable
from protos.refusal import Refused

MAX_ALARM_DELAY: Final = 1.0  # seconds; more means that the process was stopped or starved


@dataclass(frozen=True)
class Made:
    """A result that is whole: its digest, each voter's share of bits that equal it, and, where its slices lie
    at nodes, theirs."""

    digest: str
    agreement: Mapping[str, float]
    slices: Sequence[SliceDigest] = ()


@dataclass(frozen=True)
class Opening:
    """What a round begins with.

    Attributes:
        round: its number.
        epoch: of the roster.
        members: of that, in slot order.
        policy: when it closes.
        table: what travels in it.
        timer: its clock.
        on_close: is called exactly once, on the event loop, with the closing verdict, and never after
            :meth:`OpenRound.stop`; after a commit the result is complete and valid by then.
        keep: is given a round that is to be committed; it makes that last and then calls the function that
            it is given, with an error if it failed: a commit is not announced before.
    """

    round: int
    epoch: int
    members: Sequence[Member]
    policy: Policy
    table: BucketTable
    timer: Timer
    on_close: Callable[[OpenRound, Verdict], None]
    keep: Callable[[OpenRound, Done], None] = lambda active, done: done(None)


class OpenRound(ABC):
    """One round from its opening to its commit."""

    def __init__(self, opening: Opening) -> None:
        self.round = opening.round
        self.epoch = opening.epoch
        self.members = {member.node: member for member in opening.members}
        self.result = Result(opening.round, opening.epoch)
        self.opened_at = opening.timer.now()
        self.first_at: float | None = None
        self.whole_at: list[float] = []  # when each contribution was there
        self._whole: list[str] = []  # whose, in that order; again if it came again
        self.verdict: Verdict | None = None  # the closing one
        self.table = opening.table
        self._policy = opening.policy
        self._timer = opening.timer
        self._on_close = opening.on_close
        self._keep = opening.keep
        self._alarm: Alarm | None = None
        self._alarm_at = 0.0
        self._voters: tuple[str, ...] = ()  # with whose votes the result is being made
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

    def place(self, node: str) -> int:
        """Of a voter, in the order in which contributions came: from 0 on."""
        return len(self._whole) - 1 - self._whole[::-1].index(node)

    # --------------------------------------------------------------------------------- a subclass's part

    @abstractmethod
    def _form(self, voters: tuple[str, ...]) -> None:
        """Make the result afresh, with these voters; ``self._voters`` are to be they."""

    @abstractmethod
    def _advance(self) -> None:
        """Go on making it, as far as that is possible now."""

    @abstractmethod
    def _made(self, voters: tuple[str, ...]) -> Made | None:
        """The result with these voters, if it is whole; it will be committed."""

    # --------------------------------------------------------------------------------------------- events

    def begin(self) -> None:
        """Start the clock."""
        self._form(self._likely_voters())
        self._settle()

    def expect(self, node: str) -> None:
        """A member that lagged is behind no more and is waited for."""
        member = self.members[node]
        if member.state is State.LAGGING and self.verdict is None:
            self._change(member, State.EXPECTED)

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

    def abstain(self, node: str, reason: str) -> None:
        """A member has nothing to contribute."""
        member = self.members[node]
        if member.pending:
            member.reason = reason[:256]
            self._exclude(member, State.ABSTAINED)

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
        if verdict.action == "fail":
            self._fail(verdict.reason)
            return
        self.verdict = verdict
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
            self._commit(verdict, Made("", {}))
        elif (made := self._made(verdict.voters)) is not None:
            self._commit(verdict, made)

    def _commit(self, verdict: Verdict, made: Made) -> None:
        self._finish()
        self.result.settle(
            verdict.voters,
            self._weights(verdict.voters),
            casting=casting_voter(self.round, len(verdict.voters)),
            nbytes=self.table.result_nbytes if verdict.voters else 0,
            digest=made.digest,
            reason=verdict.reason,
            agreement=made.agreement,
            slices=made.slices,
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

    def _fail(self, reason: str) -> None:
        """The result cannot be made."""
        self.verdict = Verdict("fail", reason)
        self._finish()
        self._on_close(self, self.verdict)

    def _arrived(self, member: Member) -> None:
        """All of a member's contribution is there."""
        now = self._timer.now()
        self.first_at = now if self.first_at is None else self.first_at
        self.whole_at.append(now)
        self._whole.append(member.node)
        self._change(member, State.COMPLETE)

    def _finish(self) -> None:
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

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
        shares = [(member.share[0], member.share[1] * member.penalty) for member in members]
        return ramped([member.weight for member in members], shares)

    def _mean_weights(self, voters: Iterable[str]) -> list[int]:
        """Of their means."""
        members = [self.members[node] for node in voters]
        largest = max((member.penalty for member in members), default=1)
        return [member.weight * member.samples * (largest // member.penalty) for member in members]
