"""Ranges of an encoded tensor that are encodings of their own.

In most codecs a block or a row of a tensor has its own scale and whole bytes, so that a run of them can be
decoded by itself: a reducer then needs memory for a run, not for the tensor. The byte layouts are those of
:meth:`protos.codecs.CodecSpec.nbytes`. A run that is encoded by itself may differ from that of the whole
tensor where zeros take a sign by their place.
"""

from __future__ import annotations

import math
from typing import Final

from protos.codecs import LINE_ELEMENTS, SCALE_BYTES, TRITS, CodecSpec, matrix_shape, round_up

_CODES: Final = {"2bit": 4, "ternary": TRITS}  # entries in a byte of codecs with a scale for each row


def unit(spec: CodecSpec, shape: tuple[int, ...]) -> int:
    """Elements at whose multiples an encoding may be cut; 0 if it can only be read as a whole."""
    if spec.kind in ("fp32", "bf16"):
        return 1
    if spec.kind in ("int8", "int4"):
        return spec.number
    if spec.kind in _CODES:
        return math.lcm(matrix_shape(shape)[1], _CODES[spec.kind])
    if spec.kind == "1bit":
        return LINE_ELEMENTS
    if spec.kind == "1bit-row":
        return math.lcm(matrix_shape(shape)[1], LINE_ELEMENTS)
    return 0


def run_length(spec: CodecSpec, shape: tuple[int, ...], about: int) -> int:
    """Elements of a run that an encoding can be cut into, near ``about``; all of them if it cannot."""
    rows, columns = matrix_shape(shape)
    step = unit(spec, shape) or rows * columns
    return min(rows * columns, step * max(1, about // step))


def run_shape(spec: CodecSpec, shape: tuple[int, ...], first: int, last: int) -> tuple[int, ...]:
    """Shape of the tensor whose encoding the elements ``first`` to ``last - 1`` are."""
    if (first, last) == (0, math.prod(matrix_shape(shape))):
        return shape
    if spec.kind in _CODES or spec.kind == "1bit-row":
        columns = matrix_shape(shape)[1]
        return (last - first) // columns, columns
    return (last - first,)


def byte_ranges(
    spec: CodecSpec, shape: tuple[int, ...], first: int, last: int
) -> tuple[tuple[int, int], ...]:
    """Where the encoding of a run lies in that of the tensor: the ranges, one behind the other, are it.

    ``first`` must be a multiple of :func:`unit`, ``last`` one or the end.
    """
    rows, columns = matrix_shape(shape)
    if (first, last) == (0, rows * columns):
        return ((0, spec.nbytes(shape)),)
    if spec.kind in ("fp32", "bf16"):
        size = 4 if spec.kind == "fp32" else 2
        return ((size * first, size * last),)
    if spec.kind in ("1bit", "1bit-row"):  # signs, then scales
        scales = (0, 1) if spec.kind == "1bit" else (first // columns, last // columns)
        behind = round_up(rows * columns, LINE_ELEMENTS) // 8
        signs = first // 8, round_up(last, LINE_ELEMENTS) // 8
        return signs, (behind + SCALE_BYTES * scales[0], behind + SCALE_BYTES * scales[1])
    if spec.kind in ("int8", "int4"):  # scales, then codes
        packed = 1 if spec.kind == "int8" else 2
        behind = SCALE_BYTES * -(-rows * columns // spec.number)
        scales = first // spec.number, -(-last // spec.number)
    else:
        packed = _CODES[spec.kind]
        behind = SCALE_BYTES * rows
        scales = first // columns, last // columns
    codes = behind + first // packed, behind - (-last // packed)
    return (SCALE_BYTES * scales[0], SCALE_BYTES * scales[1]), codes
