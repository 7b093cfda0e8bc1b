"""Where every tensor sits in the payload of a round. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optim.role import ParameterRole, held
from protos.buckets import Bucket, BucketTable, Reduce

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Pack:
    """One bucket with the tensors in it.

    Attributes:
        bucket: what travels.
        group: index of the parameter group.
        items: the tensors, in the order of ``bucket.members``.
    """

    bucket: Bucket
    group: int
    items: tuple[ParameterRole, ...]

    @property
    def name(self) -> str:
        """That of the bucket."""
        return self.bucket.name

    @property
    def held(self) -> bool:
        """Whether its tensors are here; raises ``ValueError`` if only some are."""
        return bool(held(self.items, self.name))

    def split(self, flat: Tensor) -> Iterator[tuple[ParameterRole, Tensor]]:
        """Each tensor with its part of ``flat`` (``bucket.elements`` long), in the tensor's shape."""
        for item, member in zip(self.items, self.bucket.members, strict=True):
            yield item, flat[member.start : member.start + member.elements].view(item.shape)


@dataclass(frozen=True)
class Place:
    """Where a bucket lies: its number in the table, its first byte in a contribution and in a result."""

    number: int
    bucket: Bucket
    offset: int
    result_offset: int

    @property
    def end(self) -> int:
        """First byte behind it in a contribution."""
        return self.offset + self.bucket.nbytes

    def sent(self, data: Tensor) -> Tensor:
        """Its bytes in a contribution: a view."""
        return data[self.offset : self.end]

    def returned(self, data: Tensor) -> Tensor:
        """Its bytes in a result: a view."""
        return data[self.result_offset : self.result_offset + self.bucket.result_nbytes]


def places_of(table: BucketTable) -> dict[str, Place]:
    """Where each bucket of a table lies, by its name."""
    rows = zip(table.numbers, table.buckets, table.offsets, table.result_offsets, strict=True)
    return {row[1].name: Place(*row) for row in rows}


def packs_of(groups: Iterable[tuple[str, Reduce, Sequence[ParameterRole]]]) -> list[Pack]:
    """The buckets of parameter groups (name, reduce, roles): each matrix and each embedding under its own
    name, the vectors of a group together as ``[group name]``.

    They come in the order of their numbers: majorities before means, each sorted by name.
    """
    packs: list[Pack] = []
    for group, (name, reduce, roles) in enumerate(groups):
        bundles: list[tuple[str, tuple[ParameterRole, ...]]] = [
            (role.name, (role,)) for role in roles if role.role != "vector"
        ]
        vectors = tuple(sorted((role for role in roles if role.role == "vector"), key=lambda role: role.name))
        if vectors:
            bundles.append((f"[{name}]", vectors))
        for bucket_name, items in bundles:
            bucket = Bucket.of(bucket_name, reduce, [(item.name, item.shape) for item in items])
            packs.append(Pack(bucket, group, items))
    packs.sort(key=lambda pack: (pack.bucket.reduce != "majority", pack.name))
    return packs


def backward_order(items: Iterable[ParameterRole]) -> int:
    """Sorts what travels by the moment when a backward pass has made all its gradients: from the end of the
    model to its beginning."""
    return -min(item.position for item in items)
