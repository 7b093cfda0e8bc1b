"""int8 and int4 with a scale for each block of consecutive entries.

A code ``q`` is ``x / scale`` rounded to the nearest, ties to even, and stands for ``q * scale``. The scale is
the block's largest magnitude over 127 or 7, cut to 17 significant bits: then ``q * scale`` is exact in
float32, no code leaves its range, nothing overflows, and what was decoded is encoded to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from optim.codecs.base import (
    F32,
    PIECE,
    U8,
    Codec,
    scales_at,
    scales_problem,
    storable,
)
from protos.codecs import SCALE_BYTES

I8 = NDArray[np.int8]

_CUT = np.uint32(0xFFFFFF80)  # keeps 17 significant bits of a float32


def block_scales(blocks: F32, largest_code: int) -> F32:
    """Scale of each row of ``blocks``."""
    largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    scales: F32 = storable(largest / np.float32(largest_code))
    return (scales.view(np.uint32) & _CUT).view(np.float32)


def _codes(blocks: F32, scales: F32) -> I8:
    """Codes of the entries of ``blocks``; 0 where the scale is 0."""
    ratios = blocks / np.where(scales > 0, scales, np.float32(np.inf))[:, None]
    return np.rint(ratios, out=ratios).astype(np.int8)


class _Blockwise(Codec):
    """Scales of all blocks, then codes; the last block may be short."""

    @property
    def _blocks(self) -> int:
        return -(-self.size // self.spec.number)

    def _pieces(self) -> Iterator[tuple[slice, slice, int]]:
        """``(blocks, entries, length of a block)`` in pieces; the short block comes alone."""
        length = self.spec.number
        whole = self.size // length
        step = max(1, PIECE // length)
        for start in range(0, whole, step):
            stop = min(start + step, whole)
            yield slice(start, stop), slice(start * length, stop * length), length
        if whole * length < self.size:
            yield slice(whole, whole + 1), slice(whole * length, self.size), self.size - whole * length


class Int8(_Blockwise):
    """``int8:B``: little-endian float32 scales, then a signed byte for each entry, -127 to 127."""

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        flat, codes = x.reshape(-1), out[SCALE_BYTES * self._blocks :].view(np.int8)
        scales = scales_at(out, 0, self._blocks)
        for blocks, entries, length in self._pieces():
            part = flat[entries].reshape(-1, length)
            scale = block_scales(part, 127)
            scales[blocks] = scale
            codes[entries] = _codes(part, scale).reshape(-1)

    def _decode(self, data: U8, out: F32) -> None:
        flat, codes = out.reshape(-1), data[SCALE_BYTES * self._blocks :].view(np.int8)
        scales = scales_at(data, 0, self._blocks)
        for blocks, entries, length in self._pieces():
            part = flat[entries].reshape(-1, length)
            part[:] = codes[entries].reshape(-1, length)
            part *= scales[blocks, None]

    def _problem(self, data: U8) -> str:
        found = scales_problem(scales_at(data, 0, self._blocks), 127)
        if not found and bool((data[SCALE_BYTES * self._blocks :] == 0x80).any()):
            found = "a code is -128, outside -127 to 127"
        return found


_NIBBLES = np.array([code if code < 8 else code - 16 for code in range(16)], np.float32)
_PAIRS = np.stack([_NIBBLES[np.arange(256) & 15], _NIBBLES[np.arange(256) >> 4]], axis=1)
_BAD_PAIR = (_PAIRS == -8).any(axis=1)


class Int4(_Blockwise):
    """``int4:B``: little-endian float32 scales, then two entries a byte, the first in the low half, in two's
    complement from -7 to 7."""

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        flat, packed = x.reshape(-1), out[SCALE_BYTES * self._blocks :]
        scales = scales_at(out, 0, self._blocks)
        for blocks, entries, length in self._pieces():  # a block is even: each piece begins with a whole byte
            part = flat[entries].reshape(-1, length)
            scale = block_scales(part, 7)
            scales[blocks] = scale
            codes = _codes(part, scale).reshape(-1).view(np.uint8) & np.uint8(15)
            first, second = codes[0::2], codes[1::2]
            target = packed[entries.start // 2 : entries.start // 2 + first.size]
            target[:] = first
            target[: second.size] |= second << np.uint8(4)

    def _decode(self, data: U8, out: F32) -> None:
        flat, packed = out.reshape(-1), data[SCALE_BYTES * self._blocks :]
        scales = scales_at(data, 0, self._blocks)
        for blocks, entries, length in self._pieces():
            count = entries.stop - entries.start
            pairs = packed[entries.start // 2 : (entries.stop + 1) // 2]
            codes = np.take(_PAIRS, pairs, axis=0).reshape(-1)[:count].reshape(-1, length)
            np.multiply(codes, scales[blocks, None], out=flat[entries].reshape(-1, length))

    def _problem(self, data: U8) -> str:
        found = scales_problem(scales_at(data, 0, self._blocks), 7)
        if not found and bool(np.take(_BAD_PAIR, data[SCALE_BYTES * self._blocks :]).any()):
            found = "a code is -8, outside -7 to 7"
        return found
