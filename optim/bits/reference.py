"""The slow form of every function here: it reads like the definition, and the tests hold the others to it.

Majority vote of signs: signSGD with majority vote, arXiv 1810.05291. Element ``i`` of a vote is the unpacked
value +1 or -1; nothing here works on packed words or in chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optim.bits.layout import packed_nbytes, splitmix64

INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}


def signs(patterns: NDArray[Any], dtype: str, seed: int) -> tuple[NDArray[np.int8], bool]:
    """The +-1 that each number votes, and whether all numbers are finite.

    ``patterns``: the numbers' bit patterns, flat, u32 for ``"float32"`` and u16 for ``"bfloat16"`` and
    ``"float16"``. A number above zero votes +1 and one below zero -1, subnormal and infinite ones too. NaN
    votes -1. A zero of either sign at element i votes bit ``i & 63`` of ``splitmix64(seed + (i >> 6))``.
    """
    infinity = INFINITY[dtype]
    sign_bit = 1 << (8 * patterns.itemsize - 1)
    votes, finite = np.empty(patterns.size, np.int8), True
    for i, pattern in enumerate(patterns.tolist()):
        magnitude, negative = pattern & (sign_bit - 1), pattern >= sign_bit
        if magnitude > infinity:  # NaN
            votes[i] = -1
        elif magnitude == 0:
            votes[i] = 1 if splitmix64(seed + (i >> 6)) >> (i & 63) & 1 else -1
        else:
            votes[i] = -1 if negative else 1
        finite = finite and magnitude < infinity
    return votes, finite


def pack(votes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """The packed bytes of votes +-1, padded with zero bits to a multiple of 512 elements."""
    packed = np.zeros(packed_nbytes(votes.size), np.uint8)
    for i in np.flatnonzero(votes > 0).tolist():
        packed[i >> 3] |= 1 << (i & 7)
    return packed


def unpack(bits: NDArray[np.uint8], n: int) -> NDArray[np.int8]:
    """The first ``n`` votes, +-1."""
    return np.array([1 if bits[i >> 3] >> (i & 7) & 1 else -1 for i in range(n)], np.int8)


def majority(
    votes: Sequence[NDArray[np.int8]], weights: Sequence[int] | None = None, *, casting: int
) -> NDArray[np.int8]:
    """Sign of the weighted sum of the votes; where the sum is zero, the vote of voter ``casting``."""
    of_voter = [1] * len(votes) if weights is None else weights
    total = np.zeros(votes[0].size, np.int64)
    for vote, weight in zip(votes, of_voter, strict=True):
        total += weight * vote.astype(np.int64)
    return np.where(total > 0, 1, np.where(total < 0, -1, votes[casting])).astype(np.int8)


def applied(
    w: NDArray[np.float32], votes: NDArray[np.int8], *, step: float, decay: float = 1.0
) -> NDArray[np.float32]:
    """``round(w * decay) - step * vote``: product and difference each rounded to float32."""
    product = w * np.float32(decay)
    return np.asarray(product - np.float32(step) * votes.astype(np.float32), np.float32)
