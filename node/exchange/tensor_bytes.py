"""Tensors as one stream of bytes: laid end to end, sorted by name, little-endian, without padding.

The layout of shared state on the wire. Bytes come straight from, and go straight into, the memory of tensors
on the CPU; those of an accelerator pass through host memory in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

PIECE_BYTES: Final = 4 << 20  # of a tensor, in host memory at a time
_ITEM_BYTES = {
    str(dtype).removeprefix("torch."): dtype.itemsize
    for dtype in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


class LayoutError(ValueError):
    """Tensors that do not fit; the text names the first one and what differs."""


@dataclass(frozen=True)
class Row:
    """One tensor of a layout."""

    name: str
    dtype: str  # as torch spells it, without "torch."
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements.

        Raises:
            LayoutError: a dtype that cannot travel.
        """
        item = _ITEM_BYTES.get(self.dtype)
        if item is None:
            raise LayoutError(f"{self.name!r}: tensors of {self.dtype} cannot travel")
        return item * math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[Row, ...]:
    """The rows of ``tensors`` in stream order."""
    return tuple(
        Row(name, str(tensors[name].dtype).removeprefix("torch."), tuple(tensors[name].shape))
        for name in sorted(tensors)
    )


def total_bytes(rows: Iterable[Row]) -> int:
    """Length of the stream."""
    return sum(row.nbytes for row in rows)


def check_layout(rows: Sequence[Row], expected: Sequence[Row], origin: str) -> None:
    """Raise :class:`LayoutError` unless ``rows``, which ``origin`` announced, are ``expected``."""
    theirs, ours = [row.name for row in rows], [row.name for row in expected]
    if missing := sorted(set(ours) - set(theirs)):
        raise LayoutError(f"{origin} lacks {len(missing)} tensors of this model, first {missing[0]!r}")
    if extra := sorted(set(theirs) - set(ours)):
        raise LayoutError(
            f"{origin} holds {len(extra)} tensors that this model does not have, first {extra[0]!r}"
        )
    if theirs != ours:
        raise LayoutError(f"{origin} lists tensors out of order or twice")
    for row, own in zip(rows, expected, strict=True):
        if row != own:
            raise LayoutError(f"{origin} holds {row.name!r} as {row}, this model as {own}")


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as writable bytes; no copy."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def read_pieces(tensor: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Bytes ``start`` to ``stop`` of a tensor's elements: (where, ``uint8[n]`` on the CPU) in pieces.

    Pieces of a contiguous tensor on the CPU are its own memory. Of another device's, one piece is in host
    memory at a time.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    for position, end in spans(start, stop):
        yield position, flat[position:end].cpu()


@torch.no_grad()
def fill(tensor: torch.Tensor, read: Callable[[int, torch.Tensor], object]) -> None:
    """Overwrite a tensor, on any device and with any strides, by pieces of its bytes.

    Args:
        tensor: written in place.
        read: fills ``uint8[n]`` on the CPU with the bytes from a position on; called for one piece of
            :func:`spans` after the other.
    """
    target = tensor.detach()
    staged = target if target.is_contiguous() else torch.empty(target.shape, dtype=target.dtype)
    flat = staged.view(-1).view(torch.uint8)
    for position, end in spans(0, len(flat)):
        piece = flat[position:end]
        host = torch.empty(end - position, dtype=torch.uint8) if piece.device.type != "cpu" else piece
        read(position, host)
        if host is not piece:
            piece.copy_(host)
    if staged is not target:
        target.copy_(staged)


def spans(start: int, stop: int, size: int | None = None) -> Iterator[tuple[int, int]]:
    """What lies between two positions, in pieces of ``size`` (:data:`PIECE_BYTES` if not given), the last one
    shorter: (begin, end)."""
    size = size or PIECE_BYTES
    return ((position, min(position + size, stop)) for position in range(start, stop, size))
