from __future__ import annotations

import pytest

from deploy.links.shape import Shape
from deploy.testbed.probe import ALIKE, Reading, Rtt, alike, steady
from deploy.testbed.verdict import judge

MACHINE = 12e9


def found(
    up: float, down: float | None = None, least: float = 0.08, sent: int = 20, lost: int = 0
) -> Reading:
    return Reading(up, up if down is None else down, Rtt(least, least, sent, sent - lost))


SHAPE = Shape(rate=10**8, delay=0.04)


def test_a_link_as_asked_for() -> None:
    verdict = judge("a", SHAPE, found(0.95e8, 1.05e8, 0.0807), MACHINE)
    assert verdict.holds and not verdict.notes


@pytest.mark.parametrize(("up", "down", "way"), [(0.85e8, 1e8, "up"), (1e8, 1.2e8, "down")])
def test_a_rate_that_is_off_by_more_than_a_tenth_is_refused(up: float, down: float, way: str) -> None:
    (problem,) = judge("a", SHAPE, found(up, down), MACHINE).problems
    assert problem.startswith(f"a {way}: asked for 100 Mbit/s, measured")


def test_a_machine_that_is_the_limit_is_no_refusal_but_a_note() -> None:
    shape = Shape(rate=10**10, delay=0.04)
    verdict = judge("a", shape, found(5e9), MACHINE)
    assert verdict.holds
    assert all("this machine is the limit: it moves 12 Gbit/s" in note for note in verdict.notes)
    assert not judge("a", shape, found(1e9), MACHINE).holds, "the machine could do more than that"
    assert not judge("a", shape, found(12e9), MACHINE).holds, "faster than asked for"


def test_a_round_trip_that_is_off_is_refused() -> None:
    (problem,) = judge("a", SHAPE, found(1e8, least=0.001), MACHINE).problems
    assert problem == "a: asked for a round trip of 80 ms, measured 1 ms"
    assert judge("a", SHAPE, found(1e8, least=0.0895), MACHINE).holds
    assert not judge("a", SHAPE, found(1e8, least=0.095), MACHINE).holds
    assert judge("a", SHAPE, found(1e8, least=0.1), MACHINE, others=0.02).holds


def test_a_jitter_widens_what_is_allowed() -> None:
    shape = Shape(rate=10**8, delay=0.04, jitter=0.02)
    assert judge("a", shape, found(1e8, least=0.045), MACHINE).holds
    assert not judge("a", shape, found(1e8, least=0.01), MACHINE).holds


@pytest.mark.parametrize(("lost", "holds"), [(0, False), (10, True), (20, True), (60, False)])
def test_loss_is_judged_by_what_chance_allows(lost: int, holds: bool) -> None:
    shape = Shape(rate=10**8, delay=0.04, loss=0.02)  # 20 of 500 there and back
    assert judge("a", shape, found(1e8, sent=500, lost=lost), MACHINE).holds == holds


def test_a_link_without_loss_loses_nothing() -> None:
    assert judge("a", SHAPE, found(1e8, lost=1), MACHINE).holds
    assert not judge("a", SHAPE, found(1e8, lost=2), MACHINE).holds


def test_an_unlimited_link_has_no_rate_to_miss() -> None:
    assert judge("a", Shape(delay=0.04), found(0.0), MACHINE).holds


def test_the_rate_is_that_of_the_steady_end() -> None:
    assert steady([1.0, 50.0, 100.0, 101.0, 99.0]) == 100.0
    assert alike([100.0] * ALIKE) and not alike([100.0] * (ALIKE - 1))


def test_what_makes_up_for_a_pause_counts_no_more_than_the_pause() -> None:
    assert steady([100.0, 100.0, 60.0, 140.0, 100.0]) == 100.0
