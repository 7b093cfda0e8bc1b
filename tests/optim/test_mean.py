"""Trimmed means and medians of rows: the fast form against the one that reads like the definition."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.mean import COMPARED_ROWS, trimmed_mean, trimmed_mean_reference
from protos.buckets import MEDIAN

HUGE = float(np.finfo(np.float32).max)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, COMPARED_ROWS + 2),
    trim=st.one_of(st.integers(0, 12), st.just(MEDIAN)),
    ties=st.booleans(),
    even=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_the_fast_form_has_the_bits_of_the_reference(
    rows: int, trim: int, ties: bool, even: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = (
        rng.choice([-HUGE, -1.0, -0.0, 0.0, 1.5, HUGE], (rows, 40)) if ties else rng.normal(size=(rows, 40))
    )
    weights = [1] * rows if even else rng.integers(1, 65536, rows).tolist()
    found, expected = (form(values, weights, trim) for form in (trimmed_mean, trimmed_mean_reference))
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_trimming_as_much_as_possible_is_the_median(rows: int) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, 30))
    found = trimmed_mean(values, [1] * rows, MEDIAN)
    np.testing.assert_allclose(found, [statistics.median(column) for column in values.T], rtol=1e-15)
