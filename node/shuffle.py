"""A seeded permutation of 0 … size - 1 that needs no table, whatever the size.

A Feistel network over pairs of digits in base ceil(sqrt(size)) permutes a range slightly larger than asked
for; whoever lands outside walks on through the network until inside ("Ciphers with Arbitrary Finite
Domains", Black and Rogaway 2002). :func:`permute_one` reads like the definition, :func:`permute` is the same
for arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

import numpy as np
import numpy.typing as npt

ROUNDS = 6
_MASK = (1 << 64) - 1


def draw(count: int, *entropy: int) -> list[int]:
    """``count`` 64-bit words from integers >= 0 such as seed and epoch, by NumPy's SeedSequence."""
    return [int(word) for word in np.random.SeedSequence(entropy).generate_state(count, np.uint64)]


def permute_one(index: int, size: int, keys: Sequence[int]) -> int:
    """Where ``index`` (0 <= index < size) goes; ``keys`` are ``ROUNDS`` words. Reference form."""
    base = isqrt(size - 1) + 1
    while True:
        left, right = divmod(index, base)
        for key in keys:
            left, right = right, (left + _mix(right ^ key)) % base
        index = left * base + right
        if index < size:
            return index


def _mix(word: int) -> int:
    """Finaliser of splitmix64 (Steele, Lea and Flood 2014)."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return (word ^ (word >> 31)) >> 1


def permute(indices: npt.NDArray[np.int64], size: int, keys: Sequence[int]) -> npt.NDArray[np.int64]:
    """Where each of ``indices`` (0 <= index < size < 2^62) goes: int64 of the same length."""
    base = np.uint64(isqrt(size - 1) + 1)
    out = indices.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = np.divmod(out[walking], base)
        for key in keys:
            left, right = right, (left + _mix_all(right ^ np.uint64(key))) % base
        out[walking] = left * base + right
        walking = walking[out[walking] >= size]
    return out.astype(np.int64)


def _mix_all(word: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = (word ^ (word >> np.uint64(31))) >> np.uint64(1)
    return mixed
