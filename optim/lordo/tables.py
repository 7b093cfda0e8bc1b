"""Tables of :class:`optim.lordo.low_rank_ddp.LowRankDDP`: rounds of whole gradients and of projected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optim.layout import Pack, Place, backward_order, places_of
from optim.lordo.shapes import basis_shape, moment_shape
from optim.role import ParameterRole, held
from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.codecs import matrix_shape
from protos.methods import Direction

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class GradientTable:
    """A table, and where its lane has what.

    Attributes:
        table: from the end of the model to its beginning, bases behind their gradients. Buckets are numbered
            by name, those of the matrices behind everything else.
        lane: the part of it whose parameters are held here.
        places: of the lane's buckets, by name.
        whole: whether whole gradients travel, ``[m, n]``; projected ones are ``[r, n]`` for ``m <= n`` and
            ``[r, m]`` otherwise.
        with_bases: whether bases come back.
    """

    table: BucketTable
    lane: BucketTable
    places: Mapping[str, Place]
    whole: bool
    with_bases: bool

    @classmethod
    def of(
        cls,
        packs: Sequence[Pack],
        matrices: Sequence[ParameterRole],
        rank: int,
        *,
        whole: bool,
        with_bases: bool,
    ) -> GradientTable:
        """The table of ``packs`` and ``matrices``, both in the order of their numbers."""
        units = [(pack.items, [pack.bucket]) for pack in packs]
        for role in matrices:
            shape = role.shape if whole else moment_shape(role.shape, rank)
            buckets = [Bucket.of(role.name, "mean", [(role.name, shape)])]
            if with_bases:
                name = _basis_name(role)
                basis = [(name, basis_shape(role.shape, rank))]
                buckets.append(Bucket.of(name, "basis", basis, source=role.name))
            units.append(((role,), buckets))
        names = [bucket.name for _, buckets in units for bucket in buckets]
        numbers = {name: number for number, name in enumerate(names)}
        units.sort(key=lambda unit: backward_order(unit[0]))
        ordered = tuple(bucket for _, buckets in units for bucket in buckets)
        table = BucketTable(ordered, numbers=tuple(numbers[bucket.name] for bucket in ordered))
        own = {b.name for items, buckets in units if held(items, buckets[0].name) for b in buckets}
        lane = table.part(own)
        return cls(table, lane, places_of(lane), whole, with_bases)

    def mean(self, pack: Pack, result: Tensor) -> Tensor:
        """The mean gradient of a pack: fp32, 1-D, a view where the alignment allows it."""
        return _values(self.places[pack.name], result)

    def matrix(self, role: ParameterRole, result: Tensor) -> Tensor:
        """The mean of a matrix's gradient as it travels, whole or projected; likewise."""
        place = self.places[role.name]
        return _values(place, result).view(matrix_shape(place.bucket.shape))

    def basis(self, role: ParameterRole, result: Tensor) -> Tensor | None:
        """A matrix's new basis; ``None`` in a round without."""
        if not self.with_bases:
            return None
        place = self.places[_basis_name(role)]
        return _values(place, result).view(place.bucket.shape)


def gradient_tables(
    packs: Sequence[Pack],
    matrices: Sequence[ParameterRole],
    rank: int,
    *,
    basis_every: int,
    projected: bool,
    ldadam: bool = False,
) -> tuple[list[GradientTable], tuple[int, ...]]:
    """The different tables of a run, and the cycle in which they take turns.

    ``projected``: whether projected gradients travel between two bases, rather than whole ones.
    """
    layouts = [GradientTable.of(packs, matrices, rank, whole=True, with_bases=not ldadam)]
    if ldadam or basis_every == 1 or not matrices:
        return layouts, (0,)
    layouts.append(GradientTable.of(packs, matrices, rank, whole=not projected, with_bases=False))
    return layouts, (0,) + (1,) * (basis_every - 1)


def schedule(layouts: Sequence[GradientTable], cycle: tuple[int, ...]) -> TableSchedule:
    """What travels, of :func:`gradient_tables`."""
    return TableSchedule(tuple(layout.table for layout in layouts), cycle)


def sync_buckets(role: ParameterRole, rank: int, *, direction: Direction, codec: str) -> list[Bucket]:
    """What travels beside the pseudo-gradient of a matrix whose basis all nodes share: basis and moments."""
    name = _basis_name(role)
    found = [Bucket.of(name, "basis", [(name, basis_shape(role.shape, rank))], source=role.name)]
    for key in ("exp_avg",) if direction == "muon" else ("exp_avg", "exp_avg_sq"):
        name = f"optimizer/{role.name}/{key}"
        found.append(Bucket.of(name, "mean", [(name, moment_shape(role.shape, rank))], codec=codec))
    return found


def _values(place: Place, result: Tensor) -> Tensor:
    from optim.packs import read_fp32

    return read_fp32(place.returned(result), place.bucket.elements)


def _basis_name(role: ParameterRole) -> str:
    return f"optimizer/{role.name}/basis"
