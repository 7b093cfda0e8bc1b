"""Learning-rate schedules."""

from __future__ import annotations

import math

import pytest
import torch

from optim.schedules import cosine, factor, set_learning_rates


def test_cosine_is_exact_to_the_last_bits() -> None:
    for index in range(2001):
        t = index / 2000
        assert abs(cosine(t) - math.cos(math.pi * t)) < 1e-15
    assert (cosine(0.0), cosine(0.5), cosine(1.0)) == (1.0, 0.0, -1.0)


def test_warm_up_and_cosine_as_in_the_experiments() -> None:
    for step in range(512):
        rise = min(1.0, (step + 1) / 50)
        progress = max(0.0, (step - 50) / (512 - 50))
        expected = rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))
        assert factor(step, 512, warmup=50, final=0.05) == pytest.approx(expected, abs=1e-14)


def test_shapes_and_ends() -> None:
    assert factor(0, 100, warmup=4) == 0.25
    assert factor(4, 100, warmup=4) == 1.0
    assert factor(100, 100, final=0.1) == pytest.approx(0.1)
    assert factor(10**6, 100, final=0.1) == pytest.approx(0.1)
    assert factor(50, 100, shape="linear", final=0.5) == pytest.approx(0.75)
    assert factor(99, 100, shape="constant", final=0.5) == 1.0
    assert factor(1, 100, shape="constant", warmup=4) == 0.5
    assert factor(5, 3, warmup=10) == pytest.approx(0.6)  # a run shorter than its warm-up


@pytest.mark.parametrize("shape", ["cosine", "linear"])
def test_decay_is_monotone(shape) -> None:
    values = [factor(r, 200, warmup=10, shape=shape, final=0.05) for r in range(10, 201)]
    assert values == sorted(values, reverse=True)
    assert values[0] == 1.0 and values[-1] == pytest.approx(0.05)


@pytest.mark.parametrize(
    "arguments",
    [
        {"rounds": 0},
        {"warmup": -1},
        {"round_index": -1},
        {"shape": "square"},
        {"final": 1.5},
        {"final": -0.1},
    ],
)
def test_bad_arguments(arguments: dict) -> None:
    with pytest.raises(ValueError):
        factor(**{"round_index": 0, "rounds": 10, **arguments})


def test_rates_are_set_from_their_initial_value() -> None:
    a, b = torch.zeros(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.5}, {"params": [b], "lr": 2.0}])
    for value in (0.5, 0.25, 1.0):
        set_learning_rates(optimizer, value)
        assert [group["lr"] for group in optimizer.param_groups] == [0.5 * value, 2.0 * value]
