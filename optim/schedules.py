"""Learning-rate schedules: a warm-up, then a cosine, a line or nothing, down to a final fraction.

The factor of a round is part of what must be equal on every node. It is made of additions, multiplications
and divisions of doubles only, because the C library's cosine differs in the last bit from platform to
platform.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

Shape = Literal["cosine", "linear", "constant"]

_HALF_PI = 1.5707963267948966


def factor(
    round_index: float, rounds: int, *, warmup: int = 0, shape: Shape = "cosine", final: float = 0.0
) -> float:
    """Factor on the learning rate in a round.

    Args:
        round_index: from 0; a fraction within a round of several steps. Beyond ``rounds`` the final value
            stays.
        rounds: planned length of the run, at least 1.
        warmup: rounds of linear warm-up; round 0 already has the factor ``1 / warmup``.
        shape: what follows the warm-up.
        final: factor at the end of a cosine or a line, between 0 and 1.

    Returns:
        A factor between 0 and 1, the product of warm-up and decay.

    Raises:
        ValueError: for arguments outside these ranges.
    """
    if rounds < 1 or warmup < 0 or round_index < 0:
        raise ValueError(
            f"a schedule needs rounds >= 1, warmup >= 0 and a round >= 0, "
            f"not {rounds}, {warmup} and {round_index}"
        )
    if shape not in get_args(Shape):
        raise ValueError(f"unknown schedule {shape!r}: use one of {', '.join(get_args(Shape))}")
    if not 0.0 <= final <= 1.0:
        raise ValueError(f"the final fraction must be between 0 and 1, not {final}")
    rise = min(1.0, (round_index + 1) / warmup) if warmup else 1.0
    if shape == "constant":
        return rise
    progress = min(1.0, max(0.0, (round_index - warmup) / max(1, rounds - warmup)))
    fall = 1.0 - progress if shape == "linear" else 0.5 * (1.0 + cosine(progress))
    return rise * (final + (1.0 - final) * fall)


def cosine(half_turns: float) -> float:
    """``cos(pi * half_turns)`` for 0 <= half_turns <= 1, by a Taylor series in plain IEEE arithmetic (error <
    1e-15)."""
    # sin(pi / 2 - x) keeps the argument within a quarter turn and the values at 0, 1/2 and 1 exact
    x = _HALF_PI * (1.0 - 2.0 * half_turns)
    square, term, total = x * x, x, x
    for n in range(1, 11):
        term = -term * square / (2 * n * (2 * n + 1))
        total += term
    return min(1.0, max(-1.0, total))


def set_learning_rates(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set ``lr`` of every group to ``value`` times its ``initial_lr``, which is recorded at the first
    call."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * value
