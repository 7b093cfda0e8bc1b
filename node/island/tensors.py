"""One parameter as layouts see it: shape, the places where it may be cut, and ranges of it as boxes.

Arithmetic on integers: no torch, no processes. Positions and sizes are in elements of the flattened tensor.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple


class LayoutError(ValueError):
    """A layout, placement or plan that cannot be; the text names the tensor and the ranks."""


class Box(NamedTuple):
    """An axis-aligned part of a tensor that is one contiguous range of its flattened form.

    ``offsets`` and ``lengths`` have one entry a dimension; the range begins at element ``start``.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class TensorMeta:
    """One parameter as the layout and the planner see it.

    Attributes:
        name: fully qualified name.
        shape: global shape.
        granularity: elements of the unit that no cut may divide; ``numel`` (or 0) keeps the tensor whole,
            1 allows any cut. :func:`granularity_of` computes it from words such as ``"row"``.
        blocks: elements of successive unequal units (a fused query-key-value weight with fewer key heads);
            overrides ``granularity`` where given and sums to ``numel``.
        state_bytes: optimizer state, bytes an element (8 for AdamW, 4 for Muon).
        flops: Newton–Schulz FLOPs of one optimizer step on the whole tensor, 0 for elementwise rules.
        group: name of the group that it is gathered with, ``""`` if that is open.
    """

    name: str
    shape: tuple[int, ...]
    granularity: int = 0
    blocks: tuple[int, ...] = ()
    state_bytes: float = 8.0
    flops: float = 0.0
    group: str = ""

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise LayoutError(f"{self.name}: shape {self.shape} has a negative dimension")
        if self.granularity < 0:
            raise LayoutError(f"{self.name}: granularity {self.granularity} is negative: use elements >= 1")
        if self.blocks and (sum(self.blocks) != self.numel or min(self.blocks) < 1):
            raise LayoutError(
                f"{self.name}: blocks of {self.blocks} elements do not divide a tensor of {self.numel}"
            )

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of one index of the first dimension; 1 for vectors and scalars."""
        return prod(self.shape[1:]) if len(self.shape) > 1 else 1

    @property
    def whole(self) -> bool:
        """Whether the tensor can only be owned whole."""
        return len(self.blocks) == 1 or not (self.blocks or 0 < self.granularity < self.numel)

    @cached_property
    def _block_ends(self) -> tuple[int, ...]:
        return (0, *accumulate(self.blocks))

    def is_cut(self, position: int) -> bool:
        """Whether the tensor may be cut before element ``position`` (0 and ``numel`` always may)."""
        if position <= 0 or position >= self.numel:
            return True
        if self.blocks:
            return self._block_ends[bisect_left(self._block_ends, position)] == position
        return not self.whole and position % self.granularity == 0

    def nearest_cut(self, position: float) -> int:
        """The legal cut closest to ``position``, in 0 … ``numel``; the lower of two equally close."""
        if position <= 0:
            return 0
        if position >= self.numel:
            return self.numel
        if self.blocks:
            at = bisect_right(self._block_ends, position) - 1
            below, above = self._block_ends[at], self._block_ends[at + 1]
        else:
            unit = self.numel if self.whole else self.granularity
            below = int(position // unit) * unit
            above = min(below + unit, self.numel)
        return below if position - below <= above - position else above


def granularity_of(spec: str | int, shape: Sequence[int]) -> int:
    """Elements of the indivisible unit that ``spec`` describes for a tensor of ``shape``.

    ``"element"``; ``"row"`` (one index of the first dimension); ``"rows:K"`` (K of them, as for quantisation
    blocks of K rows: tiles of a row-major matrix are not contiguous); ``"block"`` (the last two dimensions:
    one expert of a stack, the whole of a matrix); ``"matrix"`` (the whole tensor); or a number of elements.
    Vectors have rows of one element.

    Raises:
        LayoutError: for any other text, or a number below 1.
    """
    numel = prod(shape)
    row = prod(shape[1:]) if len(shape) > 1 else 1
    name, _, count = str(spec).partition(":")
    if isinstance(spec, int) and spec >= 1:
        return min(spec, max(1, numel))
    if spec == "element":
        return 1
    if spec == "row":
        return max(1, row)
    if name == "rows" and count.isdigit() and int(count) >= 1:
        return max(1, min(int(count) * row, numel))
    if spec == "block":
        return max(1, prod(shape[-2:]) if len(shape) > 1 else 1)
    if spec == "matrix":
        return max(1, numel)
    raise LayoutError(
        f"granularity {spec!r} is unknown: use element, row, rows:K, block, matrix or a number of elements"
    )


def boxes(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """Elements ``start … start + numel`` of a row-major tensor as boxes, in memory order.

    A range needs at most ``2 * ndim - 1`` boxes: ragged ends, and whole rows between them, at every depth.
    """
    shape = tuple(shape)
    if numel <= 0:
        return []
    if not shape:
        return [Box((), (), start)]
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(start + numel, row)
    if first == last or (first + 1 == last and not tail and head):  # within one row
        inner = boxes(shape[1:], head, numel)
        return [Box((first, *b.offsets), (1, *b.lengths), first * row + b.start) for b in inner]
    found: list[Box] = []
    if head:
        found += [
            Box((first, *b.offsets), (1, *b.lengths), first * row + b.start)
            for b in boxes(shape[1:], head, row - head)
        ]
        first += 1
    if last > first:
        found.append(Box((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:]), first * row))
    if tail:
        found += [
            Box((last, *b.offsets), (1, *b.lengths), last * row + b.start) for b in boxes(shape[1:], 0, tail)
        ]
    return found
