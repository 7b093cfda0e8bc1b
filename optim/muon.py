"""Muon (Keller Jordan): momentum, then the polar factor as the direction. The full-precision reference of
this package.

:class:`Muon` equals ``torch.optim.Muon`` for the same options and additionally takes convolutions, stacks of
matrices, fp32 iterations and Polar Express coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from optim.newton_schulz import QUINTIC, Coefficients, plan_stacks, polar_factors

AdjustLr = Literal["original", "match_rms_adamw"]


def muon_scale(adjust: AdjustLr | None, rows: int, columns: int) -> float:
    """Factor on the learning rate of a polar step.

    ``"original"`` (or ``None``): ``sqrt(max(1, rows / columns))``. ``"match_rms_adamw"``: ``0.2 *
    sqrt(max(rows, columns))``, which gives the update the RMS of a typical AdamW step (Moonlight, arXiv
    2502.16982). Raises ``ValueError`` for anything else.
    """
    if adjust is None or adjust == "original":
        return math.sqrt(max(1.0, rows / columns))
    if adjust == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    raise ValueError(f"adjust_lr_fn must be 'original' or 'match_rms_adamw', not {adjust!r}")


def matrix_view(tensor: Tensor) -> tuple[int, int, int]:
    """``(slices, rows, columns)``: 2-D as it is, 3-D as a stack of matrices, 4-D and 5-D (convolutions)
    flattened to ``(c_out, rest)``. Raises ``ValueError`` below two dimensions."""
    if tensor.ndim < 2:
        raise ValueError(
            f"Muon updates matrices, not a tensor of shape {tuple(tensor.shape)}: use AdamW for it"
        )
    if tensor.ndim == 3:
        slices, rows, columns = tensor.shape
        return slices, rows, columns
    return 1, tensor.shape[0], tensor.numel() // tensor.shape[0]


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay.

    Args:
        params: parameters of two or more dimensions (see :func:`matrix_view`), or parameter groups. Flatten
            ``nn.Conv1d`` weights yourself: three dimensions mean a stack.
        lr: learning rate, before the shape factor of ``adjust_lr_fn``.
        weight_decay: ``W`` is multiplied by ``1 - lr * weight_decay``, without the shape factor.
        momentum: beta of the moving average ``M = beta M + (1 - beta) G``.
        nesterov: orthogonalise ``beta M + (1 - beta) G`` instead of ``M``.
        ns_coefficients, ns_steps, eps: see :func:`optim.newton_schulz.newton_schulz`.
        adjust_lr_fn: see :func:`muon_scale`.
        ns_dtype: precision of the iteration; ``None`` is fp32 on a CPU and bf16 on CUDA. ``torch.optim.Muon``
            always uses bf16.

    Raises:
        ValueError: for options out of range or parameters without a matrix view.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: AdjustLr | None = None,
        ns_dtype: torch.dtype | None = None,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not 0.0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {value}")
        if not 0.0 <= momentum < 1.0:
            raise ValueError(f"momentum must be in [0, 1), not {momentum}")
        muon_scale(adjust_lr_fn, 1, 1)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                matrix_view(parameter)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One update of every parameter that has a gradient; returns what ``closure`` returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            active = [parameter for parameter in group["params"] if parameter.grad is not None]
            for device in {parameter.device for parameter in active}:
                self._update(group, [parameter for parameter in active if parameter.device == device])
        return loss

    def _update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        views = [matrix_view(parameter) for parameter in parameters]
        for stack in plan_stacks(views, parameters[0].device):
            directions = []
            for index in stack:
                parameter, gradient = parameters[index], parameters[index].grad
                assert gradient is not None
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                momentum = state["momentum_buffer"]
                momentum.lerp_(gradient, 1.0 - group["momentum"])
                direction = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
                slices, rows, columns = views[index]
                shape = (rows, columns) if slices == 1 else (slices, rows, columns)
                directions.append(direction.reshape(shape))
            factors = polar_factors(
                directions,
                steps=group["ns_steps"],
                coefficients=group["ns_coefficients"],
                dtype=group["ns_dtype"],
                eps=group["eps"],
            )
            for index, factor in zip(stack, factors, strict=True):
                _, rows, columns = views[index]
                parameter = parameters[index]
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                scale = muon_scale(group["adjust_lr_fn"], rows, columns)
                parameter.add_(factor.reshape(parameter.shape), alpha=-group["lr"] * scale)
