"""Where every element of a group of parameters lives: one flat buffer, tensor offsets, and one cut per rank.

A group is the set of parameters that is gathered together. Its buffer is a row of tensors, each flattened in
row-major order and starting at a multiple of :data:`ALIGN` elements. Rank ``r`` of ``N`` holds the segment
``cuts[r] … cuts[r + 1]``, so ranks in order are the buffer in order and a gather needs no copy afterwards.

Everything the two sharding papers describe is a choice of cuts. A cut on a tensor boundary gives whole
matrices to owners (MatrixFSDP); a cut at a multiple of a tensor's granularity is a RaggedShard
(veScale-FSDP); granularity 1 is the flat shard of FSDP1. A cut inside a tensor is legal only where the
tensor allows it (:meth:`TensorMeta.is_cut`); in the padding between tensors every cut is legal.

The module is arithmetic on integers: no torch, no processes. Positions and sizes are in elements.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from node.island.tensors import Box, LayoutError, TensorMeta, boxes, granularity_of

__all__ = [
    "ALIGN",
    "Box",
    "GroupLayout",
    "LayoutError",
    "Piece",
    "Plan",
    "TensorMeta",
    "Verdict",
    "boxes",
    "from_cuts",
    "granularity_of",
    "owned",
    "ragged",
]

ALIGN = 64  # elements: 256 bytes of fp32; other offsets change the kernels that a matrix product picks
EVEN_PADDING = 0.01  # of the elements; above it equal segments would leave ranks with padding only


class Verdict(NamedTuple):
    """An answer and the reason for it, in words (empty where ``ok``)."""

    ok: bool
    reason: str


class Piece(NamedTuple):
    """What one rank holds of one tensor: ``numel`` elements from ``start`` on (both in the flattened tensor),
    which lie at ``offset`` in the rank's segment. ``tensor`` is the tensor's index in the layout."""

    tensor: int
    start: int
    numel: int
    offset: int


_META_FIELDS = tuple(field.name for field in fields(TensorMeta))


@dataclass(frozen=True)
class GroupLayout:
    """Offsets and cuts of one group; build it with :func:`owned`, :func:`ragged` or :func:`from_cuts`.

    Attributes:
        tensors: the parameters.
        offsets: where each starts in the group's buffer, in the order of ``tensors`` (not sorted).
        cuts: N + 1 positions, ascending from 0 to :attr:`total`.
        workers: for each tensor the ranks that step its matrices, one a matrix, where some of them are
            divided; an empty tuple for a tensor, or for all of them, leaves it to the optimizer.
    """

    tensors: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    cuts: tuple[int, ...]
    workers: tuple[tuple[int, ...], ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.cuts) - 1

    @property
    def total(self) -> int:
        """Elements of the buffer, padding included; a multiple of :attr:`ranks`."""
        return self.cuts[-1]

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no tensor."""
        return self.total - sum(meta.numel for meta in self.tensors)

    @property
    def equal(self) -> bool:
        """Whether all segments are equally long."""
        return all(self.resident(rank) * self.ranks == self.total for rank in range(self.ranks))

    def resident(self, rank: int) -> int:
        """Elements of the segment of ``rank``, padding included."""
        return self.cuts[rank + 1] - self.cuts[rank]

    @cached_property
    def _order(self) -> tuple[list[int], list[int]]:
        """Non-empty tensors by position: their indices, and their offsets."""
        order = sorted(
            (i for i, meta in enumerate(self.tensors) if meta.numel), key=lambda i: self.offsets[i]
        )
        return order, [self.offsets[i] for i in order]

    def piece(self, index: int, rank: int) -> Piece | None:
        """What ``rank`` holds of tensor ``index``, or None if nothing."""
        offset, low, high = self.offsets[index], self.cuts[rank], self.cuts[rank + 1]
        begin, end = max(offset, low), min(offset + self.tensors[index].numel, high)
        return Piece(index, begin - offset, end - begin, begin - low) if begin < end else None

    def pieces(self, rank: int) -> list[Piece]:
        """What ``rank`` holds, in the order of its segment."""
        order, starts = self._order
        first = max(0, bisect_right(starts, self.cuts[rank]) - 1)
        last = bisect_left(starts, self.cuts[rank + 1])
        found = (self.piece(index, rank) for index in order[first:last])
        return [piece for piece in found if piece is not None]

    def holders(self, index: int) -> range:
        """The ranks from the first to the last that hold something of tensor ``index``."""
        offset, numel = self.offsets[index], self.tensors[index].numel
        if not numel:
            return range(0)
        return range(bisect_right(self.cuts, offset) - 1, bisect_left(self.cuts, offset + numel))

    def owner(self, index: int) -> int | None:
        """The rank that holds the whole of tensor ``index``; None if it is divided or empty."""
        holders = self.holders(index)
        return holders[0] if len(holders) == 1 else None

    def boxes(self, index: int, rank: int) -> list[Box]:
        """The piece of ``rank`` of tensor ``index`` as axis-aligned boxes, in memory order."""
        piece = self.piece(index, rank)
        return [] if piece is None else boxes(self.tensors[index].shape, piece.start, piece.numel)

    def legal(self) -> Verdict:
        """Whether every element lies in the buffer once and no cut divides a unit; the reason if not."""
        if len(self.offsets) != len(self.tensors):
            return Verdict(False, f"{len(self.tensors)} tensors have {len(self.offsets)} offsets")
        if len(self.workers) not in (0, len(self.tensors)):
            return Verdict(False, f"{len(self.tensors)} tensors have {len(self.workers)} lists of workers")
        if len(self.cuts) < 2 or self.cuts[0] != 0 or list(self.cuts) != sorted(self.cuts):
            return Verdict(False, f"cuts {_short(self.cuts)} do not ascend from 0")
        if self.total % self.ranks:
            return Verdict(False, f"{self.total} elements are no multiple of {self.ranks} ranks")
        for worker in (worker for workers in self.workers for worker in workers):
            if not 0 <= worker < self.ranks:
                return Verdict(False, f"worker {worker} is not one of {self.ranks} ranks")
        names = [meta.name for meta in self.tensors]
        if len(set(names)) != len(names):
            return Verdict(False, f"a name occurs twice in {_short(sorted(names))}")
        order, starts = self._order
        end, before = 0, ""
        for index, start in zip(order, starts, strict=True):
            if start < end:
                return Verdict(False, f"{names[index]} starts at {start}, inside {before or 'nothing'}")
            end, before = start + self.tensors[index].numel, names[index]
        if end > self.total:
            return Verdict(False, f"{before} ends at {end}, after the last cut {self.total}")
        for rank, cut in enumerate(self.cuts[1:-1]):
            at = bisect_right(starts, cut) - 1
            if at >= 0 and not self.tensors[order[at]].is_cut(cut - starts[at]):
                return Verdict(
                    False,
                    f"the cut after rank {rank} divides {names[order[at]]} at element {cut - starts[at]},"
                    f" inside one of its units",
                )
        return Verdict(True, "")

    def renamed(self, prefix: str) -> GroupLayout:
        """The same layout with ``prefix`` and a dot before every name."""
        if not prefix:
            return self
        return replace(
            self, tensors=tuple(replace(meta, name=f"{prefix}.{meta.name}") for meta in self.tensors)
        )

    def to_json(self) -> str:
        """Canonical JSON text: equal layouts give equal text."""
        return _dump(self._fields())

    def _fields(self) -> dict[str, Any]:
        metas = [{name: getattr(meta, name) for name in _META_FIELDS} for meta in self.tensors]
        return {"tensors": metas, "offsets": self.offsets, "cuts": self.cuts, "workers": self.workers}

    @staticmethod
    def from_json(text: str) -> GroupLayout:
        """The layout that :meth:`to_json` wrote.

        Raises:
            LayoutError: for text that is no layout, or an illegal one.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            metas = [
                TensorMeta(**{**item, "shape": tuple(item["shape"]), "blocks": tuple(item["blocks"])})
                for item in data["tensors"]
            ]
            offsets, cuts = [int(x) for x in data["offsets"]], [int(x) for x in data["cuts"]]
            workers = tuple(tuple(int(rank) for rank in ranks) for ranks in data["workers"])
        except (ValueError, TypeError, KeyError) as error:
            raise LayoutError(f"not the JSON of a layout: {error}") from error
        return _legal(GroupLayout(tuple(metas), tuple(offsets), tuple(cuts), workers))

    def hash(self) -> str:
        """SHA-256 of :meth:`to_json`, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """The layouts of all groups of a model. Names are relative to the model that the plan was made for."""

    groups: tuple[GroupLayout, ...]

    def __post_init__(self) -> None:
        names = [meta.name for layout in self.groups for meta in layout.tensors]
        if len(set(names)) != len(names):
            raise LayoutError(f"a plan places a tensor twice: {_short(sorted(names))}")
        if len({layout.ranks for layout in self.groups}) > 1:
            raise LayoutError("the groups of a plan are made for different numbers of ranks")

    @cached_property
    def _index(self) -> dict[str, tuple[int, int]]:
        return {
            meta.name: (g, i) for g, layout in enumerate(self.groups) for i, meta in enumerate(layout.tensors)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def find(self, name: str) -> tuple[int, GroupLayout, int]:
        """Number of the group of ``name``, its layout, and the tensor's index in it.

        Raises:
            LayoutError: if the plan does not place ``name``.
        """
        if name not in self._index:
            raise LayoutError(
                f"the plan has no place for {name}: it was made for {_short(sorted(self._index))}"
            )
        group, index = self._index[name]
        return group, self.groups[group], index

    def to_json(self) -> str:
        """Canonical JSON text."""
        return _dump({"groups": [layout._fields() for layout in self.groups]})

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that :meth:`to_json` wrote; raises :class:`LayoutError` for anything else."""
        try:
            groups = json.loads(text)["groups"]
            return Plan(tuple(GroupLayout.from_json(_dump(group)) for group in groups))
        except (ValueError, TypeError, KeyError) as error:
            raise LayoutError(f"not the JSON of a plan: {error}") from error

    def hash(self) -> str:
        """SHA-256 of :meth:`to_json`, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def from_cuts(metas: Sequence[TensorMeta], offsets: Sequence[int], cuts: Sequence[int]) -> GroupLayout:
    """The layout with these offsets and cuts; raises :class:`LayoutError` with the reason if illegal."""
    return _legal(GroupLayout(tuple(metas), tuple(offsets), tuple(cuts)))


def _legal(layout: GroupLayout) -> GroupLayout:
    verdict = layout.legal()
    if not verdict.ok:
        raise LayoutError(f"illegal layout: {verdict.reason}")
    return layout


def owned(
    metas: Sequence[TensorMeta], owners: Sequence[int], ranks: int, *, align: int = ALIGN
) -> GroupLayout:
    """Every tensor whole on one rank (MatrixFSDP).

    Args:
        metas: the tensors; each keeps its index.
        owners: the rank of each.
        ranks: number of ranks; those that own nothing get an empty segment.
        align: tensors start at multiples of it.

    Raises:
        LayoutError: for an owner outside 0 … ranks - 1, or not one owner a tensor.
    """
    if len(owners) != len(metas):
        raise LayoutError(f"{len(metas)} tensors have {len(owners)} owners")
    for meta, owner in zip(metas, owners, strict=True):
        if not 0 <= owner < ranks:
            raise LayoutError(f"{meta.name}: owner {owner} is not one of {ranks} ranks")
    offsets, ends, position = [0] * len(metas), [0] * ranks, 0
    for index in sorted(range(len(metas)), key=lambda i: (owners[i], i)):
        offsets[index] = position
        position += _up(metas[index].numel, align)
        ends[owners[index]] = position
    total = _up(position, ranks)
    # the padding at the end goes to the last rank that owns something: ranks after it have nothing to send
    cuts = [0, *accumulate(ends, max)]
    return from_cuts(metas, offsets, [total if cut == position else cut for cut in cuts])


def ragged(
    metas: Sequence[TensorMeta],
    ranks: int,
    *,
    shares: Sequence[float] | None = None,
    align: int = ALIGN,
) -> GroupLayout:
    """Tensors one after the other, cut where each rank has had its share, at the nearest legal place.

    Equal segments are taken where they are legal and the padding is negligible: they need one collective
    less.

    Args:
        metas: the tensors, in the order of the buffer.
        ranks: number of ranks.
        shares: what each rank should hold, relative to the others (0 = nothing); equal by default.
        align: tensors start at multiples of it.

    Raises:
        LayoutError: unless there is one share >= 0 a rank and one of them is positive.
    """
    weights = [1.0] * ranks if shares is None else [float(share) for share in shares]
    if len(weights) != ranks or min(weights, default=-1.0) < 0 or sum(weights) <= 0:
        raise LayoutError(f"{ranks} ranks cannot have shares {_short(weights)}: one each, >= 0, not all 0")
    offsets: list[int] = []
    position = 0
    for meta in metas:
        offsets.append(position)
        position += _up(meta.numel, align)
    total = _up(position, ranks)
    begins = [0, *accumulate(meta.numel for meta in metas)]  # without the padding between tensors
    elements = begins[-1]
    if shares is None and total - elements <= EVEN_PADDING * elements:
        equal = GroupLayout(tuple(metas), tuple(offsets), tuple(range(0, total + 1, max(1, total // ranks))))
        if equal.ranks == ranks and equal.legal().ok:
            return equal
    cuts, reached, whole = [0], 0.0, sum(weights)
    for rank in range(ranks - 1):
        reached += weights[rank]
        # once only ranks without a share are left it is the end itself, which rounding must not miss
        cut = total
        if any(weights[rank + 1 :]):
            target = elements * (reached / whole)
            at = min(bisect_right(begins, target), len(metas)) - 1
            cut = offsets[at] + metas[at].nearest_cut(target - begins[at]) if metas else 0
        cuts.append(max(cuts[-1], cut))
    return from_cuts(metas, offsets, [*cuts, total])


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _short(values: Sequence[Any]) -> str:
    text = ", ".join(str(value) for value in values[:6])
    return text + (f", … ({len(values)})" if len(values) > 6 else "")


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
