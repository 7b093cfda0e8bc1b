"""One step of low-rank Adam on moments that all nodes share, in operations that round alike on all hardware.

The same formulas as in :mod:`optim.lordo.inner`, whose moments are a node's own during a round and may be
fused.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from optim.adamw import integer_power, rounded_sqrt
from optim.exact import exact_product
from optim.lordo.rotation import LARGEST
from optim.lordo.shapes import LONGEST


def product(left: Tensor, right: Tensor) -> Tensor:
    """The exact product of two fp32 host tensors, a new one."""
    return torch.from_numpy(exact_product(np.ascontiguousarray(left), np.ascontiguousarray(right)))


def project(basis: Tensor, gradient: Tensor) -> Tensor:
    """``Q^T G``, alike everywhere."""
    return product(basis.T, gradient.clamp(-LARGEST, LARGEST))


def subspace_step(
    projected: Tensor,
    whole: Tensor | None,
    *,
    basis: Tensor,
    first: Tensor,
    second: Tensor,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    omega: float,
    mu: float,
) -> Tensor:
    """Update the moments and return what to subtract from the weights.

    Args:
        projected: ``Q^T G``, fp32 host ``[r, n]``.
        whole: G, ``[m, n]`` with ``m <= n``; needed for ``omega < 1``.
        basis, first, second: Q ``[m, r]``, u and v ``[r, n]``; the moments are updated in place.
        step: number of this update, from 1.
        lr, betas, eps, omega, mu: see :class:`optim.lordo.inner.LowRankOptions`.

    Returns:
        A new tensor ``[m, n]``.
    """
    beta1, beta2 = betas
    first.mul_(beta1).add_(projected.mul(1.0 - beta1))
    second.mul_(beta2).add_(projected.mul(1.0 - beta2).mul_(projected))
    corrected = second.mul(1.0 / (1.0 - integer_power(beta2, step)))
    direction = first.mul(1.0 / (1.0 - integer_power(beta1, step)))
    direction.div_(rounded_sqrt(corrected).add_(eps))
    direction.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)  # where eps is 0 and v too
    update = product(basis, direction.clamp_(-LARGEST, LARGEST)).mul_(lr * omega)
    if omega < 1.0:
        if whole is None:
            raise ValueError("an omega below 1 needs the whole gradient")
        divisor = torch.maximum(_column_rms(corrected).add_(eps), _column_rms(whole.square()).div_(LONGEST))
        full = whole.mul(lr * (1.0 - omega) / mu).div_(divisor)
        update.add_(full.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))
    return update


def _column_rms(squares: Tensor) -> Tensor:
    """Root of the mean over the rows, ``[n]``."""
    rows = squares.shape[0]
    total = product(torch.ones(1, rows), squares.clamp(max=LARGEST))
    return rounded_sqrt(total.view(-1).mul_(1.0 / rows))
