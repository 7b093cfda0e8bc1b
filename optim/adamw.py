"""AdamW (Loshchilov and Hutter, arXiv 1711.05101) as separately rounded fp32 operations.

``torch.optim.AdamW`` fuses products and sums (``addcmul``, ``lerp``), which round differently on unlike
hardware. Here every multiplication, addition, square root and division is a kernel of its own, each correctly
rounded by IEEE 754, so that equal inputs give equal bits everywhere (with subnormal numbers kept, torch's
default).
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from optim.layout import Pack


def integer_power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring, in multiplications only: the C library's ``pow`` is not the same
    everywhere.

    Raises ``ValueError`` for a negative exponent.
    """
    if exponent < 0:
        raise ValueError(f"exponent must not be negative: {exponent}")
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def rounded_sqrt(x: Tensor) -> Tensor:
    """Correctly rounded square root of an fp32 tensor.

    ``torch.sqrt`` on a CPU may call a vector library that is one bit off in half a percent of the cases, and
    not in the same ones on every processor. No fp32 number has a root so close to the middle of two fp32
    numbers that an error of one bit in fp64 could cross it.
    """
    return x.to(torch.float64).sqrt_().to(x.dtype)


@torch.no_grad()
def adamw_update_(
    parameter: Tensor,
    gradient: Tensor,
    first_moment: Tensor,
    second_moment: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One update, in place.

    Args:
        parameter, first_moment, second_moment: fp32 tensors of one shape, updated.
        gradient: fp32 of the same shape; left unchanged.
        step: number of this update, from 1.
        lr, betas, eps: as in the paper.
        weight_decay: decoupled; the parameter is multiplied by ``1 - lr * weight_decay`` first.
    """
    beta1, beta2 = betas
    first_moment.mul_(beta1).add_(gradient.mul(1.0 - beta1))
    square = gradient.mul(1.0 - beta2).mul_(gradient)
    second_moment.mul_(beta2).add_(square)
    # Scalars enter as factors: dividing a CUDA tensor by a number multiplies by its rounded reciprocal.
    root = rounded_sqrt(second_moment.mul(1.0 / (1.0 - integer_power(beta2, step)))).add_(eps)
    update = first_moment.mul(lr / (1.0 - integer_power(beta1, step))).div_(root)
    if weight_decay != 0.0:
        parameter.mul_(1.0 - lr * weight_decay)
    parameter.sub_(update)


def adamw_pack_(
    pack: Pack,
    mean: Tensor,
    states: Mapping[Tensor, MutableMapping[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step of every tensor of a mean bucket, in place.

    Args:
        mean: fp32, the bucket's elements, as :func:`optim.packs.read_fp32` gives them.
        states: of each parameter: ``exp_avg``, ``exp_avg_sq`` and the counter ``step``, see
            :func:`optim.rules.state_of`.
    """
    for item, gradient in pack.split(mean):
        state = states[item.parameter]
        state["step"] += 1
        adamw_update_(
            item.parameter,
            gradient.to(item.parameter.device),
            state["exp_avg"],
            state["exp_avg_sq"],
            step=int(state["step"]),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
