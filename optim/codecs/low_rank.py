"""lowrank: the product of two thin factors, found by one warm step of subspace iteration a round.

PowerSGD (arXiv 1905.13727, algorithm 1): ``P = orth(X R)``, ``Q = Xᵀ P`` with the last round's ``Q`` as
``R``; here for one encoder, whose result others only decode. The factors travel as int16 with one scale each,
so that the entries of ``P Qᵀ`` are whole numbers below 2^53 before they are scaled: in float64 their sums are
exact in any order, and every BLAS gives the same bits.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from optim.bits.layout import hash_words
from optim.codecs.base import (
    F32,
    LARGEST,
    SMALLEST_SCALE,
    U8,
    Codec,
    scales_at,
    scales_problem,
)
from protos.codecs import FACTOR_BYTES, SCALE_BYTES, CodecSpec

F64 = NDArray[np.float64]

CODES: Final = 32767  # largest magnitude of an entry of a factor
COLD_STEPS: Final = 4  # steps of subspace iteration for a stream's first tensor
_PRODUCT_PIECE: Final = 1 << 18  # entries of a product made at once: float64 takes 2 MiB


class LowRank(Codec):
    """``lowrank:R``, ``lowrank:R+CODEC``: rank ``r = min(R, rows, columns)``.

    Two little-endian float32 scales, the left factor ``int16[rows, r]``, the right factor
    ``int16[columns, r]``, then the rest ``x - P Qᵀ`` in the residual's codec, if there is one.
    The state is ``{"right": float32[columns, r]}``, the last right factor with columns of length 1; zeros
    before the first tensor.
    """

    def __init__(self, spec: CodecSpec, shape: tuple[int, ...], residual: Codec | None) -> None:
        super().__init__(spec, shape)
        self.rank = spec.rank(shape)
        self.residual = residual
        self._left_end = 2 * SCALE_BYTES + FACTOR_BYTES * self.rank * self.rows
        self._right_end = self._left_end + FACTOR_BYTES * self.rank * self.columns

    def state(self) -> dict[str, F32]:
        """``{"right": zeros[columns, r]}``."""
        return {"right": np.zeros((self.columns, self.rank), np.float32)}

    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        right = (self.state() if state is None else state)["right"]
        if right.shape != (self.columns, self.rank):
            raise ValueError(f"{self!r}: the state's right factor has shape {right.shape}")
        largest = max(float(x.max()), -float(x.min()))
        factors = subspace_step(x, right, largest) if largest > 0 else None
        written = factors is not None and self._write(out, *factors)
        if not written:
            out[: self._right_end] = 0
        if self.residual is not None:
            rest = x
            if written:
                rest = np.empty_like(x)
                self._product(out, rest)
                with np.errstate(over="ignore"):
                    np.subtract(x, rest, out=rest)
                np.clip(rest, -LARGEST, LARGEST, out=rest)
            self.residual.encode(rest, out[self._right_end :], seed=seed)
        if factors is not None:
            right[:] = unit_columns(factors[1])

    def _write(self, out: U8, left: F64, right: F64, unit: float) -> bool:
        """Write both factors; False if their product would reach down to the subnormal numbers."""
        left_scale = np.float32(np.abs(left).max() / CODES)
        right_scale = np.float32(np.abs(right).max() * unit / CODES)
        if float(left_scale) * float(right_scale) < SMALLEST_SCALE:
            return False
        scales_at(out, 0, 2)[:] = left_scale, right_scale
        out[2 * SCALE_BYTES : self._left_end].view("<i2")[:] = _codes(left, float(left_scale))
        out[self._left_end : self._right_end].view("<i2")[:] = _codes(right * unit, float(right_scale))
        return True

    def _factors(self, data: U8) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
        left = data[2 * SCALE_BYTES : self._left_end].view("<i2").reshape(self.rows, self.rank)
        right = data[self._left_end : self._right_end].view("<i2").reshape(self.columns, self.rank)
        return left, right

    def _product(self, data: U8, out: F32, *, add: bool = False) -> None:
        """Write the product of the factors to ``out``, or add it; what overflows becomes the largest
        number."""
        left_scale, right_scale = (float(scale) for scale in scales_at(data, 0, 2))
        scale = left_scale * right_scale  # 24 + 24 bits: exact in float64
        left, right = (factor.astype(np.float64) for factor in self._factors(data))
        step = max(1, _PRODUCT_PIECE // self.columns)
        with np.errstate(over="ignore"):
            for start in range(0, self.rows, step):
                part = out[start : start + step]
                product = left[start : start + step] @ right.T
                product *= scale
                product += 0.0  # -0 or 0, as the BLAS has it, becomes 0
                np.clip(product, -LARGEST, LARGEST, out=product)
                if add:
                    part += product.astype(np.float32)
                    np.clip(part, -LARGEST, LARGEST, out=part)
                else:
                    part[:] = product

    def _decode(self, data: U8, out: F32) -> None:
        if self.residual is None:
            self._product(data, out)
        else:
            self.residual.decode(data[self._right_end :], out)
            self._product(data, out, add=True)

    def _problem(self, data: U8) -> str:
        found = scales_problem(scales_at(data, 0, 2))
        if not found and any(bool((factor < -CODES).any()) for factor in self._factors(data)):
            found = f"an entry of a factor is outside -{CODES} to {CODES}"
        if not found and self.residual is not None:
            found = self.residual.problem(data[self._right_end :])
        return found


def subspace_step(x: F32, right: F32, largest: float) -> tuple[F64, F64, float]:
    """Left factor with orthonormal columns ``[rows, r]``, right factor ``[columns, r]`` and the power of two
    that the right factor has to be multiplied by.

    ``right``: the last right factor, or zeros for :data:`COLD_STEPS` steps from fixed noise.
    ``largest``: the largest magnitude in ``x``, above 0.
    """
    # products of huge or tiny entries must neither overflow float32 nor sink to its subnormal numbers
    exponent = min(max(math.frexp(largest)[1], -96), 96)
    unit = math.ldexp(1.0, exponent)
    cold = not right.any()
    basis = _noise(right.shape) if cold else right
    for _ in range(COLD_STEPS if cold else 1):
        left = np.linalg.qr((x @ (basis / np.float32(unit))).astype(np.float64))[0]
        # two gemms on x as it lies in memory; (leftᵀ x)ᵀ is faster than xᵀ left
        product = ((left.T / unit).astype(np.float32) @ x).T
        basis = unit_columns(product)
    return left, product.astype(np.float64), unit


def unit_columns(factor: NDArray[np.float32] | F64) -> F32:
    """Columns divided by their lengths; a column of zeros stays."""
    wide = factor.astype(np.float64)
    lengths = np.sqrt(np.einsum("ij,ij->j", wide, wide))
    return (wide / np.where(lengths > 0, lengths, 1.0)).astype(np.float32)


def _noise(shape: tuple[int, ...]) -> F32:
    """Fixed numbers, uniform from -1 to 1."""
    words = hash_words(0, 0, shape[0] * shape[1])
    return ((words >> np.uint64(40)).astype(np.float64) / 2**23 - 1).astype(np.float32).reshape(shape)


def _codes(factor: F64, scale: float) -> NDArray[np.int16]:
    ratios = np.rint(factor / scale)
    return np.clip(ratios, -CODES, CODES).astype(np.int16).reshape(-1)
