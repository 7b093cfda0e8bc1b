"""The four update rules of an exchanged tensor, and their options.

* ``vote-polar``: momentum, polar factor, sign, majority of the signs (SignMuon, arXiv 2605.16311).
* ``vote-sign``: momentum, sign, majority (Signum: Bernstein et al., arXiv 1810.05291).
* ``mean-muon``: mean gradient, then Muon. Its matrix products run on every node, so replicas stay
  bit-identical only on equal hardware, torch builds and thread counts; votes and AdamW do so everywhere.
* ``mean-adamw``: mean gradient, then AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from optim.muon import muon_scale
from optim.newton_schulz import Coefficients, iteration_triples
from optim.roles import ParameterRole
from protos.buckets import Reduce
from protos.methods import Scaling

Rule = Literal["vote-polar", "vote-sign", "mean-muon", "mean-adamw"]

REDUCE: dict[Rule, Reduce] = {
    "vote-polar": "majority",
    "vote-sign": "majority",
    "mean-muon": "mean",
    "mean-adamw": "mean",
}
NS_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MATCH_RMS = 0.2  # RMS of a typical AdamW update divided by its learning rate
# Largest gradient entry that is accepted: the moving average and the Nesterov sum then stay finite.
LARGEST_GRADIENT = torch.finfo(torch.float32).max / 4


@dataclass(frozen=True)
class RuleOptions:
    """Options of one parameter group; ``param_groups`` carry them under the same names.

    Attributes:
        rule: see the module's text.
        lr: learning rate, before ``scaling``.
        weight_decay: decoupled: the parameter is multiplied by ``1 - lr * weight_decay``, whatever its shape.
        momentum: beta of the moving average, in [0, 1).
        nesterov: take ``beta M + (1 - beta) G`` instead of ``M``.
        ns_steps, ns_coefficients: see :func:`optim.newton_schulz.newton_schulz`.
        ns_dtype: ``"float32"`` or ``"bfloat16"``; bf16 flips about 1 % of the signs of a polar factor.
        scaling: factor on the step. A vote has RMS 1, so ``unit-gain`` is ``1 / sqrt(fan_in)``, ``match-rms``
            is 0.2 and ``none`` is 1. For ``mean-muon``, whose polar factor has spectral norm 1, they are
            ``sqrt(max(1, rows / columns))``, ``0.2 * sqrt(max(rows, columns))`` and 1.
        betas, eps: of AdamW.
    """

    rule: Rule
    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_coefficients: Coefficients = "polar-express"
    ns_dtype: str = "float32"
    scaling: Scaling = "none"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.rule not in get_args(Rule):
            raise ValueError(f"unknown rule {self.rule!r}: use one of {', '.join(get_args(Rule))}")
        for name in ("lr", "weight_decay", "eps"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {value}")
        for name, beta in (
            ("momentum", self.momentum),
            ("betas[0]", self.betas[0]),
            ("betas[1]", self.betas[1]),
        ):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name} must be in [0, 1), not {beta}")
        if self.scaling not in get_args(Scaling):
            raise ValueError(f"unknown scaling {self.scaling!r}: use one of {', '.join(get_args(Scaling))}")
        if self.ns_dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype must be float32 or bfloat16, not {self.ns_dtype!r}")
        iteration_triples(self.ns_coefficients, self.ns_steps)

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> RuleOptions:
        """Read a parameter group as it stands now, with whatever a scheduler has written into it."""
        return cls(**{field.name: group[field.name] for field in fields(cls)})


def vote_scale(scaling: Scaling, fan_in: int) -> float:
    """Factor on the learning rate of a voted step; see :class:`RuleOptions`."""
    if scaling == "unit-gain":
        return 1.0 / math.sqrt(fan_in)
    return MATCH_RMS if scaling == "match-rms" else 1.0


def polar_scale(scaling: Scaling, rows: int, columns: int) -> float:
    """Factor on the learning rate of a full-precision polar step; see :class:`RuleOptions`."""
    if scaling == "unit-gain":
        return muon_scale("original", rows, columns)
    return muon_scale("match_rms_adamw", rows, columns) if scaling == "match-rms" else 1.0


def local_directions(
    momenta: list[Tensor], gradients: list[Tensor | None], options: RuleOptions
) -> list[Tensor]:
    """Update momenta that never leave their node, in place, and return the directions to vote on.

    Args:
        momenta: fp32, of one device, updated to ``beta M + (1 - beta) G``.
        gradients: of the same shapes; ``None`` counts as zero.

    Returns:
        The momenta themselves or new tensors (Nesterov); contiguous.
    """
    beta = options.momentum
    found = [gradient for gradient in gradients if gradient is not None]
    if len(found) < len(gradients):
        found = [
            torch.zeros_like(momentum) if gradient is None else gradient
            for momentum, gradient in zip(momenta, gradients, strict=True)
        ]
    torch._foreach_lerp_(momenta, found, 1.0 - beta)
    if not options.nesterov:
        return momenta
    return [direction.contiguous() for direction in torch._foreach_lerp(found, momenta, beta)]


def shared_direction(momentum: Tensor, gradient: Tensor, options: RuleOptions) -> Tensor:
    """The same for a momentum that every node must hold in equal bits: no fused operation; ``gradient`` is
    overwritten."""
    beta = options.momentum
    gradient.mul_(1.0 - beta)
    momentum.mul_(beta).add_(gradient)
    return gradient.add_(momentum.mul(beta)) if options.nesterov else momentum


def state_of(rule: Rule, parameter: Tensor) -> dict[str, Tensor]:
    """Fresh optimizer state: fp32 zeros like ``parameter``, and for AdamW an int64 counter of its updates."""
    if rule == "mean-adamw":
        return {
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
            "step": torch.zeros((), dtype=torch.int64),
        }
    return {"momentum_buffer": torch.zeros_like(parameter)}


def all_usable(gradients: list[Tensor]) -> bool:
    """Whether every entry is finite and small enough for the moving averages.

    Finite Euclidean norms, the fastest way to read tensors, say so at once; otherwise extremes decide.
    """
    if not gradients:
        return True
    device = gradients[0].device
    norms = torch._foreach_norm(gradients)  # of one device in one call
    if math.isfinite(torch.stack([norm.to(device) for norm in norms]).sum().item()):
        return True  # the squares did not overflow: no entry is above 2e19
    for gradient in gradients:
        low, high = torch.aminmax(gradient)  # a NaN is passed on
        if not (low.item() >= -LARGEST_GRADIENT and high.item() <= LARGEST_GRADIENT):
            return False
    return True


def check_parameter(role: ParameterRole, rule: Rule) -> None:
    """Raise ``ValueError`` for a parameter that is not contiguous fp32, or a polar rule on anything but a
    matrix."""
    parameter = role.parameter
    if parameter.dtype != torch.float32 or not parameter.is_contiguous():
        raise ValueError(
            f"{role.name}: exchanged parameters are contiguous float32 (use autocast for lower precision), "
            f"not {parameter.dtype} with strides {parameter.stride()}"
        )
    if rule in ("vote-polar", "mean-muon") and role.role != "matrix":
        raise ValueError(
            f"{role.name}: the rule {rule} needs a matrix, this parameter has the role {role.role}"
        )


def usable_gradient(role: ParameterRole) -> Tensor | None:
    """The gradient of a parameter; raises ``RuntimeError`` for a sparse one or another dtype than fp32."""
    gradient = role.parameter.grad
    if gradient is not None and (gradient.is_sparse or gradient.dtype != torch.float32):
        raise RuntimeError(
            f"{role.name}: the gradient must be a dense float32 tensor, not {gradient.layout} "
            f"{gradient.dtype}: build embeddings with sparse=False"
        )
    return gradient
