"""The shared parameters of methods with local steps: a copy in host memory, beside the live ones of the
model.

Between two exchanges every node moves its live parameters by itself. What all nodes agree on, and what
digests, checkpoints and downloads read, is the copy: 4 bytes a parameter of host memory, pinned where the
parameter is on a CUDA device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from optim.roles import ParameterRole


class Anchor:
    """The shared value of every parameter, taken from the model at construction.

    Args:
        roles: the parameters, fp32 and contiguous.

    Attributes:
        tensors: fp32, on the host, of the parameter's shape, by its name.
    """

    def __init__(self, roles: Iterable[ParameterRole]) -> None:
        self.tensors: dict[str, Tensor] = {}
        for role in roles:
            parameter = role.parameter.detach()
            pinned = parameter.device.type == "cuda"
            copy = torch.empty(role.shape, pin_memory=pinned)
            copy.copy_(parameter)
            self.tensors[role.name] = copy

    def delta(self, items: tuple[ParameterRole, ...]) -> Tensor:
        """The pseudo-gradient ``anchor - parameter`` of some parameters: a new fp32 vector on the host, in
        their order."""
        out = torch.empty(sum(item.parameter.numel() for item in items))
        start = 0
        for item in items:
            part = out[start : start + item.parameter.numel()].view(item.shape)
            part.copy_(item.parameter.detach())
            torch.sub(self.tensors[item.name], part, out=part)
            start += part.numel()
        return out

    @torch.no_grad()
    def restore(self, item: ParameterRole) -> None:
        """Set the live parameter to the shared one."""
        item.parameter.copy_(self.tensors[item.name])

    @contextmanager
    def swapped(self, items: Iterable[ParameterRole]) -> Iterator[None]:
        """Within this context some live parameters are the shared ones; a copy of them is kept in host
        memory."""
        held = [(item, item.parameter.detach().to("cpu", copy=True)) for item in items]
        try:
            for item, _ in held:
                self.restore(item)
            yield
        finally:
            with torch.no_grad():
                for item, value in held:
                    item.parameter.copy_(value)

    @torch.no_grad()
    def merge(self, item: ParameterRole, share: float) -> None:
        """Set the live parameter ``W`` to ``(1 - share) W + share anchor``; to the anchor alone if that is
        not finite."""
        shared = self.tensors[item.name]
        item.parameter.mul_(1.0 - share).add_(shared.to(item.parameter.device).mul(share))
        if not bool(item.parameter.isfinite().all()):
            self.restore(item)
