"""1bit and 1bit-row: signs with a mean magnitude (signSGD with error feedback, arXiv 1901.09847).

The signs are packed as those of a vote, see :mod:`optim.bits.layout`; a zero takes one by the seed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from optim.bits.backends import current
from optim.bits.layout import packed_nbytes
from optim.codecs.base import F32, PIECE, U8, Codec, row_pieces, scales_at, scales_problem, storable

_INFINITY = 0x7F800000


def _patterns(numbers: NDArray[np.float32]) -> list[int]:
    patterns: list[int] = numbers.view(np.uint32).tolist()
    return patterns


_PLUS_ONE, _MINUS_ONE = _patterns(np.array([1.0, -1.0], np.float32))


class _Signs(Codec):
    """Packed signs, then scales."""

    def _pack(self, x: F32, out: U8, seed: int) -> None:
        current().pack(x.reshape(-1).view(np.uint32), _INFINITY, seed, out[: packed_nbytes(self.size)])

    def _scales(self, data: U8) -> NDArray[np.float32]:
        start = packed_nbytes(self.size)
        return scales_at(data, start, (self.nbytes - start) // 4)

    def _problem(self, data: U8) -> str:
        return scales_problem(self._scales(data))


class OneBit(_Signs):
    """``1bit``: every entry becomes ``scale`` or ``-scale``, the mean magnitude of the tensor."""

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        flat = x.reshape(-1)
        sums = [
            float(np.abs(flat[start : start + PIECE]).sum(dtype=np.float64))
            for start in range(0, flat.size, PIECE)
        ]
        self._pack(x, out, seed)
        self._scales(out)[:] = storable(np.array([math.fsum(sums) / flat.size]))

    def _decode(self, data: U8, out: F32) -> None:
        scale = self._scales(data).astype(np.float32)
        if scale[0] == 0:
            out.fill(0)
            return
        plus, minus = _patterns(np.concatenate([scale, -scale]))
        current().unpack(data[: packed_nbytes(self.size)], out.reshape(-1).view(np.uint32), plus, minus)


class OneBitRow(_Signs):
    """``1bit-row``: every entry becomes plus or minus the mean magnitude of its row."""

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        self._pack(x, out, seed)
        scales = self._scales(out)
        for rows in row_pieces(self.rows, self.columns, 1):
            scales[rows] = storable(np.abs(x[rows]).sum(axis=1, dtype=np.float64) / self.columns)

    def _decode(self, data: U8, out: F32) -> None:
        bits, scales = data[: packed_nbytes(self.size)], self._scales(data)
        for rows in row_pieces(self.rows, self.columns, 8):
            part, scale = out[rows], scales[rows]
            start = rows.start * self.columns // 8
            packed = bits[start : start + -(-part.size // 8)]
            current().unpack(packed, part.reshape(-1).view(np.uint32), _PLUS_ONE, _MINUS_ONE)
            part *= scale[:, None]
            part[scale == 0] = 0
