"""The mean of fp32 contributions: one definition for hub, process group and simulated nodes. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

COMPARED_ROWS: Final = 24  # of a trimmed mean; with more of them sorting is faster

Row = NDArray[np.uint8]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def mean_into(rows: Sequence[Row], weights: Sequence[int], out: Row) -> None:
    """Weighted mean of little-endian fp32, written to ``out``; see :func:`weighted_mean`.

    Args:
        rows: contiguous uint8 arrays of one length, a multiple of 4; at least one.
        weights: one for each row, at least 1.
        out: uint8, as long as a row.
    """
    mean = weighted_mean((row.view("<f4") for row in rows), weights)
    with np.errstate(over="ignore"):
        out.view("<f4")[:] = mean


def weighted_mean(rows: Iterable[F32], weights: Sequence[int], factors: Sequence[float] | None = None) -> F64:
    """Weighted mean of equally long vectors, in fp64.

    Added in float64 in the order of ``rows`` (each product and sum rounded by itself) and divided by the sum
    of the weights: the result depends only on rows, order and weights. The mean of equal rows, rounded to
    fp32, is that row, bit for bit, while the weights sum to less than 2^29.

    Args:
        rows: fp32 vectors, at least one; each is read before the next is asked for, so they may share memory.
        weights: one for each row, at least 1.
        factors: of the rows, applied before the weights; all 1 if ``None``.
    """
    total: F64 | None = None
    for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
        values: F32 | F64 = row
        if factors is not None and factors[index] != 1.0:
            values = row.astype(np.float64) * factors[index]
        if weight != 1:
            values = values.astype(np.float64, copy=False) * float(weight)
        if total is None:
            total = values.astype(np.float64)
        else:
            total += values
    if total is None:
        raise ValueError("the mean of no contributions is not defined")
    total /= float(sum(weights))
    return total


def trimmed_mean_reference(values: F64, weights: Sequence[int], trim: int) -> F64:
    """Weighted mean of each column of ``values`` without its ``trim`` largest and smallest entries.

    Where there are not more than ``2 * trim`` rows, the most are left out that leave one. Of equal entries
    the one in the lower row counts as the smaller. What is kept is added in the order of the rows. With
    ``trim`` of at least half the rows this is the median of each column; of an even number of rows the
    weighted mean of the middle two. (Coordinate-wise trimmed mean and median, arXiv 1803.01498.)

    Args:
        values: [rows, n], finite.
        weights: one for each row, at least 1.
        trim: at least 0.
    """
    rows = len(values)
    trim = min(trim, (rows - 1) // 2)
    if trim == 0:
        kept = np.ones(values.shape, np.bool_)
    else:
        order = np.argsort(values, axis=0, kind="stable")
        kept = np.zeros(values.shape, np.bool_)
        np.put_along_axis(kept, order[trim : rows - trim], True, axis=0)
    total, counted = np.zeros(values.shape[1:]), np.zeros(values.shape[1:])
    for row, inside, weight in zip(values, kept, weights, strict=True):
        total += np.where(inside, row * float(weight), 0.0)
        counted += np.where(inside, float(weight), 0.0)
    total /= counted
    return total


def trimmed_mean(values: F64, weights: Sequence[int], trim: int) -> F64:
    """:func:`trimmed_mean_reference`, bit for bit, without sorting.

    Of up to :data:`COMPARED_ROWS` rows each entry is compared with each other one of its column, which gives
    its rank there; sorting short columns costs several times as much.
    """
    rows = len(values)
    trim = min(trim, (rows - 1) // 2)
    if trim == 0 or rows > COMPARED_ROWS:
        return trimmed_mean_reference(values, weights, trim)
    ranks = np.zeros(values.shape, np.uint8)
    for upper in range(1, rows):
        for lower in range(upper):
            after = values[lower] > values[upper]
            ranks[lower] += after
            np.logical_not(after, out=after)
            ranks[upper] += after
    kept = (ranks >= trim) & (ranks < rows - trim)
    total, counted = np.zeros(values.shape[1:]), np.zeros(values.shape[1:])
    for row, inside, weight in zip(values, kept, weights, strict=True):
        # Never a product with what is left out: that may be so large that it becomes infinite.
        total += np.where(inside, row, 0.0) * float(weight)
        counted += inside * float(weight)
    total /= counted
    return total


def clip_factors(norms: Sequence[float], clip: float) -> list[float]:
    """What each row is multiplied with so that no norm is above ``clip`` times the median of ``norms``.

    (Norm clipping against the median, as in Byzantine-robust averaging.) ``clip`` above 0.
    """
    limit = clip * float(np.median(np.asarray(norms, np.float64)))
    return [limit / norm if norm > limit else 1.0 for norm in norms]
