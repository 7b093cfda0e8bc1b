"""AdamW in separately rounded operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.adamw import adamw_update_, integer_power, rounded_sqrt


def run(dtype: torch.dtype, steps: int = 30, **options) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(257, generator=generator).to(dtype)
    ours, theirs = start.clone(), torch.nn.Parameter(start.clone())
    m, v = torch.zeros_like(ours), torch.zeros_like(ours)
    optimizer = torch.optim.AdamW([theirs], **options)
    for step in range(1, steps + 1):
        gradient = torch.randn(257, generator=generator).to(dtype) * 10.0 ** (step % 5 - 2)
        theirs.grad = gradient
        optimizer.step()
        kept = gradient.clone()
        adamw_update_(ours, gradient, m, v, step=step, **options)
        assert torch.equal(gradient, kept)
    return ours, theirs.detach()


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_torch(decay: float) -> None:
    options = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay}
    ours, theirs = run(torch.float32, **options)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=2e-6)
    ours, theirs = run(torch.float64, **options)
    torch.testing.assert_close(ours, theirs, atol=1e-13, rtol=1e-13)


def test_every_operation_is_rounded_on_its_own() -> None:
    # numpy has no fused operations: equal bits show that the torch version has none either
    generator = torch.Generator().manual_seed(5)
    p, g, m = (torch.randn(4096, generator=generator) for _ in range(3))
    v = torch.rand(4096, generator=generator)
    lr, b1, b2, eps, decay, step = 1e-2, 0.9, 0.95, 1e-8, 0.1, 7
    f = np.float32
    w, gn, mn, vn = (x.numpy().copy() for x in (p, g, m, v))
    adamw_update_(p, g, m, v, step=step, lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay)
    mn = mn * f(b1) + gn * f(1 - b1)
    vn = vn * f(b2) + (gn * f(1 - b2)) * gn
    root = np.sqrt(vn * f(1 / (1 - integer_power(b2, step)))) + f(eps)
    w = w * f(1 - lr * decay) - mn * f(lr / (1 - integer_power(b1, step))) / root
    for ours, expected in ((p, w), (m, mn), (v, vn)):
        assert np.array_equal(ours.numpy(), expected)


def test_square_roots_are_correctly_rounded() -> None:
    generator = torch.Generator().manual_seed(8)
    x = torch.rand(200_000, generator=generator) * 10.0 ** torch.randint(
        -40, 30, (200_000,), generator=generator
    )
    x = torch.cat([x, torch.tensor([0.0, 1e-45, 1e-38, 1.0, 4.0, torch.finfo(torch.float32).max])])
    assert np.array_equal(rounded_sqrt(x).numpy(), np.sqrt(x.numpy()))


def test_integer_power() -> None:
    for exponent in (0, 1, 2, 3, 10, 1000):
        assert integer_power(0.95, exponent) == pytest.approx(0.95**exponent, rel=1e-12)
    assert integer_power(2.0, 10) == 1024.0
    with pytest.raises(ValueError, match="negative"):
        integer_power(0.9, -1)
