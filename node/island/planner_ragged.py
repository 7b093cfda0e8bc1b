"""Layouts of groups that are cut: at the nearest legal place without padding, or into equal segments with it.

:func:`uneven` is :func:`node.island.layout.ragged` for given shares, over all cuts at once.
:func:`equal` looks for the smallest segment length S such that no boundary k S divides a unit, with as much
padding between the tensors as that takes (the problem that veScale-FSDP poses for its RaggedShard; it
contains bin packing, so this is a search over orders and lengths; of a handful of tensors, over all orders).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Final

import numpy as np

from node.island.layout import ALIGN, GroupLayout, TensorMeta
from node.island.planner_costs import Floats, Integers

_FEW: Final = 8  # tensors of which all orders are tried
_PLACEMENTS: Final = 40_000  # of a tensor in one search
_MULTIPLES: Final = 4  # of a common unit, from one length on
_FINER: Final = 64  # how many lengths are tried from one to its double


def layout_owned(metas: Sequence[TensorMeta], numel: Integers, owners: Integers, ranks: int) -> GroupLayout:
    """:func:`node.island.layout.owned` over all tensors at once; ``owners`` are known to be legal."""
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(_up(numel[order], ALIGN))
    offsets = np.empty(len(metas), np.int64)
    offsets[order] = ends - _up(numel[order], ALIGN)
    position = int(ends[-1]) if len(metas) else 0
    total = -(-position // ranks) * ranks
    cuts = np.concatenate([[0], ends])[np.searchsorted(owners[order], np.arange(-1, ranks), side="right")]
    cuts[cuts == position] = total
    return GroupLayout(tuple(metas), tuple(offsets.tolist()), tuple(cuts.tolist()))


def uneven(metas: Sequence[TensorMeta], shares: Floats, *, align: int = ALIGN) -> GroupLayout:
    """Tensors one after the other, cut where each rank has had its share, at the nearest legal place."""
    ranks = len(shares)
    numel = np.array([meta.numel for meta in metas], np.int64)
    ends = np.cumsum(_up(numel, align))
    offsets = ends - _up(numel, align)
    total = -(-int(ends[-1]) // ranks) * ranks
    begins = np.concatenate([[0], np.cumsum(numel)])
    reached = np.cumsum(shares)
    target = begins[-1] * (reached[:-1] / reached[-1])
    at = np.minimum(np.searchsorted(begins, target, side="right"), len(metas)) - 1
    inside = _nearest(metas, numel, at, target - begins[at])
    cuts = np.maximum.accumulate(np.concatenate([[0], offsets[at] + inside, [total]]))
    last = int(np.flatnonzero(shares)[-1])  # ranks after it have no share
    cuts[last + 1 :] = total
    return GroupLayout(tuple(metas), tuple(offsets.tolist()), tuple(cuts.tolist()))


def _nearest(metas: Sequence[TensorMeta], numel: Integers, at: Integers, position: Floats) -> Integers:
    """The legal cut of tensor ``at`` that is nearest to ``position`` in it, for every pair of them."""
    whole = numel[at]
    unit = np.array([meta.numel if meta.whole else meta.granularity for meta in metas], np.int64)[at]
    below = np.floor_divide(position, np.maximum(unit, 1)).astype(np.int64) * unit
    above = np.minimum(below + unit, whole)
    near = np.where(position - below <= above - position, below, above)
    near = np.where(position <= 0, 0, np.where(position >= whole, whole, near))
    for number in np.unique(at).tolist():
        if metas[number].blocks:
            for place in np.flatnonzero(at == number).tolist():
                near[place] = metas[number].nearest_cut(float(position[place]))
    return near


def before_cuts(layout: GroupLayout, weights: Floats) -> Floats:
    """What lies before every cut if an element of tensor i weighs ``weights[i]``: float64[ranks + 1]."""
    offsets = np.array(layout.offsets, np.int64)
    numel = np.array([meta.numel for meta in layout.tensors], np.int64)
    order = np.lexsort((numel, offsets))
    offsets, numel, weights = offsets[order], numel[order], weights[order]
    cuts = np.array(layout.cuts, np.int64)
    at = np.maximum(np.searchsorted(offsets, cuts, side="right") - 1, 0)
    earlier = np.concatenate([[0.0], np.cumsum(weights * numel)])
    result: Floats = earlier[at] + weights[at] * np.minimum(cuts - offsets[at], numel[at])
    return result


def equal(metas: Sequence[TensorMeta], ranks: int, *, align: int = ALIGN) -> GroupLayout:
    """Equal segments that divide no unit, with little padding: the shortest that the search finds.

    Args:
        metas: the tensors; each keeps its index.
        ranks: number of segments.
        align: tensors and segments start at multiples of it. A unit that is none is taken together with its
            neighbours until it is.
    """
    units = [_unit(meta, align) for meta in metas]
    orders = _orders(metas, units)
    budget = _PLACEMENTS
    for size in _lengths(metas, units, align, ranks):
        offsets = None
        for order in orders if budget >= 0 else orders[:1]:
            offsets = _place(metas, units, order, size, ranks, align)
            budget -= len(metas)
            if offsets is not None:
                break
        if offsets is None and len(metas) <= _FEW and budget >= 0:
            offsets, looked = _place_any(metas, units, size, ranks, align)
            budget -= looked
        if offsets is not None:
            return GroupLayout(tuple(metas), tuple(offsets), tuple(range(0, size * ranks + 1, size)))
    raise AssertionError("one segment for everything is always legal")


def _unit(meta: TensorMeta, align: int) -> int:
    """Elements between two places of the tensor where a boundary may fall; its blocks are handled apart."""
    if meta.blocks:
        return max(1, meta.numel)
    unit = meta.numel if meta.whole else lcm(meta.granularity, align)
    return max(1, min(unit, meta.numel))


def _orders(metas: Sequence[TensorMeta], units: Sequence[int]) -> list[list[int]]:
    """Orders of the tensors that are good as a rule: large or coarse ones first, or as they come."""
    indices = range(len(metas))
    return [
        sorted(indices, key=lambda i: (-metas[i].numel, i)),
        sorted(indices, key=lambda i: (-units[i], -metas[i].numel, i)),
        list(indices),
    ]


def _lengths(metas: Sequence[TensorMeta], units: Sequence[int], align: int, ranks: int) -> list[int]:
    """Lengths of a segment to try, ascending. Tensors that span several boundaries need multiples of their
    units, so from the lower bound on, ever coarser, there are such next to multiples of ``align``."""
    total = sum(meta.numel for meta in metas)
    largest = max(max(meta.blocks) if meta.blocks else unit for meta, unit in zip(metas, units, strict=True))
    least = max(-(-total // ranks), largest, align)
    most = sum(-(-meta.numel // align) * align for meta in metas) + align
    several = sorted({unit for meta, unit in zip(metas, units, strict=True) if meta.numel > unit})
    steps = {align} | {lcm(a, b, align) for a in several for b in several}
    if several:
        steps.add(lcm(*several, align))
    sizes = {-(-most // align) * align}
    while least < most:
        for step in steps:
            first = -(-least // step) * step
            sizes.update(size for size in range(first, first + _MULTIPLES * step, step) if size <= most)
        least += max(align, least // _FINER)
    return sorted(sizes)


def _place(
    metas: Sequence[TensorMeta],
    units: Sequence[int],
    order: Sequence[int],
    size: int,
    ranks: int,
    align: int,
) -> list[int] | None:
    """Offsets of the tensors, each as early as it may be in this ``order``; None if they do not fit.

    A tensor that may start at some place may start there whatever comes before it, so as early as possible
    is the best for all that follow.
    """
    offsets = [0] * len(metas)
    at = 0
    for index in order:
        found = _next(metas[index], units[index], at, size, ranks, align)
        if found is None:
            return None
        offsets[index] = found
        at = found + metas[index].numel
    return offsets


def _place_any(
    metas: Sequence[TensorMeta], units: Sequence[int], size: int, ranks: int, align: int
) -> tuple[list[int] | None, int]:
    """Offsets of the tensors in whichever order fits, None if none does, and the placements looked at.

    By the argument of :func:`_place` only the earliest end of every set of tensors matters, so that sets are
    gone through and not orders: 2ⁿ n placements; equal tensors are taken as they come.
    """
    kinds = [(meta.numel, unit, meta.blocks) for meta, unit in zip(metas, units, strict=True)]
    twin = [next((j for j in range(i - 1, -1, -1) if kinds[j] == kinds[i]), None) for i in range(len(kinds))]
    ends: dict[int, tuple[int, dict[int, int]]] = {0: (0, {})}  # by the set's bits: its end and its offsets
    looked = 0
    for _ in metas:
        longer: dict[int, tuple[int, dict[int, int]]] = {}
        for placed, (at, offsets) in ends.items():
            for index, before in enumerate(twin):
                if placed >> index & 1 or (before is not None and not placed >> before & 1):
                    continue
                looked += 1
                found = _next(metas[index], units[index], at, size, ranks, align)
                if found is None:
                    continue
                together, end = placed | 1 << index, found + metas[index].numel
                if together not in longer or end < longer[together][0]:
                    longer[together] = end, {**offsets, index: found}
        ends = longer
    for _, offsets in ends.values():
        return [offsets[index] for index in range(len(metas))], looked
    return None, looked


def _next(meta: TensorMeta, unit: int, at: int, size: int, ranks: int, align: int) -> int | None:
    """Where the tensor starts if what comes before ends at ``at``; None if it does not fit any more."""
    at = -(-at // align) * align
    if meta.numel == 0:
        return min(at, size * ranks)
    found = _first(meta, unit, at, size, align)
    return None if found is None or found + meta.numel > size * ranks else found


def _first(meta: TensorMeta, unit: int, at: int, size: int, align: int) -> int | None:
    """The first place from ``at`` on where no boundary of segments of ``size`` divides a unit of the tensor.

    After the second boundary the possibilities repeat.
    """
    numel = meta.numel
    boundary = (at // size + 1) * size
    if at + numel <= boundary:
        return at
    for edge in (boundary, boundary + size):
        start = max(at, edge - size)
        if meta.blocks:
            ends = [0]
            for block in meta.blocks:
                ends.append(ends[-1] + block)
            places = sorted(edge - end for end in ends if edge - end >= start and (edge - end) % align == 0)
        else:
            places = [edge - (edge - start) // unit * unit]
        for place in places:
            regular = not meta.blocks and (size % unit == 0 or place + numel <= edge + size)
            if regular or all(meta.is_cut(cut - place) for cut in range(edge, place + numel, size)):
                return place
    return None


def _up(values: Integers, unit: int) -> Integers:
    result: Integers = -(-values // unit) * unit
    return result
