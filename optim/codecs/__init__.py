"""Codecs: how a tensor becomes bytes, and the one tensor that these bytes are on every machine.

:mod:`protos.codecs` has the names and the sizes. :func:`codec_of` gives the codec of a name and a shape, a
stateless object that threads may share; what an encoder carries from one round to the next is a dictionary
that its owner keeps. Decoding gives the same bits on every machine, whatever its vector units and its BLAS;
except for fp32 and bf16, which pass subnormal numbers on, its treatment of those does not matter either.
Encoding is repeatable on one machine, and its result goes to the others as bytes.
:mod:`~optim.codecs.reference` is the definition, entry by entry. NumPy only: a coordinator has no torch.

What is lost is the caller's business: error feedback keeps ``x - decode(encode(x))`` and adds it to the next
``x`` (EF-SGD, arXiv 1901.09847). For every codec that residual is shorter than ``x``, so it stays bounded.
"""

from __future__ import annotations

from functools import lru_cache

from optim.codecs.base import F32, SMALLEST_SCALE, U8, Codec
from optim.codecs.blocks import Int4, Int8
from optim.codecs.dense import Bf16, Fp32
from optim.codecs.levels import Ternary, TwoBit
from optim.codecs.low_rank import LowRank
from optim.codecs.signs import OneBit, OneBitRow
from protos.codecs import CodecError, CodecSpec

__all__ = ["F32", "SMALLEST_SCALE", "U8", "Codec", "codec_of"]

_KINDS: dict[str, type[Codec]] = {
    "fp32": Fp32,
    "bf16": Bf16,
    "int8": Int8,
    "int4": Int4,
    "2bit": TwoBit,
    "ternary": Ternary,
    "1bit": OneBit,
    "1bit-row": OneBitRow,
}


def codec_of(name: str, shape: tuple[int, ...]) -> Codec:
    """The codec ``name`` for tensors of ``shape``.

    A shape without entries is allowed: it is encoded as scales of zero, if at all. Raises
    :class:`protos.codecs.CodecError` for an unknown name and a negative size.
    """
    return _codec_of(name, tuple(int(size) for size in shape))


@lru_cache(maxsize=4096)
def _codec_of(name: str, shape: tuple[int, ...]) -> Codec:
    spec = CodecSpec.parse(name)
    if any(size < 0 for size in shape):
        raise CodecError(f"codec {name!r}: a tensor cannot have the shape {list(shape)}")
    return _build(spec, shape)


def _build(spec: CodecSpec, shape: tuple[int, ...]) -> Codec:
    if spec.kind != "lowrank":
        return _KINDS[spec.kind](spec, shape)
    return LowRank(spec, shape, _build(spec.residual, shape) if spec.residual else None)
