"""LDAdam's subspace, which turns in every step (Robert et al., arXiv 2410.16103).

The strongest low-rank baseline. Its basis follows a mixture of momentum and gradient, and what projection and
rotation lose comes back through an error feedback the size of the matrix. The products here are ordinary
ones: replicas are bit-identical only on equal hardware, libraries and thread counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from optim.adamw import integer_power
from optim.lordo.basis import compute_basis
from optim.lordo.rotation import rotate_moments

F32 = NDArray[np.float32]


def turn_and_project(
    gradient: F32,
    *,
    basis: F32,
    first: F32,
    second: F32,
    error: F32,
    step: int,
    betas: tuple[float, float],
) -> F32:
    """Turn basis and moments towards the gradient and project it; all but ``gradient`` is updated in place.

    With ``A = G + E`` and ``B = b1 Q u / c1 + (1 - b1) A`` the new basis is ``Q' = QR(B B^T Q)`` (the
    singular vectors of A at the first step), and the error that is kept
    ``E = A - Q' Q'^T A + b1 / (1 - b1) (Q u - Q' R u)``.

    Args:
        gradient: G, ``[m, n]`` with ``m <= n``.
        basis, first, second, error: Q ``[m, r]``, u and v ``[r, n]``, E ``[m, n]``.
        step: updates that the moments have seen.
        betas: of the moments; the first is the share of the momentum in B too.

    Returns:
        ``Q'^T A``, ``[r, n]``.
    """
    beta1 = betas[0]
    signal = gradient + error
    momentum = basis @ first
    if step == 0:
        turned = compute_basis(signal, basis.shape[1], None)
    else:
        correction = np.float32(beta1 / (1.0 - integer_power(beta1, step)))
        buffer = momentum * correction + signal * np.float32(1.0 - beta1)
        turned = np.linalg.qr(buffer @ (basis.T @ buffer).T)[0].astype(np.float32)
    moments = rotate_moments(first, second, basis, turned, step=step, betas=betas)
    basis[:], first[:], second[:] = turned, *moments
    projected: F32 = basis.T @ signal
    error[:] = signal - basis @ projected
    error += (momentum - basis @ first) * np.float32(beta1 / (1.0 - beta1))
    return projected
