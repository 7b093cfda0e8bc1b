"""Tier 0: the same functions on numpy alone, in chunks that stay in the cache.

Arrays are flat and contiguous; numbers come as their bit patterns (u16 or u32), so that flush-to-zero cannot
change a vote. Arguments are checked by the callers in :mod:`optim.bits.signs` and :mod:`optim.bits.votes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optim.bits.layout import Bytes, Rows, hash_words

NAME = "numpy"


ELEMENTS = 65536  # of a tensor worked on at once
CHUNK_BYTES = 65536  # of a vote worked on at once


def pack(patterns: NDArray[Any], infinity: int, seed: int, out: Bytes) -> bool:
    """Pack bit patterns (u16 or u32, flat) into ``out``; returns True if all are finite."""
    kind = patterns.dtype.type
    one, magnitude, limit = kind(1), kind(2 ** (8 * patterns.itemsize - 1) - 1), kind(infinity)
    n = patterns.size
    scratch = np.empty(min(n, ELEMENTS), patterns.dtype)
    flags = np.empty(min(n, ELEMENTS), np.bool_)
    finite = True
    for start in range(0, n, ELEMENTS):
        x = patterns[start : start + ELEMENTS]
        work, positive = scratch[: x.size], flags[: x.size]
        np.bitwise_and(x, magnitude, out=work)
        finite = finite and bool(work.max() < limit)
        has_zero = bool(work.min() == 0)
        np.subtract(x, one, out=work)
        np.less(work, limit, out=positive)  # 1 <= pattern <= infinity, because 0 - 1 wraps to the largest
        if has_zero:
            words = hash_words(seed, start // 64, -(-x.size // 64))
            chosen = np.unpackbits(words.view(np.uint8), bitorder="little")[: x.size].view(np.bool_)
            positive |= (np.bitwise_and(x, magnitude, out=work) == 0) & chosen
        packed = np.packbits(positive, bitorder="little")
        out[start // 8 : start // 8 + packed.size] = packed
    out[-(-n // 8) :] = 0
    return finite


def _table(kind: np.dtype[Any], plus: Any, minus: Any) -> NDArray[Any]:
    """The eight elements of every byte: shape (256, 8)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.array([minus, plus], kind)[bits]


def _expand(table: NDArray[Any], bits: Bytes, out: NDArray[Any]) -> None:
    """Write the elements of ``bits`` into ``out``, which may end inside the last byte."""
    whole = out.size // 8
    np.take(table, bits[:whole], axis=0, out=out[: whole * 8].reshape(-1, 8), mode="clip")
    if out.size % 8:
        out[whole * 8 :] = table[bits[whole]][: out.size % 8]


def unpack(bits: Bytes, out: NDArray[Any], plus: int, minus: int) -> None:
    """Write pattern ``plus`` or ``minus`` (of the item size of ``out``, flat) for every bit."""
    table = _table(out.dtype, plus, minus)
    for start in range(0, out.size, ELEMENTS):
        part = out[start : start + ELEMENTS]
        _expand(table, bits[start // 8 : -(-(start + part.size) // 8)], part)


def apply_(w: NDArray[np.float32], bits: Bytes, step: np.float32, decay: np.float32) -> None:
    """``w <- round(w * decay) - step * sign``, in place."""
    table = _table(w.dtype, step, -step)
    signed = np.empty(min(w.size, ELEMENTS), np.float32)
    with np.errstate(all="ignore"):  # an overflow shows in the weights, as it does on every backend
        for start in range(0, w.size, ELEMENTS):
            part = w[start : start + ELEMENTS]
            move = signed[: part.size]
            _expand(table, bits[start // 8 : -(-(start + part.size) // 8)], move)
            np.multiply(part, decay, out=part)
            np.subtract(part, move, out=part)


class _Adder:
    """Carry-save addition of bit rows: of three that wait at a power of two, a sum and a carry are made."""

    def __init__(self, size: int, levels: int) -> None:
        self._size = size
        self._waiting: list[list[tuple[Bytes, bool]]] = [
            [] for _ in range(levels)
        ]  # (row, may be overwritten)
        self._free: list[Bytes] = []
        self._xor = np.empty(size, np.uint8)

    def push(self, row: Bytes, level: int, owned: bool = False) -> None:
        """Add a row of weight ``2**level``."""
        waiting = self._waiting[level]
        waiting.append((row, owned))
        if len(waiting) == 3:
            self._combine(level)

    def _combine(self, level: int) -> None:
        waiting = self._waiting[level]
        (a, _), (b, _), (c, _) = waiting
        parity, carry, xor = self._take(), self._take(), self._xor
        np.bitwise_xor(a, b, out=xor)
        np.bitwise_and(a, b, out=carry)
        np.bitwise_xor(xor, c, out=parity)
        np.bitwise_and(xor, c, out=xor)
        np.bitwise_or(carry, xor, out=carry)
        self._free += [row for row, owned in waiting if owned]
        self._waiting[level] = [(parity, True)]
        if level + 1 < len(self._waiting):
            self.push(carry, level + 1, owned=True)
        else:
            self._free.append(carry)  # the caller's bound on the total says that it is zero

    def _take(self) -> Bytes:
        return self._free.pop() if self._free else np.empty(self._size, np.uint8)

    def planes(self) -> list[Bytes]:
        """Settle all carries and return one row for each power of two, zero rows included."""
        zero = np.zeros(self._size, np.uint8)
        settled = []
        for level, waiting in enumerate(self._waiting):
            if len(waiting) == 2:
                waiting.append((zero, False))
                self._combine(level)
            settled.append(self._waiting[level][0][0] if self._waiting[level] else zero)
        return settled


def _push(adder: _Adder, row: Bytes, weight: int) -> None:
    for level in range(weight.bit_length()):
        if weight >> level & 1:
            adder.push(row, level)


def _decide(planes: Sequence[Bytes], total: int, cast: Bytes, out: Bytes) -> None:
    """Write the bits of "more than half, or half and the casting vote".

    Plane ``k``, the highest, of ``count + 2**k - (total >> 1) - 1`` says "more than half"; only the carries
    of that sum are needed. An even total gets the casting vote once more, as the first carry.
    """
    *low, high = planes
    bias = (1 << len(low)) - (total >> 1) - 1
    carry = cast.copy() if total % 2 == 0 else np.zeros_like(cast)
    for level, plane in enumerate(low):
        (np.bitwise_or if bias >> level & 1 else np.bitwise_and)(carry, plane, out=carry)
    np.bitwise_or(carry, high, out=out)


def tally(votes: Rows, weights: Sequence[int] | None, casting: int, out: Bytes) -> None:
    """Weighted majority of equally long rows into ``out``; a tie takes the bit of row ``casting``."""
    of_row = [1] * len(votes) if weights is None else weights
    total = sum(of_row)
    for start in range(0, out.size, CHUNK_BYTES):
        chunk = slice(start, min(start + CHUNK_BYTES, out.size))
        adder = _Adder(chunk.stop - start, total.bit_length())
        for vote, weight in zip(votes, of_row, strict=True):
            _push(adder, vote[chunk], weight)
        _decide(adder.planes(), total, votes[casting][chunk], out[chunk])


class Counters:
    """Bit-sliced counters that votes are added to one by one or in groups."""

    def __init__(self, nbytes: int, planes: int) -> None:
        self._planes = np.zeros((planes, nbytes), np.uint8)

    def add(self, votes: Rows, weights: Sequence[int] | None) -> None:
        """Add rows to the counters."""
        of_row = [1] * len(votes) if weights is None else weights
        levels, nbytes = self._planes.shape
        for start in range(0, nbytes, CHUNK_BYTES):
            chunk = slice(start, min(start + CHUNK_BYTES, nbytes))
            adder = _Adder(chunk.stop - start, levels)
            for level in range(levels):
                adder.push(self._planes[level, chunk], level)
            for vote, weight in zip(votes, of_row, strict=True):
                _push(adder, vote[chunk], weight)
            for level, plane in enumerate(adder.planes()):
                self._planes[level, chunk] = plane

    def finish(self, total: int, cast: Bytes, out: Bytes) -> None:
        """Write the majority of ``total`` votes, ties as in ``cast``."""
        for start in range(0, out.size, CHUNK_BYTES):
            chunk = slice(start, min(start + CHUNK_BYTES, out.size))
            _decide([plane[chunk] for plane in self._planes], total, cast[chunk], out[chunk])

    def reset(self) -> None:
        """Set all counters to zero."""
        self._planes[:] = 0
