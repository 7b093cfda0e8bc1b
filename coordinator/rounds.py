"""When a round closes and with whose votes: a pure function of what has arrived and the clock.

A round commits once or not at all. Every verdict carries its reason in words, because "why is it waiting" is
what people ask first.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


class State(enum.Enum):
    """Where one member of a round stands."""

    EXPECTED = "expected"  # the round waits for it
    COMPLETE = "complete"  # its contribution has arrived whole
    ABSTAINED = "abstained"  # it said that it has nothing to contribute
    FAILED = "failed"  # its contribution was refused
    GONE = "gone"  # it left before contributing
    LAGGING = "lagging"  # it is behind: its contribution counts, but nobody waits for it


@dataclass(frozen=True)
class Seat:
    """One member in slot order. ``live``: its session is open; a whole contribution counts without."""

    node: str
    state: State
    live: bool = True


@dataclass(frozen=True)
class RoundView:
    """What is known of a round at ``now``; times in seconds on one monotonic clock.

    ``first_at`` is when the first whole contribution arrived, ``None`` before that.
    """

    round: int
    seats: tuple[Seat, ...]
    opened_at: float
    first_at: float | None
    now: float


@dataclass(frozen=True)
class Policy:
    """How long a round waits.

    Attributes:
        deadline: seconds after the first whole contribution in which the others have to deliver theirs.
        start_timeout: seconds for the first contribution; also the longest further wait for a quorum.
        quorum: fraction of the live members, lagging ones aside, that has to contribute by the deadline.
    """

    deadline: float
    start_timeout: float
    quorum: float


@dataclass(frozen=True)
class Verdict:
    """What to do with a round now.

    Attributes:
        action: ``"wait"``, ``"commit"`` or ``"fail"`` (nobody is left to take the result).
        reason: in words.
        voters: whose contributions decide, in slot order; empty for a commit that moves only the schedule.
        silent: members that are not waited for any longer; they lag from now on.
        until: when to ask again at the latest, if nothing changes before.
    """

    action: Literal["wait", "commit", "fail"]
    reason: str
    voters: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    until: float | None = None


def decide(view: RoundView, policy: Policy) -> Verdict:
    """The verdict on a round.

    It commits when every expected member has delivered, abstained, been refused or left. At the deadline it
    commits with those who have delivered if they are a quorum, and without a quorum after ``start_timeout``
    more. A round in which everybody lags waits for them as if they were expected: without that, a run whose
    nodes are all slow would rush through empty rounds.
    """
    if not any(seat.live for seat in view.seats):
        return Verdict("fail", f"every node has left in round {view.round + 1}")
    voters = _nodes(view, State.COMPLETE)
    pending = _nodes(view, State.EXPECTED)
    if not pending and not voters and not _nodes(view, State.ABSTAINED):
        pending = _nodes(view, State.LAGGING)
    if not pending:
        return Verdict("commit", _closed(view, voters), voters)
    started = view.opened_at + policy.start_timeout
    limit = (started if view.first_at is None else min(view.first_at, started)) + policy.deadline
    live = sum(seat.live and (seat.state is not State.LAGGING or seat.node in pending) for seat in view.seats)
    needed = max(1, math.ceil(policy.quorum * live - 1e-9))
    waiting = f"{len(voters)} of {live} contributions, waiting for {listed(pending)}"
    if view.now < limit:
        return Verdict("wait", waiting, until=limit)
    late = f"{listed(pending)} sent nothing within the deadline of {policy.deadline:g} s"
    if len(voters) >= needed:
        return Verdict("commit", f"{_count(voters)}; {late}", voters, pending)
    last = limit + policy.start_timeout
    short = f"{len(voters)} of {live} contributions are less than the quorum of {needed}"
    if view.now < last:
        return Verdict(
            "wait", f"{waiting}; {short}; going on without it in {last - view.now:.0f} s", until=last
        )
    passed = f"{short}, and {policy.start_timeout:g} s more have passed"
    return Verdict("commit", f"{_count(voters)}; {late}; {passed}", voters, pending)


def worth_waiting(round_index: int, silent_at: int, streak: int) -> bool:
    """Whether a member that is behind no more is waited for again.

    It was silent at the deadlines of ``streak`` rounds in a row, last in ``silent_at``. Equal nodes need it:
    one that stumbled once and is never waited for would begin, and end, every round too late by one span.
    A node that is simply too slow costs a deadline after 1, 2, 4, ... and at last every 64 rounds.
    """
    return streak <= 1 or round_index - silent_at >= 2 ** min(streak - 1, 6)


def evaluates(round_index: int, rounds: int, every: int) -> bool:
    """Whether the validation loss is measured after a round: every ``every`` (0 = never), and the last."""
    return round_index == rounds - 1 or (every > 0 and (round_index + 1) % every == 0)


def evaluator(round_index: int, every: int, candidates: Sequence[str]) -> str | None:
    """Who of ``candidates`` (slot order) measures it: a rotating one, so that nobody always pays."""
    if not candidates:
        return None
    return candidates[(round_index // max(1, every)) % len(candidates)]


def _nodes(view: RoundView, state: State) -> tuple[str, ...]:
    """Nodes in a state; who can still act must be live, a whole contribution needs no living sender."""
    return tuple(
        seat.node for seat in view.seats if seat.state is state and (seat.live or state is State.COMPLETE)
    )


_ABSENT = {
    State.ABSTAINED: "abstained",
    State.FAILED: "refused",
    State.GONE: "left",
    State.LAGGING: "lagging",
}


def _closed(view: RoundView, voters: tuple[str, ...]) -> str:
    if len(voters) == len(view.seats):
        return f"all {len(voters)} contributions are in" if len(voters) > 1 else "the only contribution is in"
    rest = [
        f"{word}: {listed(nodes)}"
        for state, word in _ABSENT.items()
        if (nodes := [seat.node for seat in view.seats if seat.state is state])
    ]
    return "; ".join([_count(voters), *rest])


def _count(voters: tuple[str, ...]) -> str:
    if not voters:
        return "no contribution: only the schedule moves"
    return f"{len(voters)} contribution{'s' if len(voters) > 1 else ''}"


def listed(nodes: Iterable[str]) -> str:
    """Some nodes, in words: the first eight by name."""
    names = list(nodes)
    return ", ".join(names) if len(names) <= 8 else f"{', '.join(names[:8])} and {len(names) - 8} more"
