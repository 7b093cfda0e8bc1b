"""Tally kernels: bit-sliced counters over 64-byte vectors, compiled by numba.

Imported by :mod:`optim.bits.fast` on first use, since the kernels compile on import. A kernel works on raw
addresses of whole 64-byte lines, at any alignment. The votes for one bit position are summed across
bit-sliced counter *planes*: plane ``q`` holds bit ``q`` of every counter. Rows enter through carry-save adder
trees (15 full adders for 16 rows, two instructions each with AVX-512), and only the carry that leaves a tree
ripples through the higher planes.

The threshold needs no comparison: with total weight W, ``k = bit_length(W >> 1)`` and
``bias = 2**k - (W >> 1) - 1``, plane ``k`` of ``count + bias`` says "more than half". For even W the casting
vote is added once more, as the carry into plane 0: a weighted sum of +-1 is then even, so one more vote
decides a tie and nothing else.

The file holds its own intrinsics because numba's cache watches only the file that a kernel is in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import models, register_model

from optim.bits.jit import intrinsic, kernel

I32, I64 = ir.IntType(32), ir.IntType(64)
Word = Any  # a 64-bit word, unsigned; addresses and sizes are ints
Rows = Any  # addresses or ends as numba arrays; numba itself goes by the signatures, not by annotations

LANES = 8  # 8 x 64 bits: one AVX-512 register, two of AVX2, four of NEON; LLVM splits it as needed
VECTOR = ir.VectorType(I64, LANES)
AHEAD = 1024  # bytes; 256 to 4096 all pay where the votes come from memory, and cost nothing in the cache


class LineType(types.Opaque):  # type: ignore[misc]
    """The numba type of one 64-byte line in registers."""


line = LineType("line")


@register_model(LineType)
class LineModel(models.PrimitiveModel):  # type: ignore[misc]
    """Represents a line as ``<8 x i64>``."""

    def __init__(self, manager: Any, front_end_type: Any) -> None:
        super().__init__(manager, front_end_type, VECTOR)


def _pointer(builder: Any, address: Any, target: Any) -> Any:
    return builder.inttoptr(address, target.as_pointer())


@intrinsic
def load(context: Any, address: Any) -> Any:
    """The line at an address of any alignment."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], VECTOR), align=1)

    return line(types.intp), emit


@intrinsic
def load_ahead(context: Any, address: Any) -> Any:
    """:func:`load`, with a prefetch of the line ``AHEAD`` bytes on: hardware loses track of 16 streams."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte], fnty=kind)
        further = builder.inttoptr(builder.add(args[0], ir.Constant(I64, AHEAD)), byte)
        read, second_level, data = (ir.Constant(I32, flag) for flag in (0, 2, 1))
        builder.call(prefetch, [further, read, second_level, data])
        return builder.load(_pointer(builder, args[0], VECTOR), align=1)

    return line(types.intp), emit


@intrinsic
def store(context: Any, address: Any, value: Any) -> Any:
    """Write a line to an address of any alignment."""

    def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], VECTOR), align=1)
        return generator.get_dummy_value()

    return types.void(types.intp, line), emit


@intrinsic
def store_around_cache(context: Any, address: Any, value: Any) -> Any:
    """Write a line to a 64-byte aligned address without reading it into the cache first."""

    def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
        write = builder.store(args[1], _pointer(builder, args[0], VECTOR), align=64)
        write.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
        return generator.get_dummy_value()

    return types.void(types.intp, line), emit


@intrinsic
def fence(context: Any) -> Any:
    """Order the stores around the cache before everything that follows."""

    def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return generator.get_dummy_value()

    return types.void(), emit


@intrinsic
def splat(context: Any, word: Any) -> Any:
    """A line that repeats one 64-bit word."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        undefined = ir.Constant(VECTOR, ir.Undefined)
        first = builder.insert_element(undefined, args[0], ir.Constant(I32, 0))
        return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))

    return line(types.uint64), emit


@intrinsic
def both(context: Any, a: Any, b: Any) -> Any:
    """Bitwise and."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.and_(*args)

    return line(line, line), emit


@intrinsic
def either(context: Any, a: Any, b: Any) -> Any:
    """Bitwise or."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.or_(*args)

    return line(line, line), emit


@intrinsic
def total(context: Any, a: Any, b: Any, c: Any) -> Any:
    """The sum bit of a full adder: parity of three lines."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.xor(builder.xor(args[0], args[1]), args[2])

    return line(line, line, line), emit


@intrinsic
def carry(context: Any, a: Any, b: Any, c: Any) -> Any:
    """The carry bit of a full adder: majority of three lines."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        a, b, c = args
        return builder.or_(builder.and_(a, b), builder.and_(c, builder.or_(a, b)))

    return line(line, line, line), emit


ROW, FROZEN_ROW = types.Array(types.uint8, 1, "C"), types.Array(types.uint8, 1, "C", readonly=True)


@kernel([types.intp(ROW), types.intp(FROZEN_ROW)])
def address(array: Rows) -> Word:
    """Address of an array's first byte, five times faster than asking numpy."""
    return array.ctypes.data


@kernel("uint64(uint64, intp)")
def spread(value: Word, bit: int) -> Word:
    """Bit ``bit`` of ``value``, repeated 64 times."""
    return np.uint64(0) - ((value >> np.uint64(bit)) & np.uint64(1))


@kernel("intp(uint64[::1], intp, intp, intp, intp)")
def row(rows: Rows, m: int, end: int, offset: int, zeros: int) -> Word:
    """Address of the tile of row ``m``, or of a tile of zeros past the last row."""
    return np.intp(rows[m]) + offset if m < end else zeros


@kernel("void(intp, intp, intp, intp, intp)")
def add1(r: int, size: int, planes: int, stride: int, top: int) -> None:
    """Add the tile at ``r`` to the counters: one carry through all planes."""
    for j in range(0, size, 64):
        c = load(r + j)
        for q in range(top):
            p = planes + q * stride + j
            a = load(p)
            store(p, total(a, c, splat(np.uint64(0))))
            c = both(a, c)


@kernel("void(uint64[::1], intp, intp, intp, intp, intp, intp, intp, intp)")
def add8(
    rows: Rows, m: int, end: int, offset: int, zeros: int, size: int, planes: int, stride: int, top: int
) -> None:
    """Add up to eight rows from ``m`` on to the counters; planes 0 to 2 must exist."""
    r0, r1 = row(rows, m, end, offset, zeros), row(rows, m + 1, end, offset, zeros)
    r2, r3 = row(rows, m + 2, end, offset, zeros), row(rows, m + 3, end, offset, zeros)
    r4, r5 = row(rows, m + 4, end, offset, zeros), row(rows, m + 5, end, offset, zeros)
    r6, r7 = row(rows, m + 6, end, offset, zeros), row(rows, m + 7, end, offset, zeros)
    for j in range(0, size, 64):
        p = planes + j
        one, two, four = load(p), load(p + stride), load(p + 2 * stride)
        a, b = load_ahead(r0 + j), load_ahead(r1 + j)
        t0, one = carry(a, b, one), total(a, b, one)
        a, b = load_ahead(r2 + j), load_ahead(r3 + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f0, two = carry(t0, t1, two), total(t0, t1, two)
        a, b = load_ahead(r4 + j), load_ahead(r5 + j)
        t0, one = carry(a, b, one), total(a, b, one)
        a, b = load_ahead(r6 + j), load_ahead(r7 + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f1, two = carry(t0, t1, two), total(t0, t1, two)
        e, four = carry(f0, f1, four), total(f0, f1, four)
        store(p, one)
        store(p + stride, two)
        store(p + 2 * stride, four)
        for q in range(3, top):
            a = load(p + q * stride)
            store(p + q * stride, total(a, e, splat(np.uint64(0))))
            e = both(a, e)


@kernel("void(uint64[::1], intp, intp, intp, intp, intp, intp, intp, intp)")
def add16(
    rows: Rows, m: int, end: int, offset: int, zeros: int, size: int, planes: int, stride: int, top: int
) -> None:
    """Add up to sixteen rows from ``m`` on to the counters; planes 0 to 3 must exist."""
    r0, r1 = row(rows, m, end, offset, zeros), row(rows, m + 1, end, offset, zeros)
    r2, r3 = row(rows, m + 2, end, offset, zeros), row(rows, m + 3, end, offset, zeros)
    r4, r5 = row(rows, m + 4, end, offset, zeros), row(rows, m + 5, end, offset, zeros)
    r6, r7 = row(rows, m + 6, end, offset, zeros), row(rows, m + 7, end, offset, zeros)
    r8, r9 = row(rows, m + 8, end, offset, zeros), row(rows, m + 9, end, offset, zeros)
    ra, rb = row(rows, m + 10, end, offset, zeros), row(rows, m + 11, end, offset, zeros)
    rc, rd = row(rows, m + 12, end, offset, zeros), row(rows, m + 13, end, offset, zeros)
    re, rf = row(rows, m + 14, end, offset, zeros), row(rows, m + 15, end, offset, zeros)
    for j in range(0, size, 64):
        p = planes + j
        one, two = load(p), load(p + stride)
        four, eight = load(p + 2 * stride), load(p + 3 * stride)
        a, b = load_ahead(r0 + j), load_ahead(r1 + j)
        t0, one = carry(a, b, one), total(a, b, one)
        a, b = load_ahead(r2 + j), load_ahead(r3 + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f0, two = carry(t0, t1, two), total(t0, t1, two)
        a, b = load_ahead(r4 + j), load_ahead(r5 + j)
        t0, one = carry(a, b, one), total(a, b, one)
        a, b = load_ahead(r6 + j), load_ahead(r7 + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f1, two = carry(t0, t1, two), total(t0, t1, two)
        e0, four = carry(f0, f1, four), total(f0, f1, four)
        a, b = load_ahead(r8 + j), load_ahead(r9 + j)
        t0, one = carry(a, b, one), total(a, b, one)
        a, b = load_ahead(ra + j), load_ahead(rb + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f0, two = carry(t0, t1, two), total(t0, t1, two)
        a, b = load_ahead(rc + j), load_ahead(rd + j)
        t0, one = carry(a, b, one), total(a, b, one)
        a, b = load_ahead(re + j), load_ahead(rf + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f1, two = carry(t0, t1, two), total(t0, t1, two)
        e1, four = carry(f0, f1, four), total(f0, f1, four)
        s, eight = carry(e0, e1, eight), total(e0, e1, eight)
        store(p, one)
        store(p + stride, two)
        store(p + 2 * stride, four)
        store(p + 3 * stride, eight)
        for q in range(4, top):
            a = load(p + q * stride)
            store(p + q * stride, total(a, s, splat(np.uint64(0))))
            s = both(a, s)


@kernel("void(uint64[::1], int64[::1], intp, intp, intp, intp, intp, intp)")
def add_tile(
    rows: Rows, ends: Rows, offset: int, zeros: int, size: int, planes: int, stride: int, top: int
) -> None:
    """Add all rows of one tile: those up to ``ends[b]`` have weight ``2**b`` and start at plane ``b``."""
    m = 0
    for b in range(ends.size):
        end = ends[b]
        base, height = planes + b * stride, top - b
        while end - m > 8:
            add16(rows, m, end, offset, zeros, size, base, stride, height)
            m += 16
        if end - m > 3:
            add8(rows, m, end, offset, zeros, size, base, stride, height)
            m += 8
        while m < end:
            add1(np.intp(rows[m]) + offset, size, base, stride, height)
            m += 1
        m = end


@kernel("void(intp, intp, intp, intp, uint64, intp, uint64, intp, boolean)")
def decide(
    planes: int, stride: int, top: int, size: int, bias: Word, cast: int, even: Word, out: int, around: bool
) -> None:
    """Write "more than half, or half and the casting vote" of one tile of counters."""
    ties = splat(even)
    for j in range(0, size, 64):
        c = both(load(cast + j), ties)
        for q in range(top - 1):
            c = carry(load(planes + q * stride + j), splat(spread(bias, q)), c)
        c = either(c, load(planes + (top - 1) * stride + j))
        if around:
            store_around_cache(out + j, c)
        else:
            store(out + j, c)


@kernel("void(uint64[::1], intp, intp, intp, uint64, intp, uint64, intp, boolean)")
def decide8(
    rows: Rows, offset: int, zeros: int, size: int, bias: Word, cast: int, even: Word, out: int, around: bool
) -> None:
    """The majority of up to eight votes of weight 1, with all counters in registers."""
    end = rows.size
    r0, r1 = row(rows, 0, end, offset, zeros), row(rows, 1, end, offset, zeros)
    r2, r3 = row(rows, 2, end, offset, zeros), row(rows, 3, end, offset, zeros)
    r4, r5 = row(rows, 4, end, offset, zeros), row(rows, 5, end, offset, zeros)
    r6, r7 = row(rows, 6, end, offset, zeros), row(rows, 7, end, offset, zeros)
    bias0, bias1, bias2 = splat(spread(bias, 0)), splat(spread(bias, 1)), splat(spread(bias, 2))
    ties = splat(even)
    for j in range(0, size, 64):
        a, b = load_ahead(r0 + j), load_ahead(r1 + j)
        t0, one = carry(a, b, bias0), total(a, b, bias0)
        a, b = load_ahead(r2 + j), load_ahead(r3 + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f0, two = carry(t0, t1, bias1), total(t0, t1, bias1)
        a, b = load_ahead(r4 + j), load_ahead(r5 + j)
        t0, one = carry(a, b, one), total(a, b, one)
        a, b = load_ahead(r6 + j), load_ahead(r7 + j)
        t1, one = carry(a, b, one), total(a, b, one)
        f1, two = carry(t0, t1, two), total(t0, t1, two)
        e, four = carry(f0, f1, bias2), total(f0, f1, bias2)
        tie = both(both(both(load(cast + j), ties), both(one, two)), four)
        if around:
            store_around_cache(out + j, either(e, tie))
        else:
            store(out + j, either(e, tie))


@kernel("void(uint64[::1], int64[::1], intp, uint64, intp, uint64, intp, intp, intp, boolean)")
def tally(
    rows: Rows,
    ends: Rows,
    top: int,
    bias: Word,
    cast: int,
    even: Word,
    out: int,
    nbytes: int,
    stride: int,
    around: bool,
) -> None:
    """Majority of the votes at ``rows``, tile by tile; ``top`` planes, or 0 for at most eight of weight 1."""
    scratch = np.zeros((top + 1) * stride + 64, np.uint8)
    zeros = (np.intp(scratch.ctypes.data) + 63) // 64 * 64
    planes = zeros + stride
    nothing = splat(np.uint64(0))
    for offset in range(0, nbytes, stride):
        size = min(stride, nbytes - offset)
        if top == 0:
            decide8(rows, offset, zeros, size, bias, cast + offset, even, out + offset, around)
            continue
        for j in range(0, top * stride, 64):
            store(planes + j, nothing)
        add_tile(rows, ends, offset, zeros, size, planes, stride, top)
        decide(planes, stride, top, size, bias, cast + offset, even, out + offset, around)
    if around:
        fence()


@kernel("void(uint64[::1], int64[::1], intp, intp, intp, intp)")
def add(rows: Rows, ends: Rows, counters: int, top: int, nbytes: int, stride: int) -> None:
    """Add votes to streaming counters, laid out as tiles of ``top`` planes of ``stride`` bytes."""
    scratch = np.zeros(stride + 64, np.uint8)
    zeros = (np.intp(scratch.ctypes.data) + 63) // 64 * 64
    for offset in range(0, nbytes, stride):
        size = min(stride, nbytes - offset)
        add_tile(rows, ends, offset, zeros, size, counters + offset * top, stride, top)


@kernel("void(intp, intp, uint64, intp, uint64, intp, intp, intp, boolean)")
def finish(
    counters: int,
    top: int,
    bias: Word,
    cast: int,
    even: Word,
    out: int,
    nbytes: int,
    stride: int,
    around: bool,
) -> None:
    """The majority of what was added to streaming counters, which stay as they are."""
    for offset in range(0, nbytes, stride):
        size = min(stride, nbytes - offset)
        tile = counters + offset * top
        decide(tile, stride, top, size, bias, cast + offset, even, out + offset, around)
    if around:
        fence()
