"""What every rank of a group says of itself, in a text of fixed length: how disagreements are found."""

from __future__ import annotations

from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

SIGNATURE_BYTES: Final = 192


def signatures(text: str, group: dist.ProcessGroup | None, device: torch.device) -> list[str]:
    """The texts of all ranks of ``group`` in their order, cut to :data:`SIGNATURE_BYTES` (a collective)."""
    mine = _encode(text, device)
    texts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, mine, group=group)
    return [_decode(item) for item in texts]


def _encode(text: str, device: torch.device) -> Tensor:
    raw = text.encode()[:SIGNATURE_BYTES].ljust(SIGNATURE_BYTES, b"\0")
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)


def _decode(code: Tensor) -> str:
    return bytes(code.cpu().tolist()).rstrip(b"\0").decode(errors="replace")
