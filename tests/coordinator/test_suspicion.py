"""What follows from what was seen of the nodes."""

from __future__ import annotations

import pytest

from coordinator.ballots import Ballot
from coordinator.suspicion import LEAST_ROUNDS, Sighting, Suspicions, Thresholds

NOISE = 0.01


def ballot(shortfall: float, typical: float = 0.2, **what: bool) -> Sighting:
    return Sighting(Ballot(gap=shortfall * typical, typical=typical, noise=NOISE, **what))


def watched(limits: Thresholds, rounds: int, **false: Sighting) -> Suspicions:
    """Five nodes, those of whom are honest that are not ``false``."""
    suspicions = Suspicions(limits)
    for index in range(rounds):
        honest = {name: ballot(0.1 * (-1) ** index) for name in "abcde"}
        suspicions.saw({**honest, **false})
    return suspicions


@pytest.mark.parametrize(
    ("sighting", "cause", "score"),
    [
        (ballot(1.0), "disagrees", 1.0),
        (ballot(2.0), "disagrees", 2.0),
        (ballot(1.0, constant=True), "constant", 1.0),
        (Sighting(Ballot(0.0, 0.2, NOISE, copied=0)), "copies", 1.0),
        (ballot(0.7, replayed=True), "replays", 1.0),
        (Sighting(invalid=True), "invalid", 1.0),
        (Sighting(abstained=True), "abstains", 1.0),
    ],
)
def test_who_is_named_and_why(sighting: Sighting, cause: str, score: float) -> None:
    found = watched(Thresholds(), LEAST_ROUNDS, c=sighting).judge("abcde")
    assert (found["c"].action, found["c"].cause) == ("warn", cause)
    assert found["c"].score == pytest.approx(score)
    assert f"{score:.2f} in its last {LEAST_ROUNDS} rounds" in found["c"].reason
    assert all(found[name].action == "none" for name in "abde")


def test_nobody_is_named_too_early_or_without_a_signal() -> None:
    assert watched(Thresholds(), LEAST_ROUNDS - 1, c=ballot(2.0)).judge("abcde")["c"].action == "none"
    faint = Suspicions(Thresholds())
    for _ in range(20):
        faint.saw({name: ballot(2.0 if name == "c" else 0.0, typical=2 * NOISE) for name in "abcde"})
    assert faint.judge("abcde")["c"].score == 0.0


def test_a_node_that_betters_itself_is_cleared() -> None:
    suspicions = watched(Thresholds(window=8), 8, c=ballot(1.0))
    for _ in range(4):
        suspicions.saw({name: ballot(0.0) for name in "abcde"})
    assert suspicions.judge("abcde")["c"].action == "none"
    suspicions.forget_all_but("ab")
    assert suspicions.scores("c")["disagrees"] == 0.0


def test_thresholds_choose_what_is_done() -> None:
    limits = Thresholds(warn=0.5, downweight=0.9, expel=1.5)
    for shortfall, action in ((0.4, "none"), (0.7, "warn"), (1.0, "downweight"), (2.0, "expel")):
        found = watched(limits, 16, c=ballot(shortfall)).judge("abcde")
        assert found["c"].action == action
    assert watched(Thresholds(warn=0.0), 16, c=ballot(2.0)).judge("abcde")["c"].action == "none"


def test_whoever_has_lied_for_certain_is_under_suspicion_at_once() -> None:
    suspicions = watched(Thresholds(downweight=2.0), 1)
    suspicions.lied("c", "a and b contradict it")
    found = suspicions.judge("abcde")
    assert (found["c"].action, found["c"].cause, found["c"].score) == ("downweight", "lies", 2.0)
    assert found["c"].reason.endswith("slices: a and b contradict it")
    assert all(found[name].action == "none" for name in "abde")
    suspicions.forget_all_but("ab")
    assert suspicions.scores("c")["lies"] == 0.0


def test_no_more_than_naming_where_nobody_can_tell_who_is_wrong() -> None:
    limits = Thresholds(expel=0.8)
    half = watched(limits, 16, c=ballot(2.0), d=ballot(2.0), e=ballot(2.0)).judge("abcde")
    assert {half[name].action for name in "cde"} == {"warn"}
    few = watched(limits, 16, c=ballot(2.0)).judge("abc")
    assert few["c"].action == "warn"
    assert watched(limits, 16, c=ballot(2.0)).judge("abcd")["c"].action == "expel"
