"""Where every tensor sits in the payload of a round, and how fp32 sections are written and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from optim.newton_schulz import plan_stacks
from optim.roles import ParameterRole, held
from protos.buckets import Bucket, BucketTable, Reduce

NEIGHBOURS: Final = 8  # matrices in a stack: on a CPU more of them save nothing
NEIGHBOUR_ELEMENTS: Final = 1 << 22  # products of that size fill a device


class PayloadError(ValueError):
    """A payload that does not fit the bucket table, or holds values that must not be applied."""


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


def stacks(packs: Sequence[Pack]) -> list[list[Pack]]:
    """Buckets of one matrix each, grouped so that each list is orthogonalised together; devices are not
    mixed, and a list ends after a few neighbours, so that the first need not wait for the last."""
    result: list[list[Pack]] = []
    for device in dict.fromkeys(pack.items[0].parameter.device for pack in packs):
        here = [pack for pack in packs if pack.items[0].parameter.device == device]
        views = [pack.items[0].view for pack in here]
        plan = plan_stacks(views, device, elements=NEIGHBOUR_ELEMENTS, members=NEIGHBOURS)
        result += [[here[index] for index in stack] for stack in plan]
    return result


def check_bytes(payload: Tensor, nbytes: int, what: str) -> None:
    """Raise :class:`PayloadError` unless ``payload`` is contiguous 1-D uint8 of that size."""
    if payload.dtype != torch.uint8 or payload.ndim != 1 or not payload.is_contiguous():
        raise PayloadError(
            f"{what} must be a contiguous 1-D uint8 tensor, not {payload.dtype} {tuple(payload.shape)}"
        )
    if payload.numel() != nbytes:
        raise PayloadError(f"{what} has {payload.numel()} bytes, the bucket table needs {nbytes}")


def check_payload(table: BucketTable, payload: Tensor, what: str) -> None:
    """Raise :class:`PayloadError` unless ``payload`` is contiguous 1-D uint8 of ``table.nbytes`` elements."""
    check_bytes(payload, table.nbytes, what)


def write_gradients(pack: Pack, gradients: Mapping[str, Tensor | None], out: Tensor) -> None:
    """Write the fp32 gradients of a mean bucket into its bytes ``out``; ``None`` and padding become zero."""
    for item, member in zip(pack.items, pack.bucket.members, strict=True):
        part = out[4 * member.start : 4 * (member.start + member.elements)]
        gradient = gradients[item.name]
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient.contiguous().view(-1).view(torch.uint8))
    out[4 * pack.bucket.elements :].zero_()


def read_fp32(part: Tensor, elements: int) -> Tensor:
    """The fp32 elements at the beginning of some bytes: a view where their alignment allows it, else a
    copy."""
    part = part[: 4 * elements]
    if part.data_ptr() % 4 or part.storage_offset() % 4:
        part = part.clone()
    return part.view(torch.float32)
