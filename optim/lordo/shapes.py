"""Sizes of the state of a low-rank optimizer."""

from __future__ import annotations

from typing import Final

from protos.codecs import matrix_shape
from protos.methods import Direction

# Largest RMS of a column of the full-rank term, before omega and mu; that of full-rank Adam is 1 at most, and
# so is this one's where the subspace sees its share of the column. Without a bound a column that lies outside
# of it, whose v is 0, would be divided by eps.
LONGEST: Final = 10.0


AN_EIGHTH: Final = 0  # as rank: an eighth of each matrix's shorter side


def rank_of(shape: tuple[int, ...], rank: int) -> int:
    """The rank that a matrix has: at most its shorter side; ``AN_EIGHTH`` of that, and at least 1."""
    short = min(matrix_shape(shape))
    return max(1, short // 8) if rank == AN_EIGHTH else min(rank, short)


def basis_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Shape of the basis of a matrix: its shorter side by the rank."""
    return min(matrix_shape(shape)), rank_of(shape, rank)


def moment_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int]:
    """Shape of a projected gradient, and so of a moment: the rank by the longer side."""
    return rank_of(shape, rank), max(matrix_shape(shape))


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
