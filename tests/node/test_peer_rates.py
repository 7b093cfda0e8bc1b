"""Estimates of links from transfers: which of them count, and how."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange.meter import Direction
from node.exchange.peers.rates import CUT_SECONDS, LEAST_BYTES, LEAST_SECONDS, SPANS, Rates

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def rates(clock: Clock) -> Rates:
    return Rates(clock)


def transfer(rates: Rates, clock: Clock, nbytes: int, seconds: float, direction: Direction = "up") -> None:
    with rates.moving(direction):
        clock.now += seconds
        rates.add(direction, nbytes)


def test_nothing_is_known_before_the_first_transfer(rates: Rates) -> None:
    assert rates.uplink is None and rates.downlink is None


def test_directions_are_apart(rates: Rates, clock: Clock) -> None:
    transfer(rates, clock, 2 * MIB, 2.0, "down")
    assert rates.uplink is None and rates.downlink == MIB
    transfer(rates, clock, 4 * MIB, 1.0, "up")
    assert rates.uplink == 4 * MIB and rates.downlink == MIB


@pytest.mark.parametrize(
    ("nbytes", "seconds", "counts"),
    [
        (LEAST_BYTES, 2 * LEAST_SECONDS, True),
        (LEAST_BYTES - 1, 2 * LEAST_SECONDS, False),
        (50 * MIB, LEAST_SECONDS / 2, False),
    ],
)
def test_small_and_short_ones_do_not_count(
    rates: Rates, clock: Clock, nbytes: int, seconds: float, counts: bool
) -> None:
    transfer(rates, clock, nbytes, seconds)
    assert (rates.uplink is not None) == counts


def test_the_best_counts_until_enough_others_have_come(rates: Rates, clock: Clock) -> None:
    transfer(rates, clock, 8 * MIB, 1.0)
    for _ in range(SPANS - 1):
        transfer(rates, clock, 2 * MIB, 1.0)
    assert rates.uplink == 8 * MIB
    transfer(rates, clock, 2 * MIB, 1.0)
    assert rates.uplink == 2 * MIB


def test_transfers_at_the_same_time_are_one(rates: Rates, clock: Clock) -> None:
    with rates.moving("up"):
        clock.now += 1.0
        with rates.moving("up"):
            rates.add("up", 3 * MIB)
            clock.now += 1.0
            rates.add("up", MIB)
        assert rates.uplink is None
        clock.now += 2.0
    assert rates.uplink == MIB


def test_bytes_outside_of_transfers_do_not_count(rates: Rates, clock: Clock) -> None:
    rates.add("up", 100 * MIB)
    with rates.moving("up"):
        rates.add("down", 100 * MIB)
        clock.now += 1.0
        rates.add("up", MIB)
    rates.add("up", 100 * MIB)
    assert rates.uplink == MIB and rates.downlink is None


def test_a_transfer_that_breaks_counts_as_far_as_it_came(rates: Rates, clock: Clock) -> None:
    with pytest.raises(ConnectionError), rates.moving("up"):
        clock.now += 1.0
        rates.add("up", 2 * MIB)
        raise ConnectionError
    assert rates.uplink == 2 * MIB
    transfer(rates, clock, 3 * MIB, 1.0)
    assert rates.uplink == 3 * MIB


def test_a_long_transfer_counts_in_parts(rates: Rates, clock: Clock) -> None:
    with rates.moving("down"):
        for second in range(1, 8):
            clock.now += 1.0
            rates.add("down", MIB)
            assert (rates.downlink is not None) == (second >= CUT_SECONDS)
        clock.now += 100.0  # the other side has nothing
    assert rates.downlink == MIB


def test_a_thin_link_is_known_once_enough_has_moved(rates: Rates, clock: Clock) -> None:
    with rates.moving("up"):
        for _ in range(4):
            assert rates.uplink is None
            clock.now += 8.0
            rates.add("up", MIB // 4)
        assert rates.uplink == MIB / 32


@given(
    st.floats(1e3, 1e9),
    st.lists(st.tuples(st.floats(0.001, 20.0), st.floats(0.0, 5.0)), min_size=1, max_size=30),
)
def test_a_steady_link_is_never_overestimated(rate: float, messages: list[tuple[float, float]]) -> None:
    clock = Clock()
    rates = Rates(clock)
    with rates.moving("up"):
        for seconds, pause in messages:
            clock.now += seconds
            rates.add("up", int(rate * seconds))
            clock.now += pause
    assert rates.uplink is None or rates.uplink <= rate * (1 + 1e-6)
    everything = sum(seconds + pause for seconds, pause in messages)
    moved = sum(int(rate * seconds) for seconds, _ in messages)
    if everything < CUT_SECONDS and moved >= LEAST_BYTES and everything > LEAST_SECONDS:
        assert rates.uplink == pytest.approx(moved / everything, rel=1e-6)
