"""The same functions in torch operations, for tensors on any device.

Integers only, until the weights: multiplication and subtraction are two operations with two roundings, so
the bits equal those of the CPU backends. Chunks bound the temporaries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.bits.layout import LINE

ELEMENTS = 1 << 22  # of a tensor worked on at once, a multiple of 512

_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: the highest byte of the product holds their bits


def _signed(value: int) -> int:
    """The 64-bit pattern ``value`` as torch's signed integer."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int64."""
    return torch.bitwise_and(z >> by, 2 ** (64 - by) - 1)


def _hash_words(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """``splitmix64(seed + w)`` for ``count`` words from ``first``, as int64."""
    z = torch.arange(count, dtype=torch.int64, device=device)
    z += _signed(seed + first + 0x9E3779B97F4A7C15)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shift(z, 31)


def _gather(flags: Tensor) -> Tensor:
    """Pack flags (bool, a multiple of 64 of them) into int64 words, least significant bit first."""
    octets = flags.view(torch.int64) * _GATHER
    return ((octets >> 56) & 0xFF).to(torch.uint8).view(torch.int64)


def pack(patterns: Tensor, infinity: int, seed: int, out: Tensor) -> bool:
    """Pack bit patterns (int16 or int32, flat) into ``out`` (uint8); returns True if all are finite."""
    magnitude = 2 ** (8 * patterns.element_size() - 1) - 1
    unbounded = torch.zeros((), dtype=torch.bool, device=patterns.device)
    for start in range(0, patterns.numel(), ELEMENTS):
        x = patterns[start : start + ELEMENTS]
        positive = torch.zeros(-(-x.numel() // LINE) * LINE, dtype=torch.bool, device=x.device)
        zero = torch.zeros_like(positive)
        positive[: x.numel()] = (x > 0) & (x <= infinity)
        absolute = x & magnitude
        zero[: x.numel()] = absolute == 0
        unbounded |= (absolute >= infinity).any()
        words = _gather(positive)
        words |= _gather(zero) & _hash_words(seed, start // 64, words.numel(), x.device)
        out[start // 8 : start // 8 + 8 * words.numel()] = words.view(torch.uint8)
    return not bool(unbounded)


def _table(plus: float, minus: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The eight elements of every byte: shape (256, 8)."""
    value = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)
    signs = torch.tensor([minus, plus], dtype=dtype, device=device)
    return signs[value & 1]


def _expand(table: Tensor, bits: Tensor, n: int) -> Tensor:
    return torch.index_select(table, 0, bits[: -(-n // 8)].to(torch.int32)).view(-1)[:n]


def unpack(bits: Tensor, out: Tensor, plus: float, minus: float) -> None:
    """Write ``plus`` or ``minus`` for every bit into ``out`` (flat, any dtype)."""
    table = _table(plus, minus, out.dtype, out.device)
    for start in range(0, out.numel(), ELEMENTS):
        part = out[start : start + ELEMENTS]
        part.copy_(_expand(table, bits[start // 8 :], part.numel()))


def apply_(w: Tensor, bits: Tensor, step: float, decay: float) -> None:
    """``w <- round(w * decay) - step * sign``, in place; ``w`` is flat float32."""
    table = _table(step, -step, w.dtype, w.device)
    for start in range(0, w.numel(), ELEMENTS):
        part = w[start : start + ELEMENTS]
        part.mul_(decay)
        part.sub_(_expand(table, bits[start // 8 :], part.numel()))
