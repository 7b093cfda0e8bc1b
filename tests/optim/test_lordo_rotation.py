"""Moments in another basis."""

from __future__ import annotations

import numpy as np
import pytest

from optim.lordo import reference
from optim.lordo.rotation import rotate_first, rotate_moments

BETAS = (0.908, 0.99)


def orthonormal(rows: int, columns: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((rows, columns)))[0].astype(np.float32)


def moments(rank: int, columns: int, steps: int = 7) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(9)
    first, second = np.zeros((rank, columns)), np.zeros((rank, columns))
    for _ in range(steps):
        gradient = rng.standard_normal((rank, columns)) + 0.5
        first = BETAS[0] * first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * second + (1 - BETAS[1]) * gradient**2
    return first.astype(np.float32), second.astype(np.float32)


@pytest.mark.parametrize("ranks", [(5, 5), (5, 3), (3, 5)])
def test_equals_the_formula_in_fp64(ranks: tuple[int, int]) -> None:
    old, new = orthonormal(20, ranks[0], 0), orthonormal(20, ranks[1], 1)
    first, second = moments(ranks[0], 31)
    turned = rotate_moments(first, second, old, new, step=7, betas=BETAS)
    turn = new.T.astype(np.float64) @ old
    wanted = reference.rotate(first.astype(np.float64), second.astype(np.float64), turn, 7, BETAS)
    assert turned[0].shape == (ranks[1], 31)
    for got, exact in zip(turned, wanted, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, exact, atol=2e-6)
    np.testing.assert_array_equal(turned[0], rotate_first(first, old, new))


def test_equal_bases_change_no_bit() -> None:
    basis, (first, second) = orthonormal(12, 4, 0), moments(4, 9)
    turned = rotate_moments(first, second, basis, basis.copy(), step=7, betas=BETAS)
    assert turned[0] is first and turned[1] is second
    assert rotate_first(first, basis, basis.copy()) is first


def test_within_one_span_the_momentum_stays_where_it_is() -> None:
    basis, (first, second) = orthonormal(12, 4, 0), moments(4, 9)
    mixed = (basis @ orthonormal(4, 4, 3)).astype(np.float32)
    turned, _ = rotate_moments(first, second, basis, mixed, step=7, betas=BETAS)
    np.testing.assert_allclose(mixed @ turned, basis @ first, atol=1e-6)


def test_a_signed_permutation_only_relabels() -> None:
    basis, (first, second) = orthonormal(12, 4, 0), moments(4, 9)
    order, signs = [2, 0, 3, 1], np.array([1, -1, -1, 1], np.float32)
    turned = rotate_moments(first, second, basis, basis[:, order] * signs, step=7, betas=BETAS)
    np.testing.assert_allclose(turned[0], first[order] * signs[:, None], atol=2e-6)
    np.testing.assert_allclose(turned[1], second[order], atol=2e-6)


def test_an_estimated_variance_below_zero_gives_no_negative_moment() -> None:
    # u^2 / c1^2 may exceed v / c2: without the magnitude the root would be NaN
    old, new = np.eye(6, 2, dtype=np.float32), np.zeros((6, 2), np.float32)
    new[:2] = np.array([[1, 1], [1, -1]]) / np.sqrt(2)
    first = np.array([[3.0], [-3.0]], np.float32).repeat(4, axis=1)
    second = np.full((2, 4), 1e-3, np.float32)
    _, turned = rotate_moments(first, second, old, new, step=2, betas=BETAS)
    assert (turned >= 0).all()
    turn = new.T.astype(np.float64) @ old
    c1, c2 = 1 - BETAS[0] ** 2, 1 - BETAS[1] ** 2
    signed = (turn * turn) @ (second / c2 - (first / c1) ** 2) + (turn @ first / c1) ** 2
    assert (signed < 0).any()


def test_an_orthogonal_basis_forgets_and_no_step_has_nothing_to_turn() -> None:
    basis, (first, second) = np.eye(8, 4, dtype=np.float32), moments(4, 9)
    other = np.eye(8, dtype=np.float32)[:, 4:]
    for turned in rotate_moments(first, second, basis, other, step=7, betas=BETAS):
        assert not turned.any()
    for turned in rotate_moments(first, second, basis, other[:, :2], step=0, betas=BETAS):
        assert turned.shape == (2, 9) and not turned.any()


def test_huge_moments_stay_finite() -> None:
    old, new = orthonormal(12, 4, 0), orthonormal(12, 4, 1)
    huge = np.full((4, 9), 3e38, np.float32)
    for turned in rotate_moments(huge, huge, old, new, step=3, betas=BETAS):
        assert np.isfinite(turned).all()
