"""Weights of newcomers: the ramp, integers on the wire, and what it does to a majority."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ramp import FULL, LARGEST, Share, momentum_of, ramp, ramped
from optim.bits import tally
from protos.method_section import MethodConfig

WEIGHTS = st.integers(1, LARGEST)
SHARES = st.one_of(st.just(FULL), st.builds(ramp, st.integers(0, 30), st.floats(0.0, 0.995), st.just(1)))


def plain(weights: list[int], shares: list[Share]) -> list[Fraction]:
    """The definition: weight times share."""
    return [weight * Fraction(*share) for weight, share in zip(weights, shares, strict=True)]


def test_a_vote_rises_in_a_straight_line_over_the_memory_of_its_momentum() -> None:
    assert [ramp(index, 0.95) for index in (0, 1, 18, 19, 500)] == [(1, 20), (2, 20), (19, 20), FULL, FULL]
    assert [ramp(index, 0.95, 16) for index in (0, 1)] == [(16, 20), FULL]
    assert ramp(0, 0.0) == FULL and ramp(0, 0.95, 32) == FULL


@given(rounds=st.integers(0, 100), momentum=st.floats(0.0, 0.999), steps=st.integers(1, 64))
def test_it_never_falls_and_reaches_full(rounds: int, momentum: float, steps: int) -> None:
    now, then = Fraction(*ramp(rounds, momentum, steps)), Fraction(*ramp(rounds + 1, momentum, steps))
    assert 0 < now <= then <= 1
    assert ramp(round(1 / (1 - momentum)), momentum, steps) == FULL
    assert Fraction(*ramp(rounds, momentum, steps + 1)) >= now


@pytest.mark.parametrize(
    ("values", "momentum"),
    [
        ({}, 0.95),
        ({"name": "signum", "momentum": 0.9}, 0.9),
        ({"name": "sign-muon", "local_steps": 4}, 0.95),
        ({"name": "muloco-1bit"}, 0.95),
        ({"name": "muloco-1bit", "optimizer": "adamw"}, 0.9),
        ({"name": "muloco"}, 0.0),
        ({"name": "ddp-muon"}, 0.0),
        ({"name": "ddp-adamw"}, 0.0),
        ({"name": "lordo"}, 0.0),
    ],
)
def test_only_votes_ramp(values: dict[str, object], momentum: float) -> None:
    assert momentum_of(MethodConfig.model_validate(values)) == momentum


@given(weights=st.lists(WEIGHTS, min_size=1, max_size=8))
def test_weights_without_newcomers_stay_as_they_are(weights: list[int]) -> None:
    assert ramped(weights, [FULL] * len(weights)) == weights
    assert ramped(weights, [(20, 20)] * len(weights)) == weights


def test_equal_weights_become_small_integers() -> None:
    assert ramped([1, 1, 1, 1], [FULL, FULL, FULL, (1, 20)]) == [20, 20, 20, 1]
    assert ramped([7, 7, 7], [FULL, FULL, (10, 20)]) == [2, 2, 1]
    assert ramped([3, 3], [(5, 20), (5, 20)]) == [1, 1], "newcomers alone are equals"


@given(pairs=st.lists(st.tuples(WEIGHTS, SHARES), min_size=1, max_size=8))
def test_ratios_are_kept_within_a_percent(pairs: list[tuple[int, Share]]) -> None:
    weights, shares = [weight for weight, _ in pairs], [share for _, share in pairs]
    found, wanted = ramped(weights, shares), plain(weights, shares)
    assert all(1 <= weight <= LARGEST for weight in found)
    scale = Fraction(max(found)) / max(wanted)
    for one, other in combinations(range(len(found)), 2):
        if min(wanted[one], wanted[other]) * scale >= 64:  # below, an integer is not fine enough
            error = Fraction(found[one], found[other]) / (wanted[one] / wanted[other])
            assert abs(error - 1) <= Fraction(1, 100)


@given(
    weights=st.lists(st.integers(1, 300), min_size=2, max_size=6),
    data=st.data(),
)
def test_ordinary_weights_are_kept_exactly(weights: list[int], data: st.DataObject) -> None:
    shares = data.draw(
        st.lists(
            st.integers(0, 25).map(lambda n: ramp(n, 0.95)), min_size=len(weights), max_size=len(weights)
        )
    )
    found, wanted = ramped(weights, shares), plain(weights, shares)
    assert len({Fraction(one) / other for one, other in zip(found, wanted, strict=True)}) == 1


@pytest.mark.parametrize("veterans", [3, 4])
def test_the_noise_of_a_newcomer_turns_fewer_bits(veterans: int) -> None:
    chance = np.random.default_rng(7)
    right = chance.random(64 * 512) < 0.5

    def vote(correct: float) -> np.ndarray:
        return np.packbits(np.where(chance.random(right.size) < correct, right, ~right), bitorder="little")

    votes = [*(vote(0.7) for _ in range(veterans)), vote(0.5)]

    def wrong(weights: list[int]) -> float:
        result = np.unpackbits(tally(votes, weights, casting=0), bitorder="little")
        return float(np.mean(result != right))

    weights = [1] * len(votes)
    alone = float(np.mean(np.unpackbits(tally(votes[:-1], casting=0), bitorder="little") != right))
    full, young = wrong(weights), wrong(ramped(weights, [FULL] * veterans + [ramp(0, 0.95)]))
    if veterans == 3:  # no tie between the others: a twentieth of a vote decides nothing
        assert young == alone < full - 0.01
    else:  # it can break ties, as the casting vote of a veteran would break them better
        assert alone < young <= full
