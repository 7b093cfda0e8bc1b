"""2bit and ternary: a few levels, multiples of a scale for each row.

Both encoders make a step of Lloyd's algorithm (least squares quantization, IEEE Trans. Inf. Theory 28, 1982)
with levels of a fixed ratio: classify the entries by a threshold, fit the scale to the classes by least
squares. A fitted scale leaves ``|x|^2 - <x, c>^2 / |c|^2`` of a row with classes ``c``, less than ``|x|^2``
whatever the distribution is; a scale taken from the row's moments would enlarge the error of a row with one
large entry.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from optim.codecs.base import F32, U8, Codec, row_pieces, scales_at, scales_problem, storable, zero_signs
from protos.codecs import SCALE_BYTES, TRITS, round_up

F64 = NDArray[np.float64]

# Outer over inner magnitude of 2bit. Measured error over energy: Gaussian entries 0.121 and Laplace 0.179,
# against 0.1175 and 0.1762 of the four best levels for each (Max 1960); ratio 3 has 0.119 and 0.197. A power
# of two keeps the outer level exact.
OUTER: Final = 4.0
# First threshold of ternary over the mean magnitude; with a second step the error over energy is 0.191 for
# Gaussian and 0.265 for Laplace entries, within 0.5 % of the best.
TERNARY_THRESHOLD: Final = 0.9


def _sum(values: NDArray[Any]) -> F64:
    total: F64 = values.sum(axis=1, dtype=np.float64)
    return total


def _sum_where(values: F32, chosen: NDArray[np.bool_]) -> F64:
    total: F64 = np.einsum("ij,ij->i", values, chosen, dtype=np.float64)
    return total


def two_bit_scales(magnitudes: F32) -> F32:
    """Scale of each row: the first threshold is its root mean square, which lies between the two magnitudes
    of a row that was decoded, so that such a row keeps its scale."""
    columns = magnitudes.shape[1]
    squares = np.einsum("ij,ij->i", magnitudes, magnitudes, dtype=np.float64)
    threshold = np.sqrt(squares / columns).astype(np.float32)
    outer = magnitudes > threshold[:, None]
    above = np.count_nonzero(outer, axis=1)
    weighted = _sum(magnitudes) + (OUTER - 1) * _sum_where(magnitudes, outer)
    return storable(weighted / (columns + (OUTER**2 - 1) * above), OUTER)


def ternary_classes(magnitudes: F32) -> tuple[F32, NDArray[np.bool_]]:
    """Scale of each row, and which entries are not zero: two steps of Lloyd's algorithm."""
    threshold = (TERNARY_THRESHOLD * _sum(magnitudes) / magnitudes.shape[1]).astype(np.float32)
    for _ in range(2):
        chosen = magnitudes > threshold[:, None]
        mean = _sum_where(magnitudes, chosen) / np.maximum(np.count_nonzero(chosen, axis=1), 1)
        threshold = (0.5 * mean).astype(np.float32)
    scales = storable(mean)
    chosen &= (scales > 0)[:, None]
    return scales, chosen


class _RowLevels(Codec):
    """Scales of all rows, then codes packed without regard to rows."""

    def _scales(self, data: U8) -> NDArray[np.float32]:
        return scales_at(data, 0, self.rows)

    def _packed(self, data: U8) -> U8:
        return data[SCALE_BYTES * self.rows :]

    def _decode_table(self, data: U8, out: F32, table: F32) -> None:
        """Decode by the levels that each byte stands for: ``table[256, codes in a byte]``."""
        each = table.shape[1]
        scales, packed = self._scales(data), self._packed(data)
        for rows in row_pieces(self.rows, self.columns, each):
            start, stop = rows.start * self.columns, rows.stop * self.columns
            levels = np.take(table, packed[start // each : -(-stop // each)], axis=0)
            levels = levels.reshape(-1)[: stop - start].reshape(-1, self.columns)
            np.multiply(levels, scales[rows, None], out=out[rows])


_TWO_BIT = np.array([1.0, -1.0, OUTER, -OUTER], np.float32)
_QUADS = np.stack([_TWO_BIT[np.arange(256) >> shift & 3] for shift in (0, 2, 4, 6)], axis=1)


class TwoBit(_RowLevels):
    """``2bit``: little-endian float32 scale of each row, then four entries a byte, the first lowest.

    Bit 0 of a code is 1 for a negative entry, bit 1 for the outer level: ``scale`` or ``4 scale``. No level
    is zero; an exact zero takes a sign by the seed, lest untouched entries drift in one direction.
    """

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        scales, packed = self._scales(out), self._packed(out)
        for rows in row_pieces(self.rows, self.columns, 4):
            part, start = x[rows], rows.start * self.columns
            magnitudes = np.abs(part)
            scale = two_bit_scales(magnitudes)
            scales[rows] = scale
            middle = np.float32((1 + OUTER) / 2) * scale
            negative = np.signbit(part)
            zeros = magnitudes == 0
            if zeros.any():
                positive = zero_signs(seed, start, part.size).reshape(part.shape)
                negative = np.where(zeros, ~positive, negative)
            codes = np.zeros(round_up(part.size, 4), np.uint8)
            code = codes[: part.size].reshape(part.shape)
            np.greater(magnitudes, middle[:, None], out=code.view(np.bool_))
            code += code
            code |= negative.view(np.uint8)
            code[scale == 0] = 0
            words = codes.view("<u4")
            words |= words >> np.uint32(6)  # the second code moves beside the first, the fourth to the third
            words |= words >> np.uint32(12)
            packed[start // 4 : start // 4 + words.size] = words.astype(np.uint8)

    def _decode(self, data: U8, out: F32) -> None:
        self._decode_table(data, out, _QUADS)

    def _problem(self, data: U8) -> str:
        return scales_problem(self._scales(data), OUTER)


_TRIT = np.array([0.0, 1.0, -1.0], np.float32)
_QUINTS = np.stack([_TRIT[np.arange(256) // 3**place % 3] for place in range(TRITS)], axis=1)


class Ternary(_RowLevels):
    """``ternary``: little-endian float32 scale of each row, then five entries a byte.

    A byte is ``d0 + 3 d1 + 9 d2 + 27 d3 + 81 d4`` with digits 0 for zero, 1 for ``scale``, 2 for ``-scale``.
    """

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        scales, packed = self._scales(out), self._packed(out)
        for rows in row_pieces(self.rows, self.columns, TRITS):
            part, start = x[rows], rows.start * self.columns
            scale, chosen = ternary_classes(np.abs(part))
            scales[rows] = scale
            digits = np.zeros(round_up(part.size, TRITS), np.uint8)
            digit = digits[: part.size].reshape(part.shape)
            np.signbit(part, out=digit.view(np.bool_))
            digit += np.uint8(1)
            digit *= chosen.view(np.uint8)
            places = digits.reshape(-1, TRITS)
            number = places[:, TRITS - 1].copy()
            for place in range(TRITS - 2, -1, -1):
                number *= np.uint8(3)
                number += places[:, place]
            packed[start // TRITS : start // TRITS + number.size] = number

    def _decode(self, data: U8, out: F32) -> None:
        self._decode_table(data, out, _QUINTS)

    def _problem(self, data: U8) -> str:
        found = scales_problem(self._scales(data))
        if not found and int(self._packed(data).max()) >= 3**TRITS:
            found = f"a byte of {TRITS} digits is above {3**TRITS - 1}"
        return found
