"""Local optimizers that step along the polar factor of a momentum: Muon, and Sign-Muon, which takes its
signs.

Memory: 4 bytes a parameter, beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optim.local.standalone import StandaloneInner, gradient_of
from optim.newton_schulz import plan_stacks, polar_factors
from optim.roles import ParameterRole
from optim.rules import RuleOptions, polar_scale, vote_scale
from protos.methods import Coefficients, Scaling


class MuonInner(StandaloneInner):
    """Momentum, optionally Nesterov, then the polar factor (Keller Jordan's Muon), without decay.

    Args:
        roles: matrices; a fused one or a stack is cut as its ``view`` says.
        signed: step along the signs of the polar factor (SignMuon, arXiv 2605.16311). Where it is exactly
            zero the parameter stays.
        momentum, nesterov, ns_steps, ns_coefficients, scaling: see :class:`optim.rules.RuleOptions`; the
            scaling of a vote where ``signed``, of a polar step otherwise.
        ns_dtype: precision of the iterations; ``None`` is fp32 on a CPU and bf16 on CUDA.

    Raises:
        ValueError: for options out of range and parameters that are not matrices.
    """

    def __init__(
        self,
        roles: Sequence[ParameterRole],
        *,
        signed: bool = False,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: Coefficients = "polar-express",
        scaling: Scaling = "match-rms",
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(roles)
        RuleOptions(
            "vote-polar" if signed else "mean-muon",
            lr=0.0,
            momentum=momentum,
            nesterov=nesterov,
            ns_steps=ns_steps,
            ns_coefficients=ns_coefficients,
            scaling=scaling,
        )
        self.signed = signed
        self.momentum, self.nesterov, self.scaling = momentum, nesterov, scaling
        self._ns_steps, self._ns_coefficients, self._ns_dtype = ns_steps, ns_coefficients, ns_dtype
        for role in self.roles:
            if role.role != "matrix":
                raise ValueError(f"{role.name}: the polar factor needs a matrix, this is a {role.role}")
        for role in self.held:
            self.state[role.name] = {"momentum_buffer": torch.zeros_like(role.parameter)}
        self._stacks: list[list[ParameterRole]] = []
        for device in dict.fromkeys(role.parameter.device for role in self.held):
            here = [role for role in self.held if role.parameter.device == device]
            plan = plan_stacks([role.view for role in here], device)
            self._stacks += [[here[index] for index in stack] for stack in plan]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every parameter by the learning rate ``lr``, before the scaling."""
        for stack in self._stacks:
            factors = polar_factors(
                [self._direction(role) for role in stack],
                steps=self._ns_steps,
                coefficients=self._ns_coefficients,
                dtype=self._ns_dtype,
            )
            for role, factor in zip(stack, factors, strict=True):
                if self.signed:
                    factor, scale = factor.sign_(), vote_scale(self.scaling, role.fan_in)
                else:
                    scale = polar_scale(self.scaling, *role.view[1:])
                role.parameter.add_(factor.view(role.shape), alpha=-lr * scale)

    def _direction(self, role: ParameterRole) -> Tensor:
        """The updated momentum, or what Nesterov makes of it, as the role's matrices."""
        momentum, gradient = self.state[role.name]["momentum_buffer"], gradient_of(role)
        momentum.lerp_(gradient, 1.0 - self.momentum)
        direction = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        slices, rows, columns = role.view
        return direction.reshape((rows, columns) if slices == 1 else (slices, rows, columns))
