"""The mean of fp32 contributions: one definition for hub, process group and simulated nodes. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.uint8]


def mean_into(rows: Sequence[Row], weights: Sequence[int], out: Row) -> None:
    """Weighted mean of little-endian fp32, written to ``out``.

    Added in float64 in the order of ``rows`` (each product and sum rounded by itself), divided by the sum of
    the weights and rounded once to fp32: the result depends only on rows, order and weights. The unweighted
    mean of equal rows is that row, bit for bit.

    Args:
        rows: contiguous uint8 arrays of one length, a multiple of 4; at least one.
        weights: one for each row, at least 1.
        out: uint8, as long as a row.
    """
    total = rows[0].view("<f4").astype(np.float64)
    if weights[0] != 1:
        total *= float(weights[0])
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        values = row.view("<f4")
        total += values if weight == 1 else values.astype(np.float64) * float(weight)
    total /= float(sum(weights))
    with np.errstate(over="ignore"):
        out.view("<f4")[:] = total
