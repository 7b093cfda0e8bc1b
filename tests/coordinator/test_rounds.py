"""Every verdict on a round, with its reason."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.rounds import (
    Policy,
    RoundView,
    Seat,
    State,
    decide,
    evaluates,
    evaluator,
    worth_waiting,
)

POLICY = Policy(deadline=10.0, start_timeout=60.0, quorum=0.6)
E, C, A, F, G, L = (
    State.EXPECTED,
    State.COMPLETE,
    State.ABSTAINED,
    State.FAILED,
    State.GONE,
    State.LAGGING,
)


def view(
    *states: State, now: float = 0.0, first_at: float | None = None, dead: tuple[int, ...] = ()
) -> RoundView:
    """Round 7, opened at 0, with members node-0, node-1, ... in the given states."""
    seats = tuple(
        Seat(f"node-{i}", state, live=state is not G and i not in dead) for i, state in enumerate(states)
    )
    return RoundView(7, seats, 0.0, first_at, now)


def test_waits_for_the_first_contribution_until_start_timeout_and_deadline() -> None:
    verdict = decide(view(E, E, E), POLICY)
    assert (verdict.action, verdict.until) == ("wait", 70.0)
    assert verdict.reason == "0 of 3 contributions, waiting for node-0, node-1, node-2"


def test_waits_a_deadline_after_the_first_contribution() -> None:
    verdict = decide(view(C, E, E, now=3.0, first_at=2.0), POLICY)
    assert (verdict.action, verdict.until) == ("wait", 12.0)
    assert verdict.reason == "1 of 3 contributions, waiting for node-1, node-2"


def test_commits_when_everybody_has_delivered() -> None:
    verdict = decide(view(C, C, C, now=3.0, first_at=2.0), POLICY)
    assert (verdict.action, verdict.voters, verdict.silent) == ("commit", ("node-0", "node-1", "node-2"), ())
    assert verdict.reason == "all 3 contributions are in"


def test_a_run_of_one_commits_at_once() -> None:
    verdict = decide(view(C, first_at=0.0), POLICY)
    assert (verdict.action, verdict.voters) == ("commit", ("node-0",))
    assert verdict.reason == "the only contribution is in"


@pytest.mark.parametrize(("state", "word"), [(A, "abstained"), (F, "refused"), (G, "left"), (L, "lagging")])
def test_nobody_waits_for_those_who_will_not_deliver(state: State, word: str) -> None:
    verdict = decide(view(C, state, C, first_at=0.0), POLICY)
    assert (verdict.action, verdict.voters) == ("commit", ("node-0", "node-2"))
    assert verdict.reason == f"2 contributions; {word}: node-1"


def test_all_abstain() -> None:
    verdict = decide(view(A, A, A), POLICY)
    assert (verdict.action, verdict.voters) == ("commit", ())
    assert verdict.reason == ("no contribution: only the schedule moves; abstained: node-0, node-1, node-2")


def test_quorum_at_the_deadline() -> None:
    assert decide(view(C, C, E, now=11.9, first_at=2.0), POLICY).action == "wait"
    verdict = decide(view(C, C, E, now=12.0, first_at=2.0), POLICY)
    assert (verdict.action, verdict.voters) == ("commit", ("node-0", "node-1"))
    assert verdict.silent == ("node-2",)
    assert verdict.reason == "2 contributions; node-2 sent nothing within the deadline of 10 s"


def test_without_quorum_it_waits_once_more_and_says_so() -> None:
    verdict = decide(view(C, E, E, E, now=12.0, first_at=2.0), POLICY)
    assert (verdict.action, verdict.until) == ("wait", 72.0)
    assert "1 of 4 contributions are less than the quorum of 3" in verdict.reason
    assert "going on without it in 60 s" in verdict.reason
    verdict = decide(view(C, E, E, E, now=72.0, first_at=2.0), POLICY)
    assert (verdict.action, verdict.voters) == ("commit", ("node-0",))
    assert verdict.silent == ("node-1", "node-2", "node-3")
    assert "60 s more have passed" in verdict.reason


def test_silence_of_all_ends_in_an_empty_commit() -> None:
    assert decide(view(E, E, now=129.0), POLICY).action == "wait"
    verdict = decide(view(E, E, now=130.0), POLICY)
    assert (verdict.action, verdict.voters, verdict.silent) == ("commit", (), ("node-0", "node-1"))


def test_a_late_first_contribution_does_not_move_the_deadline_out() -> None:
    assert decide(view(C, C, E, now=69.0, first_at=65.0), POLICY).until == 70.0


def test_quorum_counts_the_living() -> None:
    """Two of four have left: both others are needed, and are enough."""
    verdict = decide(view(C, E, G, G, now=12.0, first_at=2.0), POLICY)
    assert "less than the quorum of 2" in verdict.reason
    assert decide(view(C, C, G, G, first_at=2.0), POLICY).action == "commit"


def test_lagging_members_do_not_weigh_on_the_quorum() -> None:
    verdict = decide(view(C, C, E, L, L, now=12.0, first_at=2.0), POLICY)
    assert (verdict.action, verdict.silent) == ("commit", ("node-2",))


def test_when_all_lag_they_are_waited_for() -> None:
    verdict = decide(view(L, L), POLICY)
    assert (verdict.action, verdict.until) == ("wait", 70.0)
    assert decide(view(L, C, first_at=1.0), POLICY).action == "commit"
    late = decide(view(L, L, now=130.0), POLICY)
    assert (late.action, late.silent) == ("commit", ("node-0", "node-1"))


def test_a_whole_contribution_outlives_its_sender() -> None:
    verdict = decide(view(C, C, first_at=1.0, dead=(0,)), POLICY)
    assert (verdict.action, verdict.voters) == ("commit", ("node-0", "node-1"))


def test_nobody_left() -> None:
    for states, dead in (((G, G), ()), ((C, G), (0,)), ((C, C), (0, 1))):
        verdict = decide(view(*states, first_at=1.0, dead=dead), POLICY)
        assert (verdict.action, verdict.reason) == ("fail", "every node has left in round 8")


def test_long_lists_are_cut() -> None:
    assert decide(view(*[E] * 12), POLICY).reason.endswith("node-7 and 4 more")


MATRIX: Mapping[tuple[State, str], tuple[str, tuple[str, ...]]] = {
    # (state of node-1, event) -> (action, voters); node-0 has delivered, node-2 is expected until it delivers
    (E, "others deliver"): ("wait", ()),
    (C, "others deliver"): ("commit", ("node-0", "node-1", "node-2")),
    (A, "others deliver"): ("commit", ("node-0", "node-2")),
    (F, "others deliver"): ("commit", ("node-0", "node-2")),
    (G, "others deliver"): ("commit", ("node-0", "node-2")),
    (L, "others deliver"): ("commit", ("node-0", "node-2")),
    (E, "dies"): ("commit", ("node-0", "node-2")),
    (C, "dies"): ("commit", ("node-0", "node-1", "node-2")),
    (A, "dies"): ("commit", ("node-0", "node-2")),
    (F, "dies"): ("commit", ("node-0", "node-2")),
    (L, "dies"): ("commit", ("node-0", "node-2")),
    (E, "deadline"): ("commit", ("node-0", "node-2")),
    (C, "deadline"): ("commit", ("node-0", "node-1", "node-2")),
    (L, "deadline"): ("commit", ("node-0", "node-2")),
}


@pytest.mark.parametrize(("state", "event"), list(MATRIX))
def test_state_by_event(state: State, event: str) -> None:
    action, voters = MATRIX[state, event]
    after = G if event == "dies" and state is not C else state
    dead = (1,) if event == "dies" else ()
    now = 12.0 if event == "deadline" else 3.0
    verdict = decide(view(C, after, C, now=now, first_at=2.0, dead=dead), POLICY)
    assert (verdict.action, verdict.voters) == (action, voters)


states = st.sampled_from(list(State))
times = st.floats(0, 500, allow_nan=False)


@given(
    st.lists(st.tuples(states, st.booleans()), min_size=1, max_size=9),
    times,
    times,
    st.floats(0.51, 1.0),
)
def test_every_round_closes(
    members: list[tuple[State, bool]], first: float, later: float, quorum: float
) -> None:
    seats = tuple(
        Seat(f"node-{i}", state, live and state is not G) for i, (state, live) in enumerate(members)
    )
    complete = tuple(seat.node for seat in seats if seat.state is C)
    first_at = first if complete else None
    policy = Policy(10.0, 60.0, quorum)
    now = first + later
    verdict = decide(RoundView(3, seats, 0.0, first_at, now), policy)
    assert verdict.reason
    if verdict.action == "wait":
        assert verdict.until is not None and verdict.until > now
    elif verdict.action == "commit":
        assert verdict.voters == complete
        assert not set(verdict.silent) & set(complete)
    else:
        assert not any(seat.live for seat in seats)
    # Whatever happens, the second limit is the last.
    final = decide(RoundView(3, seats, 0.0, first_at, 60.0 + 10.0 + 60.0), policy)
    assert final.action != "wait"


def test_who_is_worth_waiting_for_again() -> None:
    assert worth_waiting(5, -1, 0)  # it was only refused
    assert worth_waiting(5, 4, 1)  # one stumble
    assert [worth_waiting(r, 4, 3) for r in range(5, 10)] == [False, False, False, True, True]
    assert not worth_waiting(67, 4, 99) and worth_waiting(68, 4, 99)


def test_who_evaluates_when() -> None:
    assert [r for r in range(10) if evaluates(r, 10, 4)] == [3, 7, 9]
    assert [r for r in range(10) if evaluates(r, 10, 0)] == [9]
    nodes = ["a", "b", "c"]
    assert [evaluator(r, 4, nodes) for r in (3, 7, 11, 15)] == ["a", "b", "c", "a"]
    assert evaluator(3, 4, []) is None
