"""Where every tensor sits in the payload of a round, and how fp32 sections are written and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optim.newton_schulz import plan_stacks
from optim.roles import ParameterRole
from protos.buckets import Bucket, BucketTable, Reduce


class PayloadError(ValueError):
    """A payload that does not fit the bucket table, or holds values that must not be applied."""


@dataclass(frozen=True)
class Pack:
    """One bucket with the tensors in it.

    Attributes:
        index: position in the bucket table.
        bucket: what travels.
        begin: first byte in the payload.
        group: index of the parameter group.
        items: the tensors, in the order of ``bucket.members``.
    """

    index: int
    bucket: Bucket
    begin: int
    group: int
    items: tuple[ParameterRole, ...]

    @property
    def end(self) -> int:
        """First byte behind the bucket."""
        return self.begin + self.bucket.nbytes

    def split(self, flat: Tensor) -> Iterator[tuple[ParameterRole, Tensor]]:
        """Each tensor with its part of ``flat`` (``bucket.elements`` long), in the tensor's shape."""
        for item, member in zip(self.items, self.bucket.members, strict=True):
            yield item, flat[member.start : member.start + member.elements].view(item.shape)


def lay_out(groups: Iterable[tuple[str, Reduce, Sequence[ParameterRole]]]) -> list[Pack]:
    """Lay parameter groups (name, reduce, roles) out as a payload.

    Each matrix and each embedding is a bucket under its own name; the vectors of a group share the bucket
    ``[group name]``. Majority buckets come first, then mean buckets, each sorted by name.
    """
    drafts: list[tuple[Bucket, int, tuple[ParameterRole, ...]]] = []
    for group, (name, reduce, roles) in enumerate(groups):
        bundles: list[tuple[str, tuple[ParameterRole, ...]]] = [
            (role.name, (role,)) for role in roles if role.role != "vector"
        ]
        vectors = tuple(sorted((role for role in roles if role.role == "vector"), key=lambda role: role.name))
        if vectors:
            bundles.append((f"[{name}]", vectors))
        for bucket_name, items in bundles:
            bucket = Bucket.of(bucket_name, reduce, [(item.name, item.shape) for item in items])
            drafts.append((bucket, group, items))
    drafts.sort(key=lambda draft: (draft[0].reduce != "majority", draft[0].name))
    packs, begin = [], 0
    for index, (bucket, group, items) in enumerate(drafts):
        packs.append(Pack(index, bucket, begin, group, items))
        begin += bucket.nbytes
    return packs


def stacks(packs: Sequence[Pack]) -> list[list[Pack]]:
    """Buckets of one matrix each, grouped so that each list is orthogonalised together; devices are not
    mixed."""
    result: list[list[Pack]] = []
    for device in dict.fromkeys(pack.items[0].parameter.device for pack in packs):
        here = [pack for pack in packs if pack.items[0].parameter.device == device]
        plan = plan_stacks([pack.items[0].view for pack in here], device)
        result += [[here[index] for index in stack] for stack in plan]
    return result


def check_payload(table: BucketTable, payload: Tensor, what: str) -> None:
    """Raise :class:`PayloadError` unless ``payload`` is contiguous 1-D uint8 of ``table.nbytes`` elements."""
    check_bytes(payload, table.nbytes, what)


def check_bytes(payload: Tensor, nbytes: int, what: str) -> None:
    """Raise :class:`PayloadError` unless ``payload`` is contiguous 1-D uint8 of that size."""
    if payload.dtype != torch.uint8 or payload.ndim != 1 or not payload.is_contiguous():
        raise PayloadError(
            f"{what} must be a contiguous 1-D uint8 tensor, not {payload.dtype} {tuple(payload.shape)}"
        )
    if payload.numel() != nbytes:
        raise PayloadError(f"{what} has {payload.numel()} bytes, the bucket table needs {nbytes}")


def write_gradients(pack: Pack, gradients: Mapping[str, Tensor | None], out: Tensor) -> None:
    """Write the fp32 gradients of a mean bucket into the payload ``out``; ``None`` and padding become
    zero."""
    for item, member in zip(pack.items, pack.bucket.members, strict=True):
        begin = pack.begin + 4 * member.start
        part = out[begin : begin + 4 * member.elements]
        gradient = gradients[item.name]
        if gradient is None:
            part.zero_()
        else:
            part.copy_(gradient.contiguous().view(-1).view(torch.uint8))
    out[pack.begin + 4 * pack.bucket.elements : pack.end].zero_()


def read_mean(pack: Pack, payload: Tensor) -> Tensor:
    """The fp32 elements of a mean bucket: a view where the payload's alignment allows it, else a copy."""
    part = payload[pack.begin : pack.begin + 4 * pack.bucket.elements]
    if part.data_ptr() % 4 or part.storage_offset() % 4:
        part = part.clone()
    return part.view(torch.float32)
