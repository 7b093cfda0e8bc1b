"""Digests: sha256 for what people compare (files, run files), xxh3 for what nodes compare every round.

sha256 stands against an adversary; xxh3_128 guards against divergence and mix-ups at memory speed.
"""

from __future__ import annotations

import hashlib
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


def tensor_digest(name: str, dtype: str, shape: Sequence[int], data: bytes | bytearray | memoryview) -> str:
    """xxh3_128 of one named tensor, in hex: name, dtype and shape, framed by lengths, then its bytes.

    Args:
        name: the tensor's name.
        dtype: as torch spells it, without ``torch.``: ``"float32"``, ``"bfloat16"``, ``"uint8"``.
        shape: its shape; ``()`` for a scalar.
        data: exactly ``itemsize * prod(shape)`` bytes, C-contiguous and little-endian.

    Raises:
        ValueError: unknown dtype, or a number of bytes that does not fit dtype and shape.
    """
    return pieces_digest(name, dtype, shape, (data,))


def pieces_digest(
    name: str, dtype: str, shape: Sequence[int], pieces: Iterable[bytes | bytearray | memoryview]
) -> str:
    """:func:`tensor_digest` of data that comes in pieces of any size, for instance out of a file.

    Raises:
        ValueError: unknown dtype, or a number of bytes that does not fit dtype and shape.
    """
    hasher, nbytes = _frame(name, dtype, shape)
    read = 0
    for piece in pieces:
        view = memoryview(piece).cast("B")
        hasher.update(view)
        read += len(view)
    if read != nbytes:
        raise ValueError(f"tensor {name!r}: {dtype}{list(shape)} has {nbytes} bytes, not {read}")
    return hasher.hexdigest()


def torch_digest(name: str, tensor: torch.Tensor) -> str:
    """:func:`tensor_digest` of a torch tensor, on any device and with any strides.

    Raises:
        ValueError: a dtype outside the known ones (complex, quantised, sparse).
    """
    import torch

    hasher, nbytes = _frame(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if nbytes:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        step = nbytes if flat.device.type == "cpu" else _TENSOR_CHUNK_BYTES
        for start in range(0, nbytes, step):
            hasher.update(flat[start : start + step].cpu().numpy().data)
    return hasher.hexdigest()


def combine(digests: Mapping[str, str]) -> str:
    """The digest of a whole state from those of its tensors, by name: 32 hex digits.

    The order of the mapping does not matter, so each rank of an island may digest what it holds. Names and
    digests enter framed by lengths: no two states share one input.
    """
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        _text(hasher, name)
        _text(hasher, digests[name])
    return hasher.hexdigest()


def slices_digest(digests: Iterable[bytes]) -> bytes:
    """The digest of a result that lies at nodes: xxh3_128 of those of its slices, 16 bytes each, in order."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def state_digest(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> str:
    """The digest of a whole state, in hex, see :func:`combine`.

    Raises:
        ValueError: two tensors of one name, or a dtype that cannot be digested.
    """
    digests: dict[str, str] = {}
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in digests:
            raise ValueError(f"two tensors are named {name!r}")
        digests[name] = torch_digest(name, tensor)
    return combine(digests)


def tensor_nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor's data.

    Raises:
        ValueError: unknown dtype, or a negative size.
    """
    item = _ITEM_BYTES.get(dtype)
    if item is None:
        raise ValueError(
            f"tensor {name!r}: cannot digest dtype {dtype!r}; known are {', '.join(_ITEM_BYTES)}"
        )
    if any(size < 0 for size in shape):
        raise ValueError(f"tensor {name!r}: negative size in shape {tuple(shape)}")
    return item * math.prod(shape)


def _frame(name: str, dtype: str, shape: Sequence[int]) -> tuple[xxhash.xxh3_128, int]:
    """A hasher that has read the frame of a tensor, and the bytes that its data must have."""
    if sys.byteorder != "little":
        raise RuntimeError("state digests are defined on little-endian bytes; this host is big-endian")
    nbytes = tensor_nbytes(name, dtype, shape)
    hasher = xxhash.xxh3_128()
    for text in (name, dtype):
        _text(hasher, text)
    hasher.update(struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
    return hasher, nbytes


def _text(hasher: xxhash.xxh3_128, text: str) -> None:
    data = text.encode()
    hasher.update(struct.pack("<I", len(data)))
    hasher.update(data)
