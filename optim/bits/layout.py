"""The packed layout of sign votes, and the hash that exact zeros vote.

Element ``i`` of a flattened tensor is bit ``i & 7`` of byte ``i >> 3``, least significant first; 1 stands for
+1 and 0 for -1. This is ``numpy.packbits(..., bitorder="little")``, and bit ``i & 63`` of the little-endian
64-bit word ``i >> 6``. A packed tensor is padded with zero bits to a whole cache line of 512 elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Rows = Sequence[Bytes] | Bytes  # M votes of one length, or an array of shape (M, nbytes)

LINE = 512  # elements; every packed tensor or bucket starts at a multiple of it
LINE_BYTES = LINE // 8
MAX_WEIGHT = 65535  # of one vote: weights travel as u16
MAX_TOTAL_WEIGHT = 2**31 - 1  # of one tally

_MASK = 2**64 - 1
_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def packed_nbytes(n: int) -> int:
    """Bytes of ``n`` packed signs: ``ceil(n / 512) * 64``. Raises ``ValueError`` for a negative ``n``."""
    if n < 0:
        raise ValueError(f"a tensor cannot have {n} elements")
    return -(-n // LINE) * LINE_BYTES


def splitmix64(state: int) -> int:
    """Output of the SplitMix64 generator (Steele, Lea and Flood, OOPSLA 2014) at ``state`` modulo 2^64."""
    z = (state + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK
    return z ^ (z >> 31)


def hash_words(seed: int, first: int, count: int) -> NDArray[np.uint64]:
    """``splitmix64(seed + w)`` for the words ``w = first, ..., first + count - 1``, little-endian u64."""
    z = np.arange(count, dtype=np.uint64)
    z += np.uint64((seed + first + _GAMMA) & _MASK)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MULTIPLIER_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MULTIPLIER_2)
    z ^= z >> np.uint64(31)
    return z.astype("<u8", copy=False)


def zero_seed(round_index: int, tensor_index: int) -> int:
    """Seed of the bits that the zeros of one tensor vote in one round.

    ``splitmix64(splitmix64(round_index) + tensor_index)``: every node that knows the round and the tensor's
    place in the bucket table finds the same 64-bit seed. Raises ``ValueError`` for a negative index.
    """
    if round_index < 0 or tensor_index < 0:
        raise ValueError(f"round {round_index} and tensor {tensor_index} must not be negative")
    return splitmix64((splitmix64(round_index & _MASK) + tensor_index) & _MASK)
