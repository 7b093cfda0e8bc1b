"""Tables of :class:`optim.lordo.low_rank_ddp.LowRankDDP`: rounds of whole gradients and of projected ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from optim.lordo.shapes import basis_shape, moment_shape
from optim.packs import Pack
from optim.roles import ParameterRole
from protos.buckets import Bucket, BucketTable
from protos.codecs import matrix_shape


@dataclass(frozen=True)
class Place:
    """An fp32 matrix in a payload or a result, from byte ``begin`` on."""

    begin: int
    shape: tuple[int, int]

    def bytes_of(self, data: Tensor) -> Tensor:
        """Its bytes: a view."""
        return data[self.begin : self.begin + 4 * prod(self.shape)]

    def read(self, data: Tensor) -> Tensor:
        """Its values: a view of ``data`` where the alignment allows it, else a copy."""
        part = self.bytes_of(data)
        if part.data_ptr() % 4 or part.storage_offset() % 4:
            part = part.clone()
        return part.view(torch.float32).view(self.shape)


@dataclass(frozen=True)
class GradientTable:
    """A table, and where it has what of the matrices.

    Attributes:
        table: first the buckets of everything else, then those of the matrices by name.
        whole: whether whole gradients travel, ``[m, n]``; projected ones are ``[r, n]`` for ``m <= n`` and
            ``[r, m]`` otherwise.
        sent, returned: places of the gradients in a contribution and in a result, by name.
        bases: places of the bases in a result; empty for a table without.
    """

    table: BucketTable
    whole: bool
    sent: Mapping[str, Place]
    returned: Mapping[str, Place]
    bases: Mapping[str, Place]

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
        """Lay the matrices out behind ``packs``, which keep their places."""
        buckets = [pack.bucket for pack in packs]
        for role in matrices:
            shape = role.shape if whole else moment_shape(role.shape, rank)
            buckets.append(Bucket.of(role.name, "mean", [(role.name, shape)]))
            if with_bases:
                name = _basis_name(role)
                basis = [(name, basis_shape(role.shape, rank))]
                buckets.append(Bucket.of(name, "basis", basis, source=role.name))
        table = BucketTable(tuple(buckets))
        begins = {bucket.name: begin for bucket, begin in zip(buckets, table.offsets, strict=True)}
        returns = {bucket.name: begin for bucket, begin in zip(buckets, table.result_offsets, strict=True)}
        shapes = {
            role.name: matrix_shape(role.shape) if whole else moment_shape(role.shape, rank)
            for role in matrices
        }
        return cls(
            table,
            whole,
            {name: Place(begins[name], shape) for name, shape in shapes.items()},
            {name: Place(returns[name], shape) for name, shape in shapes.items()},
            {
                role.name: Place(returns[_basis_name(role)], basis_shape(role.shape, rank))
                for role in matrices
                if with_bases
            },
        )


def _basis_name(role: ParameterRole) -> str:
    return f"optimizer/{role.name}/basis"
