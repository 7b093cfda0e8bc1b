"""What all codecs share: the interface with its checks, scales, and work in pieces that stay in the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from optim.bits.layout import hash_words
from protos.codecs import SCALE_BYTES, CodecSpec, matrix_shape, round_up

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

PIECE: Final = 65536  # elements worked on at once: the temporaries of a piece stay in the second-level cache
LARGEST: Final = float(np.finfo(np.float32).max)

# A smaller scale is written as 0. What is decoded is then 0 or far above the subnormal numbers, of which a
# machine that flushes them to zero would make another tensor.
SMALLEST_SCALE: Final = 2.0**-100


class Codec(ABC):
    """Encoder and decoder for tensors of one shape; without state, so that threads may share it.

    Attributes:
        spec: the parsed name.
        shape: of the tensors.
        rows, columns: the matrix that the tensor is seen as (:func:`protos.codecs.matrix_shape`).
        size: entries of a tensor.
        nbytes: bytes of an encoded tensor.
    """

    def __init__(self, spec: CodecSpec, shape: tuple[int, ...]) -> None:
        self.spec = spec
        self.shape = shape
        self.rows, self.columns = matrix_shape(shape)
        self.size = self.rows * self.columns
        self.nbytes = spec.nbytes(shape)

    def __repr__(self) -> str:
        return f"<codec {self.spec} of {list(self.shape)}: {self.nbytes} bytes>"

    def state(self) -> dict[str, F32]:
        """Fresh state of an encoder, to be handed to every :meth:`encode` of one stream; often empty."""
        return {}

    def encode(self, x: F32, out: U8, *, seed: int = 0, state: dict[str, F32] | None = None) -> None:
        """Write ``x`` to ``out``.

        Args:
            x: float32, contiguous, of this shape or flat; not changed.
            out: ``uint8[nbytes]``, contiguous; its contents are undefined after an error.
            seed: 64 bits; codecs without a zero give an exact zero one of two signs by a hash of it.
            state: what :meth:`state` returned for this stream, changed in place after a success; without it
                every tensor is encoded as the first one.

        Raises:
            ValueError: ``x`` holds NaN or infinity, or an argument has another size, dtype or layout.
        """
        flat = _flat(x, self.size, "x", self)
        self._check_bytes(out, "out")
        if not out.flags.writeable:
            raise ValueError(f"{self!r}: out is read-only")
        if not 0 <= seed < 2**64:
            raise ValueError(f"{self!r}: seed {seed} must be from 0 to 2^64 - 1")
        if not all_finite(flat):
            bad = int(np.flatnonzero(~np.isfinite(flat))[0])
            raise ValueError(f"{self!r}: entry {bad} is {flat[bad]}; only finite numbers can be encoded")
        if self.size == 0:
            out[:] = 0
            return
        self._encode(flat.reshape(self.rows, self.columns), out, seed, state)

    def decode(self, data: U8, out: F32 | None = None) -> F32:
        """The tensor in ``data``, float32 of this shape; the same bits on every machine.

        Args:
            data: ``uint8[nbytes]``, contiguous, written by :meth:`encode` or without a :meth:`problem`.
            out: contiguous float32 of this size to write to and return, in any shape.

        Raises:
            ValueError: an argument has another size, dtype or layout.
        """
        self._check_bytes(data, "data")
        result = np.empty(self.shape, np.float32) if out is None else out
        flat = _flat(result, self.size, "out", self)
        if self.size:
            self._decode(data, flat.reshape(self.rows, self.columns))
        return result

    def problem(self, data: U8) -> str:
        """Why bytes from a peer must not be decoded, in words; empty if they may be.

        Bytes without a problem decode to finite numbers.
        """
        try:
            self._check_bytes(data, "the payload")
        except ValueError as error:
            return str(error)
        found = self._problem(data) if self.size else ""
        return f"{self!r}: {found}" if found else ""

    def _check_bytes(self, data: U8, name: str) -> None:
        if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
            raise ValueError(
                f"{self!r}: {name} must be contiguous one-dimensional uint8, not {data.dtype} of {data.shape}"
            )
        if data.size != self.nbytes:
            raise ValueError(f"{self!r}: {name} has {data.size} bytes")

    @abstractmethod
    def _encode(self, x: F32, out: U8, seed: int, state: dict[str, F32] | None) -> None:
        """Encode finite ``x[rows, columns]`` with at least one entry."""

    @abstractmethod
    def _decode(self, data: U8, out: F32) -> None:
        """Decode to ``out[rows, columns]`` with at least one entry."""

    @abstractmethod
    def _problem(self, data: U8) -> str:
        """What is wrong with bytes of the right size."""


def _flat(x: F32, size: int, name: str, codec: Codec) -> F32:
    if x.dtype != np.float32 or not x.flags.c_contiguous:
        raise ValueError(f"{codec!r}: {name} must be contiguous float32, not {x.dtype} of {x.shape}")
    if x.size != size:
        raise ValueError(f"{codec!r}: {name} of shape {x.shape} has {x.size} entries, not {size}")
    return x.reshape(-1)


def all_finite(flat: F32) -> bool:
    """Whether no entry is NaN or infinite."""
    return all(bool(np.isfinite(flat[start : start + PIECE]).all()) for start in range(0, flat.size, PIECE))


def scales_at(data: U8, offset: int, count: int) -> NDArray[np.float32]:
    """``count`` scales in ``data`` from byte ``offset`` on, as a view (little-endian, maybe unaligned)."""
    return data[offset : offset + SCALE_BYTES * count].view("<f4")


def storable(scales: NDArray[Any], factor: float = 1.0) -> F32:
    """Scales rounded to float32, 0 where they are below :data:`SMALLEST_SCALE`, and at most so large that
    ``factor`` times a scale is finite."""
    limited = np.minimum(scales, LARGEST / factor)
    return np.where(limited < SMALLEST_SCALE, 0.0, limited).astype(np.float32)


def scales_problem(scales: NDArray[np.float32], factor: float = 1.0) -> str:
    """What is wrong with scales from a peer that are multiplied by up to ``factor``."""
    # NaN fails both comparisons
    if not bool((scales >= 0).all()):
        return "a scale is negative or NaN"
    return (
        "" if bool((scales <= LARGEST / factor).all()) else "a scale is so large that entries are not finite"
    )


def row_pieces(rows: int, columns: int, multiple: int) -> Iterator[slice]:
    """Slices of rows of about :data:`PIECE` entries, each but the last of a multiple of ``multiple`` rows, so
    that it begins with a whole byte of packed codes."""
    step = round_up(max(1, PIECE // columns), multiple)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def zero_signs(seed: int, start: int, count: int) -> NDArray[np.bool_]:
    """Whether a zero at the entries ``start``, ... is taken as positive: the hash bits of
    :func:`optim.bits.pack`."""
    first = start // 64
    words = hash_words(seed, first, -(-(start + count) // 64) - first)
    skip = start - 64 * first
    return np.unpackbits(words.view(np.uint8), bitorder="little")[skip : skip + count].view(np.bool_)
