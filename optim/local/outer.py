"""The outer step: what the mean pseudo-gradient of a round does to the parameters all nodes share.

DiLoCo (arXiv 2311.08105) takes Nesterov's; plain averaging of the nodes' parameters is a step of length 1.
All of it is shared state, so every product and sum is rounded by itself.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from protos.methods import Outer


def outer_reference(
    shared: Tensor, mean: Tensor, momentum: Tensor, *, outer: Outer, lr: float, mu: float
) -> tuple[Tensor, Tensor]:
    """The step as the papers write it: the next shared parameters and the next momentum.

    ``average`` and ``sgd``: ``W - lr R``. ``nesterov``: ``m = mu m + R``, then ``W - lr (R + mu m)``.
    """
    if outer != "nesterov":
        return shared - lr * mean, momentum
    momentum = mu * momentum + mean
    return shared - lr * (mean + mu * momentum), momentum


class OuterStep:
    """Turns the mean pseudo-gradient of a bucket into what is taken off its shared parameters.

    Args:
        outer: ``"average"``, ``"sgd"`` or ``"nesterov"``.
        lr: factor on the step; 1 with ``average`` gives the mean of the nodes' parameters.
        momentum: of ``nesterov``, in [0, 1).

    Attributes:
        buffers: the momentum by the name of the bucket; fp32, on the host, zero at first. Only for
            ``nesterov``: 4 bytes a parameter.

    Raises:
        ValueError: for an unknown kind and numbers out of range.
    """

    def __init__(self, outer: Outer, lr: float, momentum: float) -> None:
        if outer not in get_args(Outer):
            raise ValueError(f"unknown outer step {outer!r}: use one of {', '.join(get_args(Outer))}")
        if not 0.0 <= lr < math.inf:
            raise ValueError(f"outer_lr must be finite and not negative, not {lr}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"outer_momentum must be in [0, 1), not {momentum}")
        self.outer, self.lr, self.momentum = outer, lr, momentum
        self.buffers: dict[str, Tensor] = {}

    def add_bucket(self, name: str, elements: int) -> None:
        """Make what state a bucket needs."""
        if self.outer == "nesterov":
            self.buffers[name] = torch.zeros(elements)

    def update(self, name: str, mean: Tensor) -> Tensor:
        """What is to be subtracted for the mean pseudo-gradient ``mean`` (fp32, 1-D, overwritten)."""
        if self.outer == "nesterov":
            buffer = self.buffers[name]
            buffer.mul_(self.momentum).add_(mean)
            mean.add_(buffer.mul(self.momentum))
        return mean if self.lr == 1.0 else mean.mul_(self.lr)

    def tensors(self) -> dict[str, Tensor]:
        """The momenta as ``optimizer/<bucket>/outer_momentum``, live."""
        return {f"optimizer/{name}/outer_momentum": buffer for name, buffer in self.buffers.items()}


def decay_factor(lr: float, weight_decay: float, steps: int) -> float:
    """What ``steps`` decays of ``1 - lr * weight_decay`` make together; products of doubles in one order,
    equal everywhere."""
    factor = 1.0
    for _ in range(steps if weight_decay else 0):
        factor *= 1.0 - lr * weight_decay
    return factor
