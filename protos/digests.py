"""Digests: sha256 for what people compare (files, run files), xxh3 for what nodes compare every round.

sha256 stands against an adversary; xxh3_128 guards against divergence and mix-ups at memory speed.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import xxhash

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES: Final = 1 << 20
_TENSOR_CHUNK_BYTES: Final = 64 << 20  # of an accelerator's tensor, copied to the host at a time
_ITEM_BYTES: Final = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}


def sha256_bytes(data: bytes | bytearray | memoryview) -> str:
    """sha256 of a buffer, in hex."""
    return hashlib.sha256(data).hexdigest()


def sha256_text(text: str) -> str:
    """sha256 of ``text`` in UTF-8, in hex."""
    return sha256_bytes(text.encode())


def sha256_file(path: str | os.PathLike[str]) -> str:
    """sha256 of a file's bytes, in hex; reads 1 MiB at a time.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            hasher.update(chunk)
    return hasher.hexdigest()


class StateDigest:
    """Streaming xxh3_128 over named tensors: name, dtype, shape and bytes enter, in the order of the calls.

    Every tensor is framed by lengths, so no two sequences of tensors share one input: renaming, reshaping,
    reordering or moving bytes across a boundary changes the digest. Bytes enter little-endian.
    """

    def __init__(self) -> None:
        if sys.byteorder != "little":
            raise RuntimeError("state digests are defined on little-endian bytes; this host is big-endian")
        self._hasher = xxhash.xxh3_128()

    def _header(self, name: str, dtype: str, shape: Sequence[int]) -> int:
        """Hash the frame of one tensor and return the bytes that its data must have."""
        item = _ITEM_BYTES.get(dtype)
        if item is None:
            raise ValueError(
                f"tensor {name!r}: cannot digest dtype {dtype!r}; known are {', '.join(_ITEM_BYTES)}"
            )
        if any(size < 0 for size in shape):
            raise ValueError(f"tensor {name!r}: negative size in shape {tuple(shape)}")
        nbytes = item * math.prod(shape)
        for text in (name.encode(), dtype.encode()):
            self._hasher.update(struct.pack("<I", len(text)))
            self._hasher.update(text)
        self._hasher.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
        return nbytes

    def update(
        self, name: str, dtype: str, shape: Sequence[int], data: bytes | bytearray | memoryview
    ) -> None:
        """Add a tensor given as C-contiguous little-endian bytes.

        Args:
            name: the tensor's name.
            dtype: as torch spells it, without ``torch.``: ``"float32"``, ``"bfloat16"``, ``"uint8"``.
            shape: its shape; ``()`` for a scalar.
            data: exactly ``itemsize * prod(shape)`` bytes.

        Raises:
            ValueError: unknown dtype, or a number of bytes that does not fit dtype and shape.
        """
        view = memoryview(data).cast("B")
        nbytes = self._header(name, dtype, shape)
        if len(view) != nbytes:
            raise ValueError(f"tensor {name!r}: {dtype}{list(shape)} has {nbytes} bytes, not {len(view)}")
        self._hasher.update(view)

    def update_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """Add a torch tensor, on any device and with any strides; equal to :meth:`update` with its bytes.

        Raises:
            ValueError: a dtype outside the known ones (complex, quantised, sparse).
        """
        import torch

        nbytes = self._header(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if not nbytes:
            return
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        step = nbytes if flat.device.type == "cpu" else _TENSOR_CHUNK_BYTES
        for start in range(0, nbytes, step):
            self._hasher.update(flat[start : start + step].cpu().numpy().data)

    def hexdigest(self) -> str:
        """The digest so far: 32 hex digits."""
        return self._hasher.hexdigest()


def state_digest(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """xxh3_128 of a whole state, in hex. Tensors enter sorted by name: a mapping's order does not matter.

    Raises:
        ValueError: two tensors of one name, or a dtype that cannot be digested.
    """
    items = sorted(tensors.items() if isinstance(tensors, Mapping) else tensors, key=lambda item: item[0])
    for (first, _), (second, _) in itertools.pairwise(items):
        if first == second:
            raise ValueError(f"two tensors are named {first!r}")
    digest = StateDigest()
    for name, tensor in items:
        digest.update_tensor(name, tensor)
    return digest.hexdigest()
