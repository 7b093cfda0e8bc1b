"""Tier 1: numba kernels on CPU memory, as fast as hand-written SIMD.

The functions mirror :mod:`optim.bits.plain` and give the same bits. Importing this module compiles the
kernels, or takes them from numba's cache on disk; it raises ``ImportError`` where numba is not installed and
``RuntimeError`` on a machine whose byte order the packed words do not have.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

if sys.byteorder != "little":  # the kernels see the packed bytes as native 64-bit words
    raise RuntimeError("the numba backend of optim.bits needs a little-endian machine")

from optim.bits import simd_signs, simd_tally
from optim.bits.layout import LINE_BYTES, Rows

NAME = "numba"

CACHE_BYTES = 2 << 20  # an output larger than this is written around the cache
TILE_BYTES = 4096  # of each counter plane that is worked on at once
PLANES_BYTES = 40960  # of all planes of a tile: they should stay in the first-level cache
_ALL_ONES = 2**64 - 1


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _around(out: NDArray[Any]) -> bool:
    return out.nbytes >= CACHE_BYTES and _address(out) % LINE_BYTES == 0


def pack(patterns: NDArray[Any], infinity: int, seed: int, out: NDArray[np.uint8]) -> bool:
    """Pack bit patterns (u16 or u32, flat) into ``out``; returns True if all are finite."""
    kernel = simd_signs.pack32 if patterns.itemsize == 4 else simd_signs.pack16
    unbounded = kernel(_address(patterns), patterns.size, _address(out), seed, infinity)
    out[-(-patterns.size // 64) * 8 :] = 0
    return int(unbounded) == 0


def unpack(bits: NDArray[np.uint8], out: NDArray[Any], plus: int, minus: int) -> None:
    """Write pattern ``plus`` or ``minus`` (of the item size of ``out``, flat) for every bit."""
    kernel = {4: simd_signs.unpack32, 2: simd_signs.unpack16, 1: simd_signs.unpack8}[out.itemsize]
    kernel(_address(bits), out.size, _address(out), plus, minus, _around(out))


def apply_(w: NDArray[np.float32], bits: NDArray[np.uint8], step: np.float32, decay: np.float32) -> None:
    """``w <- round(w * decay) - step * sign``, in place."""
    simd_signs.apply32(_address(w), w.size, _address(bits), step, decay)


def _threshold(planes: int, total: int) -> int:
    """What must be added to a counter of ``planes`` bits for its highest bit to say "more than half"."""
    return (1 << (planes - 1)) - (total >> 1) - 1


def _stride(planes: int) -> int:
    return min(TILE_BYTES, max(LINE_BYTES, PLANES_BYTES // planes // LINE_BYTES * LINE_BYTES))


def _groups(votes: Rows, weights: Sequence[int] | None) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Addresses of the rows by bit of their weight, and where the group of each bit ends."""
    if isinstance(votes, np.ndarray):
        offsets = np.arange(len(votes), dtype=np.int64) * votes.strides[0]
        rows = (offsets + _address(votes)).astype(np.uint64)
    else:
        rows = np.array([simd_tally.address(vote) for vote in votes], np.uint64)
    if weights is None:
        return rows, np.array([len(rows)], np.int64)
    of_row = np.asarray(weights, np.int64)
    chosen = [rows[(of_row >> bit) & 1 == 1] for bit in range(int(of_row.max()).bit_length())]
    return np.concatenate(chosen), np.cumsum([len(group) for group in chosen], dtype=np.int64)


def tally(
    votes: Rows,
    weights: Sequence[int] | None,
    casting: int,
    out: NDArray[np.uint8],
) -> None:
    """Weighted majority of equally long rows into ``out``; a tie takes the bit of row ``casting``."""
    rows, ends = _groups(votes, weights)
    total = len(votes) if weights is None else sum(weights)
    cast = _address(votes[casting])
    if len(ends) == 1 and len(rows) <= 8:
        top, bias = 0, _threshold(4, total)
    else:
        top = total.bit_length()
        bias = _threshold(top, total)
    ties = 0 if total % 2 else _ALL_ONES
    stride = _stride(max(top, 1))
    simd_tally.tally(rows, ends, top, bias, cast, ties, _address(out), out.nbytes, stride, _around(out))


class Counters:
    """Bit-sliced counters that votes are added to one by one or in groups."""

    def __init__(self, nbytes: int, planes: int) -> None:
        self._nbytes, self._planes = nbytes, planes
        self._stride = _stride(planes)
        tiles = -(-nbytes // self._stride)
        self._memory = np.zeros(tiles * self._stride * planes + LINE_BYTES, np.uint8)
        self._base = -(-_address(self._memory) // LINE_BYTES) * LINE_BYTES

    def add(self, votes: Rows, weights: Sequence[int] | None) -> None:
        """Add rows to the counters."""
        rows, ends = _groups(votes, weights)
        simd_tally.add(rows, ends, self._base, self._planes, self._nbytes, self._stride)

    def finish(self, total: int, cast: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
        """Write the majority of ``total`` votes, ties as in ``cast``."""
        bias, ties = _threshold(self._planes, total), 0 if total % 2 else _ALL_ONES
        simd_tally.finish(
            self._base,
            self._planes,
            bias,
            _address(cast),
            ties,
            _address(out),
            self._nbytes,
            self._stride,
            _around(out),
        )

    def reset(self) -> None:
        """Set all counters to zero."""
        self._memory[:] = 0
