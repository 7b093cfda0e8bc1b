"""AdamW as a local optimizer (Loshchilov and Hutter, arXiv 1711.05101), without its decay.

Unlike :mod:`optim.adamw` it fuses products and sums: what it computes stays on its node, so that it need not
round alike on all hardware. Memory: 8 bytes a parameter, beside it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optim.local.standalone import StandaloneInner, gradient_of
from optim.roles import ParameterRole

CHUNK_ELEMENTS = 1 << 24  # parameters that are updated together: bounds the temporary denominators


class AdamWInner(StandaloneInner):
    """AdamW with bias correction; equal to ``torch.optim.AdamW`` with ``weight_decay=0``.

    Args:
        roles: the parameters it trains, fp32.
        betas: decays of the two moments, each in [0, 1).
        eps: floor under the square root, not negative.

    Raises:
        ValueError: for options out of range.
    """

    def __init__(
        self, roles: Sequence[ParameterRole], *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
    ) -> None:
        super().__init__(roles)
        for index, beta in enumerate(betas):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"betas[{index}] must be in [0, 1), not {beta}")
        if not 0.0 <= eps < math.inf:
            raise ValueError(f"eps must be finite and not negative, not {eps}")
        self.betas, self.eps = betas, eps
        for role in self.held:
            self.state[role.name] = {
                "exp_avg": torch.zeros_like(role.parameter),
                "exp_avg_sq": torch.zeros_like(role.parameter),
                "step": torch.zeros((), dtype=torch.int64),
            }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every parameter by the learning rate ``lr``."""
        for roles in self._chunks():
            count = int(self.state[roles[0].name]["step"]) + 1
            self._update(roles, count, lr)
            for role in roles:
                self.state[role.name]["step"] += 1

    def _chunks(self) -> Iterator[list[ParameterRole]]:
        """Parameters of one device and one number of steps, not too many at a time."""
        kinds: dict[tuple[torch.device, int], list[ParameterRole]] = {}
        for role in self.held:
            kind = role.parameter.device, int(self.state[role.name]["step"])
            kinds.setdefault(kind, []).append(role)
        for roles in kinds.values():
            chunk: list[ParameterRole] = []
            elements = 0
            for role in roles:
                if chunk and elements + role.parameter.numel() > CHUNK_ELEMENTS:
                    yield chunk
                    chunk, elements = [], 0
                chunk.append(role)
                elements += role.parameter.numel()
            yield chunk

    def _update(self, roles: list[ParameterRole], count: int, lr: float) -> None:
        (beta1, beta2), states = self.betas, [self.state[role.name] for role in roles]
        gradients = [gradient_of(role) for role in roles]
        parameters: list[Tensor] = [role.parameter.detach() for role in roles]
        first = [state["exp_avg"] for state in states]
        second = [state["exp_avg_sq"] for state in states]
        torch._foreach_lerp_(first, gradients, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, 1.0 - beta2)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_div_(denominators, math.sqrt(1.0 - beta2**count))
        torch._foreach_add_(denominators, self.eps)
        torch._foreach_addcdiv_(parameters, first, denominators, -lr / (1.0 - beta1**count))
