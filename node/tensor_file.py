"""A ``safetensors`` file written tensor by tensor, where the library wants all tensors in memory at once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import IO, Any, Final, NamedTuple

import torch
from torch import Tensor

CODES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: Final = {code: dtype for dtype, code in CODES.items()}


class Entry(NamedTuple):
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Entry:
        """That of ``tensor`` as it is."""
        return cls(name, tuple(tensor.shape), tensor.dtype)


def cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """The dtype in a file whose floating-point tensors are to be ``wanted``; ``None`` keeps their own."""
    return wanted if wanted is not None and own.is_floating_point else own


class FileLayout:
    """Where the tensors of a file lie.

    Args:
        entries: the tensors, in any order.
        metadata: texts for the header.

    Attributes:
        entries: by name, in the order of the file. Writing in that order does not seek.
        nbytes: of the whole file.

    Raises:
        ValueError: two tensors of one name, or a dtype that such a file cannot hold.
    """

    def __init__(self, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self.entries: dict[str, Entry] = {}
        begins: dict[str, int] = {}
        position = 0
        # larger items first keep all of them aligned
        for entry in sorted(entries, key=lambda each: (-each.dtype.itemsize, each.name)):
            if entry.name in self.entries:
                raise ValueError(f"two tensors would be named {entry.name}")
            if entry.dtype not in CODES:
                raise ValueError(f"a safetensors file cannot hold {entry.dtype} ({entry.name})")
            span = [position, position + entry.nbytes]
            header[entry.name] = {
                "dtype": CODES[entry.dtype],
                "shape": [*entry.shape],
                "data_offsets": span,
            }
            self.entries[entry.name], begins[entry.name], position = entry, position, span[1]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self._offsets = {name: len(self._header) + begin for name, begin in begins.items()}
        self.nbytes = len(self._header) + position

    def begin(self, file: IO[bytes]) -> None:
        """Write the header and make room for the tensors."""
        file.write(self._header)
        file.truncate(self.nbytes)

    def write(self, file: IO[bytes], name: str, tensor: Tensor) -> None:
        """Write a tensor's elements in its place, in the entry's dtype; the tensor's shape may be another."""
        entry = self.entries[name]
        if not entry.nbytes:
            return
        flat = tensor.detach().to(device="cpu", dtype=entry.dtype).contiguous().view(-1)
        file.seek(self._offsets[name])
        file.write(flat.view(torch.uint8).numpy().data)
