"""fp32 and bf16: numbers as they are, and their upper halves."""

from __future__ import annotations

import numpy as np

from optim.codecs.base import F32, PIECE, U8, Codec, all_finite

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST_BF16 = np.uint32(0x7F7F)
_INFINITE_BF16 = np.uint16(0x7F80)


class Fp32(Codec):
    """Little-endian float32: exact, subnormal numbers and the sign of zero included."""

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        out.view("<f4")[:] = x.reshape(-1)

    def _decode(self, data: U8, out: F32) -> None:
        out.reshape(-1)[:] = data.view("<f4")

    def _problem(self, data: U8) -> str:
        return "" if all_finite(data.view("<f4")) else "an entry is NaN or infinite"


class Bf16(Codec):
    """Little-endian bfloat16, rounded to the nearest, ties to even.

    Works on bit patterns. A number that would round to infinity becomes the largest bfloat16 instead.
    """

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        patterns, halves = x.reshape(-1).view(np.uint32), out.view("<u2")
        for start in range(0, patterns.size, PIECE):
            pattern = patterns[start : start + PIECE]
            rounded = pattern & _MAGNITUDE
            rounded += np.uint32(0x7FFF) + ((rounded >> np.uint32(16)) & np.uint32(1))
            rounded >>= np.uint32(16)
            np.minimum(rounded, _LARGEST_BF16, out=rounded)
            rounded |= (pattern >> np.uint32(16)) & np.uint32(0x8000)
            halves[start : start + PIECE] = rounded

    def _decode(self, data: U8, out: F32) -> None:
        patterns, halves = out.reshape(-1).view(np.uint32), data.view("<u2")
        for start in range(0, patterns.size, PIECE):
            pattern = patterns[start : start + PIECE]
            pattern[:] = halves[start : start + PIECE]
            pattern <<= np.uint32(16)

    def _problem(self, data: U8) -> str:
        magnitudes = data.view("<u2") & np.uint16(0x7FFF)
        return "an entry is NaN or infinite" if bool((magnitudes >= _INFINITE_BF16).any()) else ""
