"""exact_product: the same bits in any order of summation, and near the product."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim import exact
from optim.exact import BITS, F32, INNER, SMALLEST, exact_product, exact_product_reference

TINY = float(np.finfo(np.float32).tiny)


def gaussian(shape: tuple[int, int], seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def uneven(shape: tuple[int, int], seed: int) -> F32:
    """Rows and columns of very different sizes, some of them zero."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape) * 10.0 ** random.integers(-12, 12, (shape[0], 1))
    x *= 10.0 ** random.integers(-3, 4, (1, shape[1]))
    x[random.random(shape) < 0.1] = 0
    x[random.random(shape[0]) < 0.1] *= 1e-25
    x[random.random(shape[0]) < 0.1] *= 0
    return x.astype(np.float32)


SHAPES = [
    (1, 1, 1),
    (3, 1, 5),
    (1, 17, 1),
    (7, 13, 11),
    (5, INNER, 3),
    (3, INNER + 1, 4),
    (2, 3 * INNER + 7, 3),
]


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_bits_are_those_of_whole_numbers(m: int, k: int, n: int) -> None:
    for seed in range(3):
        a, b = uneven((m, k), seed), np.ascontiguousarray(uneven((n, k), seed + 7).T)
        assert exact_product(a, b).tobytes() == exact_product_reference(a, b).tobytes()


@given(
    m=st.integers(1, 4),
    k=st.integers(1, 6),
    n=st.integers(1, 4),
    data=st.data(),
)
def test_any_finite_numbers_give_the_bits_of_whole_numbers(
    m: int, k: int, n: int, data: st.DataObject
) -> None:
    floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
    a, b = (
        np.array(data.draw(st.lists(floats, min_size=r * c, max_size=r * c)), np.float32).reshape(r, c)
        for r, c in ((m, k), (k, n))
    )
    assert exact_product(a, b).tobytes() == exact_product_reference(a, b).tobytes()


@pytest.mark.parametrize("k", [2, 100, INNER])
def test_the_order_of_the_sums_does_not_matter(k: int) -> None:
    a, b = uneven((40, k), 1), np.ascontiguousarray(uneven((30, k), 2).T)
    expected = exact_product(a, b)
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(k)
        assert exact_product(np.ascontiguousarray(a[:, order]), np.ascontiguousarray(b[order])).tobytes() == (
            expected.tobytes()
        )


def test_the_largest_sums_are_exact() -> None:
    """All products at the limit: 512 of 2^44 make 2^53, and one unit less is told apart from it."""
    assert INNER * 2 ** (2 * BITS) == 2**53
    almost = np.float32(1 - 2.0**-24)  # rounds up to 1 on the grid of 22 bits
    a, b = np.full((2, INNER), almost, np.float32), np.full((INNER, 2), almost, np.float32)
    assert (exact_product(a, b) == INNER).all()
    a[1, 0] = np.float32(1 - 2.0**-22)
    product = exact_product(a, b)
    assert product[0, 0] == INNER and product[1, 0] == np.float32(INNER - 2.0**-22)


def test_blocks_pieces_and_the_memory_layout_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = gaussian((37, 2 * INNER + 5), 1), gaussian((2 * INNER + 5, 19), 2)
    expected = exact_product(a, b).tobytes()
    monkeypatch.setattr(exact, "_PIECE", 50)
    assert exact_product(a, b).tobytes() == expected
    assert exact_product(np.asfortranarray(a), b[:, ::-1])[:, ::-1].tobytes() == expected
    assert np.ascontiguousarray(exact_product(b.T, a.T).T).tobytes() == expected


@pytest.mark.parametrize("k", [8, 64, 1000])
def test_the_error_is_within_its_bound(k: int) -> None:
    a, b = uneven((20, k), 3), np.ascontiguousarray(uneven((30, k), 4).T)
    product = a.astype(np.float64) @ b.astype(np.float64)
    rows = np.abs(a).max(axis=1, keepdims=True).astype(np.float64)
    columns = np.abs(b).max(axis=0, keepdims=True).astype(np.float64)
    # the grids, the last rounding, rows or columns that count as zeros, results that do
    bound = k * 2.0 ** (1 - BITS) * rows * columns + np.abs(product) * 2.0**-23
    bound += k * SMALLEST * (rows + columns) + TINY
    assert (np.abs(exact_product(a, b) - product) <= bound).all()


@pytest.mark.parametrize("k", [8, 64, 1000])
def test_the_error_is_like_that_of_an_ordinary_product(k: int) -> None:
    a, b = gaussian((20, k), 1), gaussian((k, 30), 2)
    product = a.astype(np.float64) @ b.astype(np.float64)
    assert np.abs(exact_product(a, b) - product).max() < 2e-6 * np.sqrt(k)


def test_an_orthonormal_matrix_stays_orthonormal() -> None:
    q = np.linalg.qr(gaussian((200, 16)).astype(np.float64))[0].astype(np.float32)
    assert np.abs(exact_product(np.ascontiguousarray(q.T), q) - np.eye(16)).max() < 2e-6


def test_large_and_small_products() -> None:
    big = np.array([[3e38, 3e38]], np.float32)
    with np.errstate(all="raise"):
        assert exact_product(big, -big.T).tolist() == [[-np.inf]]
        assert exact_product(big, np.array([[1.0], [-1.0]], np.float32)).tolist() == [[0.0]]
        small = np.array([[1e-25]], np.float32)
        assert exact_product(small, np.array([[-1e-20]], np.float32)).tobytes() == b"\0\0\0\0"
        assert exact_product(small, np.array([[1e-10]], np.float32))[0, 0] == pytest.approx(1e-35, rel=1e-6)
        below = np.array([[1e-31, 1e-40]], np.float32)  # a row of such numbers counts as zeros
        assert not exact_product(below, np.ones((2, 1), np.float32)).any()


def test_no_zero_is_negative() -> None:
    a = np.array([[-0.0, 0.0], [0.0, -1.0]], np.float32)
    b = np.array([[-1.0, 5.0], [0.0, -0.0]], np.float32)
    for product in (exact_product(a, b), exact_product(a[:1, :1], b[:1])):
        assert not product[product == 0].view(np.uint32).any()


def test_flush_to_zero_changes_nothing() -> None:
    pairs = [
        (uneven((20, 30), seed) * np.float32(size), np.ascontiguousarray(uneven((10, 30), seed + 1).T))
        for seed, size in enumerate((1.0, 1e-15, 1e-20, 1e-26, 1e-30))
    ]
    ordinary = [exact_product(a, b).tobytes() for a, b in pairs]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        flushed = [exact_product(a, b).tobytes() for a, b in pairs]
    finally:
        torch.set_flush_denormal(False)
    assert flushed == ordinary


def test_nothing_to_add_is_zero() -> None:
    assert (
        exact_product(np.empty((2, 0), np.float32), np.empty((0, 3), np.float32)).tolist() == [[0.0] * 3] * 2
    )
    assert exact_product(np.empty((0, 4), np.float32), np.empty((4, 3), np.float32)).shape == (0, 3)
    assert exact_product(np.empty((3, 4), np.float32), np.empty((4, 0), np.float32)).shape == (3, 0)


def test_wrong_operands_are_refused() -> None:
    a, b = gaussian((3, 4)), gaussian((4, 5))
    with pytest.raises(ValueError, match=r"\(3, 4\) cannot be multiplied by b of shape \(5, 4\)"):
        exact_product(a, np.ascontiguousarray(b.T))
    with pytest.raises(ValueError, match="b must be a float32 matrix, not float64"):
        exact_product(a, b.astype(np.float64))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a must be a float32 matrix"):
        exact_product(a[0], b)
    for bad in (np.nan, np.inf):
        b[2, 2] = bad
        with pytest.raises(ValueError, match="b holds NaN or infinity"):
            exact_product(a, b)
