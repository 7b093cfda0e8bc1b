"""The codecs entry by entry: slow, and the definition that the tests hold the fast ones to.

Numbers are Python floats that are float32 values; ``f32`` rounds to one. Every function takes the entries of
a tensor in order, with the number of columns where rows matter, and returns the encoded bytes or the entries.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence

from optim.bits.layout import packed_nbytes, splitmix64
from optim.codecs.base import LARGEST, SMALLEST_SCALE
from optim.codecs.levels import OUTER, TERNARY_THRESHOLD
from protos.codecs import CodecSpec, matrix_shape

Vector = Sequence[float]


def f32(x: float) -> float:
    """``x`` rounded to float32, to the nearest, ties to even."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
    return rounded


def _storable(scale: float, factor: float = 1.0) -> float:
    return 0.0 if scale < SMALLEST_SCALE else f32(min(scale, LARGEST / factor))


def _floats(values: Vector) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def _rows(x: Vector, columns: int) -> Iterator[Vector]:
    for start in range(0, len(x), columns):
        yield x[start : start + columns]


def positive(x: float, index: int, seed: int) -> bool:
    """The sign that entry ``index`` has or, if it is zero, gets by the seed."""
    return bool(splitmix64(seed + (index >> 6)) >> (index & 63) & 1) if x == 0 else x > 0


# fp32, bf16


def encode_bf16(x: Vector) -> bytes:
    """The upper halves of the patterns, rounded to the nearest, ties to even; never infinite."""
    halves = []
    for value in x:
        pattern = struct.unpack("<I", struct.pack("<f", value))[0]
        upper, lower = pattern >> 16, pattern & 0xFFFF
        if lower > 0x8000 or (lower == 0x8000 and upper & 1):
            upper += 1
        if upper & 0x7FFF == 0x7F80:
            upper -= 1
        halves.append(upper)
    return struct.pack(f"<{len(halves)}H", *halves)


def decode_bf16(data: bytes, count: int) -> list[float]:
    """Upper halves, and zeros below."""
    return [struct.unpack("<f", b"\0\0" + data[2 * i : 2 * i + 2])[0] for i in range(count)]


# int8, int4


def _block_code(block: Vector, largest_code: int) -> tuple[float, list[int]]:
    scale = _storable(f32(max(abs(x) for x in block) / largest_code))
    pattern = struct.unpack("<I", struct.pack("<f", scale))[0]
    scale = struct.unpack("<f", struct.pack("<I", pattern // 128 * 128))[0]
    return scale, [round(f32(x / scale)) if scale else 0 for x in block]


def _blocks(x: Vector, length: int, largest_code: int) -> tuple[bytes, list[int]]:
    scales, codes = [], []
    for block in _rows(x, length):
        scale, code = _block_code(block, largest_code)
        scales.append(scale)
        codes.extend(code)
    return _floats(scales), codes


def encode_int8(x: Vector, length: int) -> bytes:
    """Block scales ``largest / 127``, codes ``x / scale``."""
    scales, codes = _blocks(x, length, 127)
    return scales + struct.pack(f"<{len(codes)}b", *codes)


def encode_int4(x: Vector, length: int) -> bytes:
    """Block scales ``largest / 7``, codes ``x / scale``, two a byte."""
    scales, codes = _blocks(x, length, 7)
    codes = [code % 16 for code in codes] + [0] * (len(codes) % 2)
    return scales + bytes(low + 16 * high for low, high in zip(codes[0::2], codes[1::2], strict=True))


def _block_decode(data: bytes, count: int, length: int, code_at: Callable[[bytes, int], int]) -> list[float]:
    blocks = -(-count // length)
    scales, codes = struct.unpack(f"<{blocks}f", data[: 4 * blocks]), data[4 * blocks :]
    return [f32(code_at(codes, i) * scales[i // length]) for i in range(count)]


def decode_int8(data: bytes, count: int, length: int) -> list[float]:
    """``code * scale``."""
    return _block_decode(data, count, length, lambda codes, i: (codes[i] + 128) % 256 - 128)


def decode_int4(data: bytes, count: int, length: int) -> list[float]:
    """``code * scale``."""
    return _block_decode(
        data, count, length, lambda codes, i: ((codes[i // 2] >> 4 * (i % 2)) % 16 + 8) % 16 - 8
    )


# 2bit, ternary


def encode_2bit(x: Vector, columns: int, seed: int) -> bytes:
    """Levels 1 and 4: classes by the root mean square, a fitted scale, then the nearest level."""
    scales: list[float] = []
    codes: list[int] = []
    for row in _rows(x, columns):
        threshold = f32(math.sqrt(math.fsum(value * value for value in row) / columns))
        levels = [OUTER if abs(value) > threshold else 1.0 for value in row]
        fit = math.fsum(level * abs(value) for level, value in zip(levels, row, strict=True))
        scale = _storable(fit / sum(level * level for level in levels), OUTER)
        middle = f32((1 + OUTER) / 2 * scale)
        for value in row:
            sign = 0 if positive(value, len(codes), seed) else 1
            codes.append(sign + 2 * (abs(value) > middle) if scale else 0)
        scales.append(scale)
    packed = bytearray(-(-len(codes) // 4))
    for i, code in enumerate(codes):
        packed[i // 4] += code << 2 * (i % 4)
    return _floats(scales) + bytes(packed)


def decode_2bit(data: bytes, count: int, columns: int) -> list[float]:
    """Plus or minus the scale of the row, or four times that."""
    rows = count // columns
    scales, packed = struct.unpack(f"<{rows}f", data[: 4 * rows]), data[4 * rows :]
    levels = (1.0, -1.0, OUTER, -OUTER)
    return [levels[packed[i // 4] >> 2 * (i % 4) & 3] * scales[i // columns] for i in range(count)]


def encode_ternary(x: Vector, columns: int) -> bytes:
    """Zero below a threshold, else the mean magnitude of what is above it; two steps."""
    scales, digits = [], []
    for row in _rows(x, columns):
        threshold = f32(TERNARY_THRESHOLD * math.fsum(abs(value) for value in row) / columns)
        for _ in range(2):
            chosen = [abs(value) > threshold for value in row]
            above = [abs(value) for value, taken in zip(row, chosen, strict=True) if taken]
            mean = math.fsum(above) / max(len(above), 1)
            threshold = f32(mean / 2)
        scales.append(_storable(mean))
        digits += [(1 if v > 0 else 2) if c and scales[-1] else 0 for v, c in zip(row, chosen, strict=True)]
    packed = bytearray(-(-len(digits) // 5))
    for i, digit in enumerate(digits):
        packed[i // 5] += digit * 3 ** (i % 5)
    return _floats(scales) + bytes(packed)


def decode_ternary(data: bytes, count: int, columns: int) -> list[float]:
    """Zero, or plus or minus the scale of the row."""
    rows = count // columns
    scales, packed = struct.unpack(f"<{rows}f", data[: 4 * rows]), data[4 * rows :]
    return [(0.0, 1.0, -1.0)[packed[i // 5] // 3 ** (i % 5) % 3] * scales[i // columns] for i in range(count)]


# 1bit, 1bit-row


def encode_signs(x: Vector, columns: int, seed: int) -> bytes:
    """Signs, then the mean magnitude of each row; a whole tensor is one row for ``1bit``."""
    packed = bytearray(packed_nbytes(len(x)))
    for i, value in enumerate(x):
        packed[i // 8] += positive(value, i, seed) << i % 8
    return bytes(packed) + _floats(
        [_storable(math.fsum(abs(v) for v in row) / columns) for row in _rows(x, columns)]
    )


def decode_signs(data: bytes, count: int, columns: int) -> list[float]:
    """Plus or minus the scale of the row; a scale of zero leaves no negative zeros."""
    scales = struct.unpack(f"<{count // columns}f", data[packed_nbytes(count) :])
    signs = [1 if data[i // 8] >> i % 8 & 1 else -1 for i in range(count)]
    return [sign * scales[i // columns] + 0.0 for i, sign in enumerate(signs)]


# lowrank


def decode_low_rank(data: bytes, rows: int, columns: int, rank: int) -> list[float]:
    """Whole numbers times both scales."""
    left_scale, right_scale = struct.unpack("<2f", data[:8])
    left = struct.unpack(f"<{rows * rank}h", data[8 : 8 + 2 * rows * rank])
    right = struct.unpack(f"<{columns * rank}h", data[8 + 2 * rows * rank : 8 + 2 * rank * (rows + columns)])
    entries = []
    for i in range(rows):
        for j in range(columns):
            whole = sum(left[i * rank + k] * right[j * rank + k] for k in range(rank))
            exact = whole * (left_scale * right_scale)
            entries.append(f32(min(max(exact, -LARGEST), LARGEST)))
    return entries


def low_rank_factors(
    x: Sequence[Vector], right: Sequence[Vector], steps: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Columns of the left and of the right factor after steps of subspace iteration from the columns
    ``right``: multiply, make orthonormal by Gram-Schmidt, multiply back. ``x`` has at least that rank."""
    basis = [list(column) for column in right]
    for _ in range(steps):
        left: list[list[float]] = []
        for column in basis:
            image = [math.fsum(a * b for a, b in zip(row, column, strict=True)) for row in x]
            for _ in range(2):  # once more for what rounding left
                for other in left:
                    overlap = math.fsum(a * b for a, b in zip(image, other, strict=True))
                    image = [a - overlap * b for a, b in zip(image, other, strict=True)]
            length = math.sqrt(math.fsum(a * a for a in image))
            left.append([a / length for a in image])
        basis = [
            [math.fsum(x[i][j] * column[i] for i in range(len(x))) for j in range(len(x[0]))]
            for column in left
        ]
    return left, basis


def encode(name: str, shape: tuple[int, ...], x: Vector, seed: int = 0) -> bytes:
    """Encode by name; all codecs but ``lowrank``, whose factors no entry determines by itself."""
    spec, (_, columns) = CodecSpec.parse(name), matrix_shape(shape)
    if not x:
        return bytes(spec.nbytes(shape))
    forms: dict[str, Callable[[], bytes]] = {
        "fp32": lambda: _floats(x),
        "bf16": lambda: encode_bf16(x),
        "int8": lambda: encode_int8(x, spec.number),
        "int4": lambda: encode_int4(x, spec.number),
        "2bit": lambda: encode_2bit(x, columns, seed),
        "ternary": lambda: encode_ternary(x, columns),
        "1bit": lambda: encode_signs(x, len(x), seed),
        "1bit-row": lambda: encode_signs(x, columns, seed),
    }
    return forms[spec.kind]()


def decode(name: str, shape: tuple[int, ...], data: bytes) -> list[float]:
    """Decode by name, all codecs."""
    spec, (rows, columns) = CodecSpec.parse(name), matrix_shape(shape)
    count = rows * columns
    if not count:
        return []
    forms: dict[str, Callable[[], list[float]]] = {
        "fp32": lambda: list(struct.unpack(f"<{count}f", data)),
        "bf16": lambda: decode_bf16(data, count),
        "int8": lambda: decode_int8(data, count, spec.number),
        "int4": lambda: decode_int4(data, count, spec.number),
        "2bit": lambda: decode_2bit(data, count, columns),
        "ternary": lambda: decode_ternary(data, count, columns),
        "1bit": lambda: decode_signs(data, count, count),
        "1bit-row": lambda: decode_signs(data, count, columns),
        "lowrank": lambda: decode_low_rank(data, rows, columns, spec.rank(shape)),
    }
    entries = forms[spec.kind]()
    if spec.residual:
        rest = decode(str(spec.residual), shape, data[CodecSpec(spec.kind, spec.number).nbytes(shape) :])
        entries = [min(max(f32(a + b), -LARGEST), LARGEST) for a, b in zip(rest, entries, strict=True)]
    return entries
