"""Kernels that turn numbers into sign bits and back, compiled by numba.

Imported by :mod:`optim.bits.fast` on first use, since the kernels compile on import. A kernel works on raw
addresses, one 64-bit word of votes and its 64 elements at a time; numbers are looked at as bit patterns, so
that neither flush-to-zero nor the rounding mode can change a vote. Stores around the cache pay once the
output is larger than the cache: an ordinary store reads the line first.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from optim.bits.jit import intrinsic, kernel

I1, I8, I16 = ir.IntType(1), ir.IntType(8), ir.IntType(16)
I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
Word = Any  # a 64-bit word, unsigned; addresses and sizes are ints

MASK = ir.VectorType(I1, 64)


def _pointer(builder: Any, address: Any, target: Any) -> Any:
    return builder.inttoptr(address, target.as_pointer())


def _splat(builder: Any, value: Any, lanes: int) -> Any:
    """A vector that repeats ``value``."""
    vector = ir.VectorType(value.type, lanes)
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def _load_unsigned(bits: int) -> Any:
    integer = ir.IntType(bits)

    @intrinsic
    def load(context: Any, address: Any) -> Any:
        """The unsigned integer at an address."""

        def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = builder.load(_pointer(builder, args[0], integer), align=1)
            return value if bits == 64 else builder.zext(value, I64)

        return types.uint64(types.intp), emit

    return load


load8, load16, load32, load64 = (_load_unsigned(bits) for bits in (8, 16, 32, 64))


def _store_unsigned(bits: int) -> Any:
    integer = ir.IntType(bits)

    @intrinsic
    def store(context: Any, address: Any, value: Any) -> Any:
        """Write the low bits of ``value`` at an address."""

        def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
            value = args[1] if bits == 64 else builder.trunc(args[1], integer)
            builder.store(value, _pointer(builder, args[0], integer), align=1)
            return generator.get_dummy_value()

        return types.void(types.intp, types.uint64), emit

    return store


store8, store16, store32, store64 = (_store_unsigned(bits) for bits in (8, 16, 32, 64))


@intrinsic
def load_float(context: Any, address: Any) -> Any:
    """The float32 at an address."""

    def emit(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load(_pointer(builder, args[0], F32), align=4)

    return types.float32(types.intp), emit


@intrinsic
def store_float(context: Any, address: Any, value: Any) -> Any:
    """Write a float32 at an address."""

    def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[1], _pointer(builder, args[0], F32), align=4)
        return generator.get_dummy_value()

    return types.void(types.intp, types.float32), emit


def _classify(bits: int) -> Any:
    integer = ir.IntType(bits)
    vector = ir.VectorType(integer, 64)
    magnitude = (1 << (bits - 1)) - 1

    @intrinsic
    def classify(context: Any, address: Any, infinity: Any) -> Any:
        """Which of 64 floats are positive, which are zero, which are infinite or NaN: three words."""

        def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
            limit = _splat(builder, builder.trunc(args[1], integer), 64)
            value = builder.load(_pointer(builder, args[0], vector), align=bits // 8)
            absolute = builder.and_(value, ir.Constant(vector, [magnitude] * 64))
            less_one = builder.sub(value, ir.Constant(vector, [1] * 64))
            positive = builder.icmp_unsigned("<", less_one, limit)  # 1 <= pattern <= infinity
            zero = builder.icmp_unsigned("==", absolute, ir.Constant(vector, [0] * 64))
            unbounded = builder.icmp_unsigned(">=", absolute, limit)
            words = [builder.bitcast(mask, I64) for mask in (positive, zero, unbounded)]
            return generator.make_tuple(builder, signature.return_type, words)

        return types.UniTuple(types.uint64, 3)(types.intp, types.uint64), emit

    return classify


classify16, classify32 = _classify(16), _classify(32)


def _expand(bits: int, around: bool) -> Any:
    integer = ir.IntType(bits)
    lanes = 512 // bits if around else 64  # one 64-byte line for each store around the cache

    @intrinsic
    def expand(context: Any, address: Any, word: Any, plus: Any, minus: Any) -> Any:
        """Write 64 elements: pattern ``plus`` where the bit is 1, ``minus`` where it is 0."""

        def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, word = args[:2]
            plus, minus = (_splat(builder, builder.trunc(x, integer), lanes) for x in args[2:])
            for part in range(64 // lanes):
                bit = part * lanes
                shifted = builder.lshr(word, ir.Constant(I64, bit))
                narrow = shifted if lanes == 64 else builder.trunc(shifted, ir.IntType(lanes))
                mask = builder.bitcast(narrow, ir.VectorType(I1, lanes))
                target = builder.add(address, ir.Constant(I64, bit * bits // 8))
                write = builder.store(
                    builder.select(mask, plus, minus),
                    _pointer(builder, target, ir.VectorType(integer, lanes)),
                    align=64 if around else bits // 8,
                )
                if around:
                    write.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
            return generator.get_dummy_value()

        return types.void(types.intp, types.uint64, types.uint64, types.uint64), emit

    return expand


expand8, expand16, expand32 = _expand(8, False), _expand(16, False), _expand(32, False)
expand8_around, expand16_around, expand32_around = _expand(8, True), _expand(16, True), _expand(32, True)


@intrinsic
def fence(context: Any) -> Any:
    """Order the stores around the cache before everything that follows."""

    def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return generator.get_dummy_value()

    return types.void(), emit


@intrinsic
def move64(context: Any, address: Any, word: Any, step: Any, decay: Any) -> Any:
    """64 weights: multiply by ``decay`` and round, then subtract ``step`` or ``-step`` and round."""

    def emit(generator: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, word, step, decay = args
        pointer = _pointer(builder, address, ir.VectorType(F32, 64))
        mask = builder.bitcast(word, MASK)
        signed = builder.select(mask, _splat(builder, step, 64), _splat(builder, builder.fneg(step), 64))
        decayed = builder.fmul(builder.load(pointer, align=4), _splat(builder, decay, 64))
        builder.store(builder.fsub(decayed, signed), pointer, align=4)
        return generator.get_dummy_value()

    return types.void(types.intp, types.uint64, types.float32, types.float32), emit


@kernel("uint64(uint64)")
def splitmix64(state: Word) -> Word:
    """The generator of :func:`optim.bits.layout.splitmix64`."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel("uint64(intp, intp, intp, uint64, uint64)")
def pack32(x: int, n: int, out: int, seed: Word, infinity: Word) -> Word:
    """Pack ``n`` patterns of 32 bits into whole words; returns nonzero if one is infinite or NaN."""
    unbounded = np.uint64(0)
    full = n // 64
    for w in range(full):
        positive, zero, bad = classify32(x + 256 * w, infinity)
        store64(out + 8 * w, positive | (zero & splitmix64(seed + np.uint64(w))))
        unbounded |= bad
    if n % 64:
        chosen = splitmix64(seed + np.uint64(full))
        word = np.uint64(0)
        for i in range(n % 64):
            value = load32(x + 256 * full + 4 * i)
            absolute = value & np.uint64(0x7FFFFFFF)
            bit = (chosen >> np.uint64(i)) & np.uint64(1)
            if absolute != 0:
                bit = np.uint64(value <= infinity)
            word |= bit << np.uint64(i)
            unbounded |= np.uint64(absolute >= infinity)
        store64(out + 8 * full, word)
    return unbounded


@kernel("uint64(intp, intp, intp, uint64, uint64)")
def pack16(x: int, n: int, out: int, seed: Word, infinity: Word) -> Word:
    """:func:`pack32` for patterns of 16 bits (bfloat16, float16)."""
    unbounded = np.uint64(0)
    full = n // 64
    for w in range(full):
        positive, zero, bad = classify16(x + 128 * w, infinity)
        store64(out + 8 * w, positive | (zero & splitmix64(seed + np.uint64(w))))
        unbounded |= bad
    if n % 64:
        chosen = splitmix64(seed + np.uint64(full))
        word = np.uint64(0)
        for i in range(n % 64):
            value = load16(x + 128 * full + 2 * i)
            absolute = value & np.uint64(0x7FFF)
            bit = (chosen >> np.uint64(i)) & np.uint64(1)
            if absolute != 0:
                bit = np.uint64(value <= infinity)
            word |= bit << np.uint64(i)
            unbounded |= np.uint64(absolute >= infinity)
        store64(out + 8 * full, word)
    return unbounded


@kernel("void(intp, intp, intp, uint64, uint64, boolean)")
def unpack32(bits: int, n: int, out: int, plus: Word, minus: Word, around: bool) -> None:
    """Write ``n`` patterns of 32 bits, ``plus`` or ``minus``."""
    full = n // 64
    if around:
        for w in range(full):
            expand32_around(out + 256 * w, load64(bits + 8 * w), plus, minus)
        fence()
    else:
        for w in range(full):
            expand32(out + 256 * w, load64(bits + 8 * w), plus, minus)
    for i in range(64 * full, n):
        one = (load8(bits + i // 8) >> np.uint64(i & 7)) & np.uint64(1)
        store32(out + 4 * i, plus if one != 0 else minus)


@kernel("void(intp, intp, intp, uint64, uint64, boolean)")
def unpack16(bits: int, n: int, out: int, plus: Word, minus: Word, around: bool) -> None:
    """Write ``n`` patterns of 16 bits, ``plus`` or ``minus``."""
    full = n // 64
    if around:
        for w in range(full):
            expand16_around(out + 128 * w, load64(bits + 8 * w), plus, minus)
        fence()
    else:
        for w in range(full):
            expand16(out + 128 * w, load64(bits + 8 * w), plus, minus)
    for i in range(64 * full, n):
        one = (load8(bits + i // 8) >> np.uint64(i & 7)) & np.uint64(1)
        store16(out + 2 * i, plus if one != 0 else minus)


@kernel("void(intp, intp, intp, uint64, uint64, boolean)")
def unpack8(bits: int, n: int, out: int, plus: Word, minus: Word, around: bool) -> None:
    """Write ``n`` patterns of 8 bits, ``plus`` or ``minus``."""
    full = n // 64
    if around:
        for w in range(full):
            expand8_around(out + 64 * w, load64(bits + 8 * w), plus, minus)
        fence()
    else:
        for w in range(full):
            expand8(out + 64 * w, load64(bits + 8 * w), plus, minus)
    for i in range(64 * full, n):
        one = (load8(bits + i // 8) >> np.uint64(i & 7)) & np.uint64(1)
        store8(out + i, plus if one != 0 else minus)


@kernel("void(intp, intp, intp, float32, float32)")
def apply32(w: int, n: int, bits: int, step: float, decay: float) -> None:
    """``n`` float32 weights in place: multiply by ``decay``, then subtract the signed step."""
    full = n // 64
    for i in range(full):
        move64(w + 256 * i, load64(bits + 8 * i), step, decay)
    for i in range(64 * full, n):
        one = (load8(bits + i // 8) >> np.uint64(i & 7)) & np.uint64(1)
        signed = step if one != 0 else -step
        store_float(w + 4 * i, load_float(w + 4 * i) * decay - signed)
