"""Moments carried from basis to basis (LDAdam, Robert et al., arXiv 2410.16103), alike on every machine.

Moments and basis are shared state, and every node rotates for itself, so the products are exact ones
(:mod:`optim.exact`) and everything else is an elementwise operation rounded by itself.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from optim.adamw import integer_power
from optim.exact import exact_product

F32 = NDArray[np.float32]

LARGEST: Final = 2.0**100  # magnitude that moments are cut to: no product of theirs overflows then


def rotate_first(first: F32, old: F32, new: F32) -> F32:
    """``R u`` with ``R = new^T old``.

    Args:
        first: u, fp32 ``[r, n]``.
        old, new: orthonormal fp32 bases ``[m, r]`` and ``[m, r']``.

    Returns:
        fp32 ``[r', n]``; ``first`` itself if the bases are equal bit for bit, so that nothing is rounded
        then.
    """
    if same(old, new):
        return first
    return exact_product(_turn(old, new), _fp32(first))


def rotate_moments(
    first: F32, second: F32, old: F32, new: F32, *, step: int, betas: tuple[float, float]
) -> tuple[F32, F32]:
    """Both moments of Adam in another basis.

    With ``R = new^T old``, ``c1 = 1 - beta1^step`` and ``c2 = 1 - beta2^step``::

        u <- R u
        v <- c2 |(R * R) (v / c2 - (u / c1)^2) + (R u / c1)^2|

    The second line turns the estimated variance, which is taken to be uncorrelated between directions, and
    the mean separately. The estimate can be negative, hence the magnitude. It is not linear in u: average
    moments before, not after.

    Args:
        first, second: u and v, fp32 ``[r, n]``; left unchanged.
        old, new: orthonormal fp32 bases ``[m, r]`` and ``[m, r']``.
        step: updates that the moments have seen; 0 returns moments of zero.
        betas: of the moments.

    Returns:
        fp32 ``[r', n]`` each; the arguments themselves if the bases are equal bit for bit.
    """
    if same(old, new):
        return first, second
    if step == 0:
        shape = (new.shape[1], first.shape[1])
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    correction1 = 1.0 - integer_power(betas[0], step)
    correction2 = 1.0 - integer_power(betas[1], step)
    turn = _turn(old, new)
    first = _fp32(first)
    turned = exact_product(turn, first)
    mean = np.divide(first, correction1, dtype=np.float64)
    variance = np.divide(second, correction2, dtype=np.float64) - np.square(mean)
    spread = exact_product(turn * turn, _fp32(variance))
    turned_mean = np.divide(turned, correction1, dtype=np.float64)
    return turned, _fp32(np.abs(spread + np.square(turned_mean)) * correction2)


def same(old: F32, new: F32) -> bool:
    """Whether two bases are equal bit for bit (but for the signs of zeros)."""
    return old.shape == new.shape and bool(np.array_equal(old, new))


def _turn(old: F32, new: F32) -> F32:
    return exact_product(np.ascontiguousarray(new.T), old)


def _fp32(values: NDArray[Any]) -> F32:
    cut: F32 = np.clip(values, -LARGEST, LARGEST).astype(np.float32)
    return cut
