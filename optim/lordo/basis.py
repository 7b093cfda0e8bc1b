"""The basis of a low-rank optimizer: leading singular directions of a matrix, carried from round to round.

Computed at one place for all nodes, which then receive its bytes: eigenvectors differ in sign and, between
equal singular values, in direction from one linear algebra library to the next, and moments in different
bases must not be averaged. NumPy only.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from optim.lordo.shapes import basis_shape

F32 = NDArray[np.float32]
_Array = NDArray[Any]

# A fresh decomposition is made when the previous basis holds less than this share of the energy that one step
# of subspace iteration finds: the subspace has turned too far for one step to follow.
STALE: Final = 0.5
# Directions whose energy is below this share of the whole cannot be told from fp32 rounding: they stay as
# they were.
RESOLUTION: Final = 1e-7
ORTHONORMAL: Final = 1e-6  # largest entry of Q^T Q - I that is accepted
DOUBLE_SIDE: Final = 512  # shorter side up to which a fresh decomposition runs in fp64


def compute_basis(mean: F32, rank: int, previous: F32 | None) -> F32:
    """Orthonormal basis of the (approximately) leading ``rank`` directions of the shorter side of ``mean``.

    With a previous basis Q it makes one step of subspace iteration, ``orth(A (Q^T A)^T)``, 30 to 300 times
    cheaper than a singular value decomposition and within a few per cent of its energy while the directions
    turn slowly. Without one, or where Q holds less than half of the energy that this step finds, the
    eigenvectors of the smaller Gram matrix are taken, in order of falling energy. The entry of largest
    magnitude in each column is positive.

    Args:
        mean: finite, ``[m, n]``; more dimensions are seen as the first by all others. Left directions are
            taken for ``m <= n``, right ones otherwise (GaLore, arXiv 2403.03507).
        rank: number of directions, at least 1; clamped to ``min(m, n)``.
        previous: the basis so far, orthonormal, ``[min(m, n), min(rank, m, n)]``.

    Returns:
        fp32 of the shape of ``previous``, orthonormal to 1e-6 whatever the rank of ``mean``: directions that
        it does not have are completed, from ``previous`` where there is one. A zero matrix returns
        ``previous``.

    Raises:
        ValueError: for values that are not finite and shapes that do not fit.
    """
    if mean.ndim < 2 or mean.size == 0 or rank < 1:
        raise ValueError(f"a basis needs a matrix and a rank of at least 1, not {mean.shape} and rank {rank}")
    mean = mean.reshape(mean.shape[0], -1)
    wide = mean if mean.shape[0] <= mean.shape[1] else mean.T
    shape = basis_shape(mean.shape, rank)
    if previous is not None and previous.shape != shape:
        raise ValueError(f"the previous basis has the shape {previous.shape}, not {shape}")
    largest = float(np.abs(wide).max())
    if not np.isfinite(largest):
        raise ValueError("the matrix whose basis is wanted holds NaN or Inf")
    if largest == 0.0:
        return np.eye(*shape, dtype=np.float32) if previous is None else previous.astype(np.float32)
    # An exact power of two brings the largest entry near 1: energies then neither overflow nor vanish.
    wide = np.ldexp(wide, -int(np.frexp(largest)[1])).astype(np.float32, copy=False)
    basis = None if previous is None else _follow(wide, previous.astype(np.float32, copy=False))
    return _signed(_decompose(wide, shape[1]) if basis is None else basis)


def captured_energy(matrix: F32, basis: F32) -> float:
    """Share of the squared Frobenius norm of ``matrix`` that lies in the span of ``basis``; 1 for a zero
    matrix."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    total = _energy(wide)
    return _energy(basis.T @ wide) / total if total else 1.0


def overlap(left: F32, right: F32) -> float:
    """``||left^T right||_F^2 / rank``: 1 for two bases of one subspace, 0 for orthogonal ones."""
    product = left.astype(np.float64).T @ right.astype(np.float64)
    return _energy(product) / float(right.shape[1])


def _follow(wide: F32, previous: F32) -> _Array | None:
    """One step of subspace iteration, or ``None`` if the previous basis has become useless."""
    projected = previous.T @ wide  # faster than wide.T @ previous by the shapes that BLAS prefers
    held = _energy(projected)
    if held == 0.0:
        return None
    image = (wide @ projected.T).astype(np.float64)
    # With B = Q'^T A and P = Q^T A, B P^T has the singular values of the image; their sum is at most
    # ||B|| ||P|| (Cauchy and Schwarz), which bounds the energy of the new basis from below without computing
    # B.
    squares = np.linalg.eigvalsh(image.T @ image)
    found = (float(np.sqrt(squares.clip(0.0)).sum()) ** 2) / held
    if held < STALE * found:
        return None
    # The shift changes no eigenvector, keeps the image of full rank, and directions without energy in place.
    shifted: _Array = image + (RESOLUTION * _energy(wide)) * previous
    return _orthonormal(shifted)


def _decompose(wide: F32, rank: int) -> _Array:
    matrix: _Array = wide.astype(np.float64) if wide.shape[0] <= DOUBLE_SIDE else wide
    _, vectors = np.linalg.eigh(matrix @ matrix.T)
    return _orthonormal(vectors[:, ::-1][:, :rank].astype(np.float64))


def _orthonormal(columns: _Array) -> _Array:
    """Orthonormal basis of fp64 columns, in their order: CholeskyQR2 (Fukaya et al., 2014), or Householder QR
    where the columns are too close to dependent."""
    norms = np.sqrt(np.square(columns).sum(axis=0))
    if norms.min() > 0.0:
        basis: _Array = columns / norms
        try:
            for _ in range(2):
                factor = np.linalg.cholesky(basis.T @ basis)
                basis = np.linalg.solve(factor, basis.T).T
        except np.linalg.LinAlgError:
            pass
        else:
            if np.abs(basis.T @ basis - np.eye(basis.shape[1])).max() < ORTHONORMAL:
                return basis
    return np.linalg.qr(columns)[0]


def _signed(basis: _Array) -> F32:
    """fp32, with the entry of largest magnitude of every column positive."""
    rows = np.abs(basis).argmax(axis=0)
    signs = np.where(basis[rows, np.arange(basis.shape[1])] < 0, -1.0, 1.0)
    return np.ascontiguousarray(basis * signs, dtype=np.float32)


def _energy(matrix: _Array) -> float:
    """Squared Frobenius norm; rows are added in fp64."""
    rows: _Array = np.einsum("ij,ij->i", matrix, matrix)
    return float(rows.sum(dtype=np.float64))
