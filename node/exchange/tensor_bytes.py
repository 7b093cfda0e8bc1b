"""Tensors as one stream of bytes: laid end to end, sorted by name, little-endian, without padding.

The layout of shared state on the wire. Bytes come straight from, and go straight into, the memory of tensors
on the CPU; tensors of an accelerator pass through host memory one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

MAX_TENSORS = 1 << 20
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


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def read_chunks(tensors: Mapping[str, torch.Tensor], chunk_bytes: int) -> Iterator[memoryview]:
    """The stream in chunks of ``chunk_bytes``, the last one shorter; each is valid until the next."""
    buffer = bytearray(chunk_bytes)
    filled = 0
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        if not tensor.numel():
            continue
        view = byte_view(tensor if _on_host(tensor) else tensor.cpu().contiguous())
        position = 0
        while position < len(view):
            if not filled and len(view) - position >= chunk_bytes:
                yield view[position : position + chunk_bytes]
                position += chunk_bytes
                continue
            take = min(chunk_bytes - filled, len(view) - position)
            buffer[filled : filled + take] = view[position : position + take]
            filled += take
            position += take
            if filled == chunk_bytes:
                yield memoryview(buffer)
                filled = 0
    if filled:
        yield memoryview(buffer)[:filled]


class Sink:
    """Writes the stream into tensors, in order, as it arrives.

    Args:
        tensors: written in place. Those of an accelerator are filled when their last byte is there.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._waiting = [
            tensors[name].detach() for name in reversed(sorted(tensors)) if tensors[name].numel()
        ]
        self._target: torch.Tensor | None = None
        self._staged: torch.Tensor | None = None
        self._view = memoryview(bytearray())
        self._position = 0
        self.nbytes = 0

    def write(self, data: memoryview) -> None:
        """Take the next bytes of the stream.

        Raises:
            LayoutError: more bytes than the tensors hold.
        """
        self.nbytes += len(data)
        while len(data):
            if self._position == len(self._view):
                self._open_next()
            take = min(len(data), len(self._view) - self._position)
            self._view[self._position : self._position + take] = data[:take]
            self._position += take
            data = data[take:]
            if self._position == len(self._view):
                self._close()

    @property
    def complete(self) -> bool:
        """Whether every tensor has been filled."""
        return not self._waiting and self._target is None

    def _open_next(self) -> None:
        if not self._waiting:
            raise LayoutError("the stream goes on after the last tensor")
        self._target = self._waiting.pop()
        on_host = _on_host(self._target)
        self._staged = self._target if on_host else torch.empty(self._target.shape, dtype=self._target.dtype)
        self._view = byte_view(self._staged)
        self._position = 0

    def _close(self) -> None:
        assert self._target is not None and self._staged is not None
        if self._staged is not self._target:
            self._target.copy_(self._staged)
        self._target = self._staged = None
