"""Sizes of the state of a low-rank optimizer."""

from __future__ import annotations

from typing import Final

from protos.codecs import matrix_shape
from protos.methods import Direction

# Largest RMS of a column of the full-rank term, before omega and mu; that of full-rank Adam is 1 at most, and
# so is this one's where the subspace sees its share of the column. Without a bound a column that lies outside
# of it, whose v is 0, would be divided by eps.
LONGEST: Final = 10.0


def basis_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Shape of the basis of a matrix: its shorter side by the rank, which is at most that side."""
    short = min(matrix_shape(shape))
    return short, min(rank, short)


def moment_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Shape of a projected gradient, and so of a moment: the clamped rank by the longer side."""
    rows, columns = matrix_shape(shape)
    return min(rank, rows, columns), max(rows, columns)


def state_elements(
    shape: tuple[int, ...], rank: int, *, direction: Direction = "adam", error_feedback: bool = False
) -> int:
    """Elements of optimizer state beside a matrix that local steps read and write.

    For ``m <= n`` (or the transpose) they are ``2 r n + r m``, without second moment ``r n + r m``, and
    ``m n`` more with error feedback; Adam has ``2 m n``. At ``r = m / 8`` the moments are an eighth of
    Adam's; with the basis the state is 5.3 times smaller than Adam's for a square matrix and 7.1 times for
    ``n = 4 m``, without second moment 8 and 12.8 times. The copy of the moments that all nodes share, and
    the weights of the last round, lie in host memory.
    """
    (short, clamped), (_, long) = basis_shape(shape, rank), moment_shape(shape, rank)
    moments = 1 if direction == "muon" else 2
    return clamped * short + moments * clamped * long + (short * long if error_feedback else 0)
