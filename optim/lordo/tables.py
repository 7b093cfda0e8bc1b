"""Tables of :class:`optim.lordo.low_rank_ddp.LowRankDDP`: rounds of whole gradients and of projected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from optim.lordo.shapes import basis_shape, moment_shape
from optim.packs import Pack, Place, backward_order, places_of, read_fp32
from optim.roles import ParameterRole, held
from protos.buckets import Bucket, BucketTable
from protos.codecs import matrix_shape


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
        return read_fp32(self.places[pack.name].returned(result), pack.bucket.elements)

    def matrix(self, role: ParameterRole, result: Tensor) -> Tensor:
        """The mean of a matrix's gradient as it travels, whole or projected; likewise."""
        place = self.places[role.name]
        values = read_fp32(place.returned(result), place.bucket.elements)
        return values.view(matrix_shape(place.bucket.shape))

    def basis(self, role: ParameterRole, result: Tensor) -> Tensor | None:
        """A matrix's new basis; ``None`` in a round without."""
        if not self.with_bases:
            return None
        place = self.places[_basis_name(role)]
        return read_fp32(place.returned(result), place.bucket.elements).view(place.bucket.shape)


def _basis_name(role: ParameterRole) -> str:
    return f"optimizer/{role.name}/basis"
