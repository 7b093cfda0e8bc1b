"""From tensors to packed votes and back: pack, unpack, and the step against the voted signs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optim.bits import device
from optim.bits.backends import current
from optim.bits.layout import packed_nbytes

# dtype of the numbers: their bit patterns in torch, in numpy, and the pattern of infinity
_PATTERNS: dict[torch.dtype, tuple[torch.dtype, type[np.generic], int]] = {
    torch.float32: (torch.int32, np.uint32, 0x7F800000),
    torch.bfloat16: (torch.int16, np.uint16, 0x7F80),
    torch.float16: (torch.int16, np.uint16, 0x7C00),
}
_INFINITE = 2.0**128 - 2.0**103  # the least number that rounds to no finite float32
_UNPACKED: dict[torch.dtype, tuple[torch.dtype, type[np.generic]]] = {
    **{dtype: rule[:2] for dtype, rule in _PATTERNS.items()},
    torch.int8: (torch.int8, np.uint8),
}


def _names(dtypes: Any) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _check_bits(bits: Tensor, n: int, at: torch.device, name: str) -> None:
    if bits.dtype != torch.uint8 or bits.ndim != 1 or not bits.is_contiguous():
        raise TypeError(
            f"{name} must be a contiguous one-dimensional uint8 tensor, not {_names([bits.dtype])} "
            f"of shape {tuple(bits.shape)} with strides {bits.stride()}"
        )
    if bits.numel() != packed_nbytes(n):
        raise ValueError(f"{name} has {bits.numel()} bytes; {n} elements are packed in {packed_nbytes(n)}")
    if bits.device != at:
        raise ValueError(f"{name} is on {bits.device}, the numbers are on {at}")


def _check_contiguous(x: Tensor, name: str) -> None:
    if x.layout != torch.strided or not x.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(x.shape)} is not contiguous; pass {name}.contiguous()")


def _patterns(x: Tensor) -> NDArray[Any]:
    """A CPU tensor's memory as a flat array of unsigned bit patterns."""
    as_integers, as_unsigned = _UNPACKED[x.dtype]
    array: NDArray[Any] = x.detach().view(-1).view(as_integers).numpy()
    return array.view(as_unsigned)


def _bytes(bits: Tensor) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = bits.detach().numpy()
    return array


def _written(x: Tensor) -> None:
    """Tell autograd that ``x`` has changed, as it knows of no write through numpy."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


def pack(x: Tensor, *, seed: int, out: Tensor | None = None) -> tuple[Tensor, bool]:
    """Pack the signs of ``x``: one bit an element, 1 for +1.

    ``x``: contiguous float32, bfloat16 or float16 of any shape and device, taken flat. Returns
    ``uint8[packed_nbytes(n)]`` on the same device, which is ``out`` if given, and whether all elements are
    finite. Element i is bit ``i & 7`` of byte ``i >> 3``; pad bits are 0.

    The vote is defined on the bit pattern: above zero +1, below zero -1 (subnormal and infinite numbers
    too), NaN -1, and a zero of either sign votes bit ``i & 63`` of ``splitmix64(seed + (i >> 6))``, so that
    an element that never gets a gradient does not drift. All backends and devices give the same bytes.

    Raises ``TypeError`` for another dtype, ``ValueError`` for a tensor that is not contiguous, a seed outside
    0 to 2^64 - 1, or an ``out`` of another size or device.
    """
    if x.dtype not in _PATTERNS:
        raise TypeError(f"cannot pack {_names([x.dtype])}: signs are taken of {_names(_PATTERNS)}")
    _check_contiguous(x, "x")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} must be from 0 to 2^64 - 1")
    given = out is not None
    if out is None:
        out = torch.empty(packed_nbytes(x.numel()), dtype=torch.uint8, device=x.device)
    else:
        _check_bits(out, x.numel(), x.device, "out")
    as_integers, _, infinity = _PATTERNS[x.dtype]
    if x.numel() == 0:
        return out, True
    if x.device.type == "cpu":
        finite = current().pack(_patterns(x), infinity, seed, _bytes(out))
        if given:
            _written(out)
    else:
        finite = device.pack(x.detach().view(-1).view(as_integers), infinity, seed, out)
    return out, finite


def unpack(
    bits: Tensor,
    n: int,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """``n`` elements from packed signs: ``scale`` for a 1 and ``-scale`` for a 0.

    ``bits``: ``uint8[packed_nbytes(n)]``. ``dtype``: float32, bfloat16, float16, or int8 with an integral
    scale up to 127; ``scale`` is rounded to it once. Returns a tensor of shape (n,) on the device of
    ``bits``, or ``out`` if given: contiguous, of n elements in any shape, whose dtype must be ``dtype``.

    Raises ``TypeError`` for other dtypes, ``ValueError`` for other sizes or devices and a scale that is not
    finite in ``dtype``.
    """
    if dtype not in _UNPACKED:
        raise TypeError(f"cannot unpack to {_names([dtype])}: signs become {_names(_UNPACKED)}")
    _check_bits(bits, n, bits.device, "bits")
    given = out is not None
    if out is None:
        out = torch.empty(n, dtype=dtype, device=bits.device)
    else:
        if out.dtype != dtype:
            raise TypeError(f"out is {_names([out.dtype])} where {_names([dtype])} is asked for")
        if out.numel() != n or out.device != bits.device:
            raise ValueError(
                f"out has {out.numel()} elements on {out.device}; needed are {n} on {bits.device}"
            )
        _check_contiguous(out, "out")
    if not math.isfinite(scale) or (dtype == torch.int8 and (scale != int(scale) or abs(scale) > 127)):
        raise ValueError(f"scale {scale} must be finite, and for int8 an integer from -127 to 127")
    values = torch.tensor([scale, -scale], dtype=dtype)
    if not math.isfinite(float(values[0])):
        raise ValueError(f"scale {scale} is not finite in {_names([dtype])}")
    if n == 0:
        return out
    if bits.device.type == "cpu":
        plus, minus = _patterns(values).tolist()
        current().unpack(_bytes(bits), _patterns(out), plus, minus)
        if given:
            _written(out)
    else:
        device.unpack(bits, out.detach().view(-1), scale, -scale)
    return out


def apply_(w: Tensor, bits: Tensor, *, step: float, decay: float = 1.0) -> None:
    """Move ``w`` in place against the voted signs: ``w <- round(w * decay) - step * sign``.

    ``w``: contiguous float32 of any shape; ``bits``: ``uint8[packed_nbytes(w.numel())]`` on its device.
    ``step`` and ``decay`` are rounded to float32 once. Product and difference are rounded separately (a fused
    multiply-add would change a fifth of the weights), so the weights have the same bits on every backend
    and device. Flush-to-zero changes nothing for steps of 1e-30 and more.

    Raises ``TypeError`` for another dtype (a step below half an ulp is lost in 16 bits: keep float32
    weights), ``ValueError`` for a tensor that is not contiguous, other sizes or devices and a step or decay
    that is not finite, ``RuntimeError`` if autograd records ``w``.
    """
    if w.dtype != torch.float32:
        raise TypeError(f"w is {_names([w.dtype])}: signs are applied to float32 weights only")
    _check_contiguous(w, "w")
    _check_bits(bits, w.numel(), w.device, "bits")
    if w.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("w requires grad and is changed in place; call apply_ under torch.no_grad()")
    step32, decay32 = _float32(step, "step"), _float32(decay, "decay")
    if w.numel() == 0:
        return
    if w.device.type == "cpu":
        current().apply_(w.detach().view(-1).numpy(), _bytes(bits), step32, decay32)
        _written(w)
    else:
        device.apply_(w.detach().view(-1), bits, float(step32), float(decay32))


def _float32(value: float, name: str) -> np.float32:
    if not abs(value) < _INFINITE:
        raise ValueError(f"{name} {value} is not a finite float32")
    return np.float32(value)
