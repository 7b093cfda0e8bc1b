"""A matrix product with the same bits on every machine.

Sums of products are rounded in an order that depends on the BLAS, the processor and the number of threads, so
replicas that multiply matrices drift apart. Here the operands are first rounded to whole multiples of a power
of two, so coarse that the float64 product adds whole numbers up to 2^53, which is exact in any order and with
or without fused multiply-add. This is the error-free splitting of Ozaki et al. (Numerical Algorithms 59,
2012), cut after its first slice. NumPy only.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

BITS: Final = 22  # of an entry, next to the largest in its row of ``a`` or its column of ``b``
INNER: Final = 512  # products summed exactly: 2^9 of at most 2^(22 + 22) make 2^53
SMALLEST: Final = 2.0**-100  # rows and columns below it count as 0, results below 2^-126 too
_PIECE: Final = 1 << 18  # entries of the result made at once: float64 takes 2 MiB
_SMALLEST_NORMAL: Final = 2.0**-126


def exact_product(a: F32, b: F32) -> F32:
    """``a @ b`` for ``a[m, k]`` and ``b[k, n]``: float32 ``[m, n]``, on every machine the same bits.

    Each row of ``a`` and each column of ``b`` is rounded to multiples of ``2^-22`` times the next power of
    two above its largest magnitude, ties to even; blocks of 512 products are added exactly, the sums of
    blocks in order in float64, and the result is rounded to float32 once. So the error is within ``k 2^-21``
    of largest in row times largest in column, mostly far less, beside the last rounding. What would depend
    on how a machine treats subnormal numbers counts as 0, of positive sign as all zeros here. What is too
    large for float32 becomes infinite, as in any product.

    Costs a float64 product and two float64 copies of the operands.

    Raises:
        ValueError: an operand is no float32 matrix, holds NaN or infinity, or the inner sizes differ.
    """
    _check(a, b)
    left, left_units = _grid(a, 1)
    right, right_units = _grid(b, 0)
    inner, out = a.shape[1], np.zeros((a.shape[0], b.shape[1]), np.float32)
    if inner == 0 or out.size == 0:
        return out
    # entries are multiples of the product of their units
    may_sink = float(left_units.min() * right_units.min()) < _SMALLEST_NORMAL
    step = max(1, _PIECE // out.shape[1])
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        total = left[rows, :INNER] @ right[:INNER]
        for first in range(INNER, inner, INNER):
            block = slice(first, first + INNER)
            total += left[rows, block] @ right[block]
        total *= left_units[rows]
        total *= right_units
        if may_sink:
            total[np.abs(total) < _SMALLEST_NORMAL] = 0.0
        total += 0.0  # -0 or 0, as the BLAS has it, becomes 0
        with np.errstate(over="ignore"):
            out[rows] = total
    return out


def exact_product_reference(a: F32, b: F32) -> F32:
    """:func:`exact_product` with Python's whole numbers, entry by entry."""
    _check(a, b)
    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    rows = [_whole_numbers(a[i]) for i in range(a.shape[0])]
    columns = [_whole_numbers(b[:, j]) for j in range(b.shape[1])]
    for i, (row, row_exponent) in enumerate(rows):
        for j, (column, column_exponent) in enumerate(columns):
            total = 0.0
            for first in range(0, len(row), INNER):
                pairs = zip(row[first : first + INNER], column[first : first + INNER], strict=True)
                total += float(sum(p * q for p, q in pairs))
            total *= 2.0 ** (row_exponent + column_exponent)
            with np.errstate(over="ignore"):
                out[i, j] = total if abs(total) >= _SMALLEST_NORMAL else 0.0
    return out


def _whole_numbers(vector: F32) -> tuple[list[int], int]:
    """Whole numbers and the exponent of the power of two that they are multiples of."""
    largest = max((abs(float(x)) for x in vector), default=0.0)
    if largest < SMALLEST:
        return [0] * len(vector), 0
    exponent = int(np.frexp(largest)[1]) - BITS
    return [round(float(x) * 2.0**-exponent) for x in vector], exponent


def _check(a: F32, b: F32) -> None:
    for name, operand in (("a", a), ("b", b)):
        if operand.ndim != 2 or operand.dtype != np.float32:
            raise ValueError(f"{name} must be a float32 matrix, not {operand.dtype} of shape {operand.shape}")
        if not bool(np.isfinite(operand).all()):
            raise ValueError(f"{name} holds NaN or infinity; its product would be neither")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a of shape {a.shape} cannot be multiplied by b of shape {b.shape}")


def _grid(operand: F32, axis: int) -> tuple[F64, F64]:
    """The operand in whole numbers, and their units, powers of two, along ``axis``."""
    largest = np.max(np.abs(operand), axis=axis, keepdims=True, initial=0.0)
    units = np.ldexp(1.0, np.frexp(largest)[1] - BITS)
    whole = operand.astype(np.float64)
    whole /= units
    np.rint(whole, out=whole)
    whole *= largest >= SMALLEST
    return whole, units
