"""What torch sees of this machine.

Run as a program it prints that as JSON: importing torch takes seconds, and a broken driver may not return at
all, so others ask in a process of its own.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Accelerator:
    """A GPU; ``free`` and ``total`` are bytes of its memory."""

    name: str
    free: int
    total: int


def accelerators() -> list[Accelerator]:
    """The CUDA devices that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    count = torch.cuda.device_count()
    return [
        Accelerator(torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
        for index in range(count)
    ]


if __name__ == "__main__":
    print(json.dumps([asdict(one) for one in accelerators()]))
