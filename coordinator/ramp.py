"""How much the vote of a newcomer weighs while its momentum is young.

A momentum ``m <- beta * m + g`` is a mean over about ``1 / (1 - beta)`` gradients. After t steps from zero it
is as good as the plain mean of ``(1 + beta) (1 - beta^t) / ((1 - beta) (1 + beta^t))`` independent gradients
(ratio of squared mean to variance): nearly t at first. So the vote's weight rises in a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, lcm
from typing import TYPE_CHECKING, Final

from protos.methods import VOTE, VOTED

if TYPE_CHECKING:
    from protos.method_section import MethodConfig

Share = tuple[int, int]  # numerator and denominator

FULL: Final[Share] = (1, 1)
LARGEST: Final = 65535  # weight of a vote


def momentum_of(method: MethodConfig) -> float:
    """The momentum behind the votes of a method; 0 where matrices are not voted on."""
    if method.has_local_steps:
        if method.codec not in VOTE:
            return 0.0
        return method.momentum if method.optimizer in ("muon", "sign-muon") else method.beta1
    return method.momentum if method.name in VOTED else 0.0


def ramp(rounds: int, momentum: float, local_steps: int = 1) -> Share:
    """Share of its weight with which a newcomer votes.

    Args:
        rounds: for which it has kept its momentum before this one, counted from 0; of a node that was there
            from the start, or has resumed its momentum, it does not ask.
        momentum: see :func:`momentum_of`.
        local_steps: of a round.

    Returns:
        Numerator and denominator, from ``local_steps * (1 - momentum)`` in its first round up to 1.
    """
    span = max(1, round(1.0 / (1.0 - momentum)))
    steps = (rounds + 1) * max(1, local_steps)
    return FULL if steps >= span else (steps, span)


def ramped(weights: Sequence[int], shares: Sequence[Share]) -> list[int]:
    """``weights`` (1 to 65535) times ``shares``, as the smallest integers that stand in the same ratio.

    Without a share below 1 the weights stay as they are: equal votes are counted faster. Where the smallest
    integers exceed 65535, all are scaled down to that and rounded, none below 1.
    """
    if all(numerator >= denominator for numerator, denominator in shares):
        return list(weights)
    common = lcm(*(denominator for _, denominator in shares))
    exact = [
        weight * numerator * (common // denominator)
        for weight, (numerator, denominator) in zip(weights, shares, strict=True)
    ]
    divisor = gcd(*exact)
    exact = [weight // divisor for weight in exact]
    largest = max(exact)
    if largest <= LARGEST:
        return exact
    return [max(1, (2 * weight * LARGEST + largest) // (2 * largest)) for weight in exact]
