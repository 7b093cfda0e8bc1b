"""What is written and read together in a payload, and how its fp32 sections are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from optim.layout import Pack
from optim.newton_schulz import plan_stacks
from protos.buckets import BucketTable

NEIGHBOURS: Final = 8  # matrices in a stack: on a CPU more of them save nothing
NEIGHBOUR_ELEMENTS: Final = 1 << 22  # products of that size fill a device


class PayloadError(ValueError):
    """A payload that does not fit the bucket table, or holds values that must not be applied."""


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
