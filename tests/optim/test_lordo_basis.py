"""Bases of pseudo-gradients: a warm step of subspace iteration, a fresh decomposition where it would fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.lordo.basis import captured_energy, compute_basis, overlap
from optim.lordo.shapes import basis_shape, moment_shape, state_elements


def matrix_with(spectrum: np.ndarray, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    short = len(spectrum)
    left = np.linalg.qr(rng.standard_normal((rows, short)))[0]
    right = np.linalg.qr(rng.standard_normal((columns, short)))[0]
    return ((left * spectrum) @ right.T).astype(np.float32)


def assert_orthonormal(basis: np.ndarray) -> None:
    wide = basis.astype(np.float64)
    assert basis.dtype == np.float32
    assert np.abs(wide.T @ wide - np.eye(basis.shape[1])).max() < 1e-6


@pytest.mark.parametrize("shape", [(24, 80), (80, 24), (40, 40)])
def test_the_first_basis_is_that_of_the_singular_value_decomposition(shape: tuple[int, int]) -> None:
    matrix = matrix_with(np.arange(1.0, min(shape) + 1) ** -0.7, *shape)
    basis = compute_basis(matrix, 6, None)
    left, _, right = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
    exact = left[:, :6] if shape[0] <= shape[1] else right[:6].T
    assert_orthonormal(basis)
    # column by column, in order, up to the sign, which is that of the entry of largest magnitude
    np.testing.assert_allclose(np.abs(np.einsum("ij,ij->j", basis, exact)), 1.0, atol=1e-5)
    assert (basis[np.abs(basis).argmax(axis=0), np.arange(6)] > 0).all()
    np.testing.assert_array_equal(basis, compute_basis(-matrix, 6, None))


def test_a_warm_step_follows_a_subspace_that_turns() -> None:
    rng = np.random.default_rng(1)
    spectrum = np.arange(1.0, 65) ** -1.0
    right = np.linalg.qr(rng.standard_normal((160, 64)))[0]
    left = np.linalg.qr(rng.standard_normal((64, 64)))[0]
    basis, best = None, (spectrum[:8] ** 2).sum() / (spectrum**2).sum()
    for _ in range(6):
        matrix = ((left * spectrum) @ right.T).astype(np.float32)
        stale = basis
        basis = compute_basis(matrix, 8, basis)
        assert_orthonormal(basis)
        assert captured_energy(matrix, basis) > 0.99 * best
        if stale is not None:
            assert captured_energy(matrix, stale) < captured_energy(matrix, basis)
        left = np.linalg.qr(left + 0.03 * rng.standard_normal((64, 64)))[0]


def test_a_useless_basis_is_not_followed() -> None:
    matrix = matrix_with(np.arange(1.0, 65) ** -1.0, 64, 160)
    fresh = compute_basis(matrix, 4, None)
    elsewhere = np.linalg.qr(np.random.default_rng(2).standard_normal((64, 4)))[0]
    elsewhere -= fresh @ (fresh.T @ elsewhere)
    previous = np.linalg.qr(elsewhere)[0].astype(np.float32)
    assert captured_energy(matrix, previous) < 0.3
    np.testing.assert_array_equal(compute_basis(matrix, 4, previous), fresh)


def test_a_matrix_in_the_span_of_the_basis_keeps_the_span() -> None:
    rng = np.random.default_rng(3)
    basis = compute_basis(rng.standard_normal((30, 50)).astype(np.float32), 5, None)
    for _ in range(5):
        inside = (basis @ rng.standard_normal((5, 50))).astype(np.float32)
        after = compute_basis(inside, 5, basis)
        assert abs(overlap(basis, after) - 1.0) < 1e-5
        basis = after


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_missing_directions_are_completed_from_the_previous_basis(rank: int) -> None:
    rng = np.random.default_rng(4)
    previous = np.linalg.qr(rng.standard_normal((20, 6)))[0].astype(np.float32)
    inside = previous[:, :rank] @ rng.standard_normal((rank, 33))
    after = compute_basis(inside.astype(np.float32), 6, previous)
    assert_orthonormal(after)
    assert abs(overlap(previous, after) - 1.0) < 1e-5
    if rank == 0:
        np.testing.assert_array_equal(after, previous)


def test_without_a_previous_basis_missing_directions_are_arbitrary_but_orthonormal() -> None:
    np.testing.assert_array_equal(compute_basis(np.zeros((4, 7), np.float32), 3, None), np.eye(4, 3))
    lonely = np.zeros((9, 5), np.float32)
    lonely[3, 2] = -1e-30
    basis = compute_basis(lonely, 4, None)
    assert_orthonormal(basis)
    np.testing.assert_allclose(basis[:, 0], np.eye(5)[2], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 13),
    columns=st.integers(1, 13),
    rank=st.integers(1, 16),
    true_rank=st.integers(0, 13),
    exponent=st.integers(-40, 38),
    seed=st.integers(0, 2**16),
    warm=st.booleans(),
)
def test_any_matrix_gives_an_orthonormal_basis(
    rows: int, columns: int, rank: int, true_rank: int, exponent: int, seed: int, warm: bool
) -> None:
    rng = np.random.default_rng(seed)
    inner = min(true_rank, rows, columns)
    product = rng.uniform(-1, 1, (rows, inner)) @ rng.uniform(-1, 1, (inner, columns)) / max(inner, 1)
    matrix = (product * 10.0**exponent).astype(np.float32)
    shape = basis_shape(matrix.shape, rank)
    previous = np.linalg.qr(rng.standard_normal(shape))[0].astype(np.float32) if warm else None
    basis = compute_basis(matrix, rank, previous)
    assert basis.shape == shape
    assert_orthonormal(basis)
    if inner <= shape[1] and exponent > -36:
        assert captured_energy(matrix * np.float32(2.0 ** -round(3.32 * exponent)), basis) > 1 - 1e-3 or warm


def test_more_dimensions_count_as_the_first_by_all_others() -> None:
    kernel = np.random.default_rng(5).standard_normal((6, 2, 3, 3)).astype(np.float32)
    np.testing.assert_array_equal(
        compute_basis(kernel, 4, None), compute_basis(kernel.reshape(6, 18), 4, None)
    )


def test_what_has_no_basis_is_refused() -> None:
    square = np.ones((3, 3), np.float32)
    for bad in (np.nan, np.inf):
        broken = square.copy()
        broken[1, 1] = bad
        with pytest.raises(ValueError, match="NaN or Inf"):
            compute_basis(broken, 1, None)
    with pytest.raises(ValueError, match="rank"):
        compute_basis(square, 0, None)
    with pytest.raises(ValueError, match="matrix"):
        compute_basis(square[0], 1, None)
    with pytest.raises(ValueError, match="previous basis has the shape"):
        compute_basis(square, 2, np.eye(3, 1, dtype=np.float32))


def test_shapes_and_memory() -> None:
    assert basis_shape((30, 50), 8) == basis_shape((50, 30), 8) == (30, 8)
    assert moment_shape((30, 50), 8) == moment_shape((50, 30), 8) == (8, 50)
    assert basis_shape((3, 50), 8) == (3, 3)  # a rank above the shorter side is clamped
    assert moment_shape((6, 2, 3, 3), 4) == (4, 18)
    for rows, columns, with_basis in ((512, 512, 16 / 3), (512, 2048, 64 / 9)):
        adam, rank = 2 * rows * columns, rows // 8
        state = state_elements((rows, columns), rank)
        assert state == 2 * rank * columns + rank * rows == state_elements((columns, rows), rank)
        assert adam / (state - rank * rows) == 8.0
        assert adam / state == pytest.approx(with_basis)
        assert adam / state_elements((rows, columns), rank, direction="muon") >= 8.0
    assert state_elements((4, 6), 2, error_feedback=True) == state_elements((4, 6), 2) + 24
