"""Muon against ``torch.optim.Muon``, and the tensors that torch's does not take."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from optim.muon import Muon, matrix_view, muon_scale
from optim.newton_schulz import newton_schulz


def parameters(shapes: list[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(tensors: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for tensor in tensors:
        tensor.grad = torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_equals_torch_muon(nesterov: bool, adjust, decay: float) -> None:
    shapes = [(24, 40), (40, 24), (16, 16), (16, 16), (1, 8)]
    ours, theirs = parameters(shapes), parameters(shapes)
    options = {
        "lr": 0.02,
        "momentum": 0.9,
        "nesterov": nesterov,
        "weight_decay": decay,
        "adjust_lr_fn": adjust,
    }
    left = Muon(ours, ns_dtype=torch.bfloat16, **options)
    right = torch.optim.Muon(theirs, **options)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        left.step()
        right.step()
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-6


def test_defaults_are_those_of_torch() -> None:
    ours = Muon(parameters([(4, 4)])).defaults
    theirs = torch.optim.Muon(parameters([(4, 4)])).defaults
    assert {key: ours[key] for key in theirs} == theirs


def test_convolutions_are_flattened_and_stacks_go_slice_by_slice() -> None:
    conv, stack = parameters([(8, 3, 3, 3), (4, 6, 10)])
    start_conv, start_stack = conv.detach().clone(), stack.detach().clone()
    set_gradients([conv, stack], 0)
    Muon([conv, stack], lr=0.1, weight_decay=0.0, momentum=0.0, nesterov=False).step()

    def expected(start: Tensor, gradient: Tensor) -> Tensor:
        rows, columns = start.shape
        polar = newton_schulz(gradient, coefficients="quintic", eps=1e-7)
        return start - 0.1 * math.sqrt(max(1.0, rows / columns)) * polar

    assert conv.grad is not None and stack.grad is not None
    flat = expected(start_conv.flatten(1), conv.grad.flatten(1))
    torch.testing.assert_close(conv.detach().flatten(1), flat, atol=1e-6, rtol=1e-6)
    for index in range(4):
        torch.testing.assert_close(
            stack.detach()[index], expected(start_stack[index], stack.grad[index]), atol=1e-6, rtol=1e-6
        )


def test_state_dict_resumes() -> None:
    shapes = [(6, 9), (12, 5)]
    whole, split = parameters(shapes), parameters(shapes)
    reference = Muon(whole, lr=0.02)
    first = Muon(split, lr=0.02)
    for step in range(2):
        set_gradients(whole, step)
        set_gradients(split, step)
        reference.step()
        first.step()
    second = Muon(split, lr=0.5)
    second.load_state_dict(first.state_dict())
    set_gradients(whole, 2)
    set_gradients(split, 2)
    reference.step()
    second.step()
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))


def test_closure_and_missing_gradients() -> None:
    used, unused = parameters([(4, 4), (4, 4)])
    before = unused.detach().clone()
    optimizer = Muon([used, unused])

    def closure() -> float:
        optimizer.zero_grad()
        loss = used.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) > 0.0
    assert torch.equal(unused, before)


@pytest.mark.parametrize(
    "options",
    [{"lr": -1.0}, {"lr": math.inf}, {"momentum": 1.0}, {"weight_decay": -1.0}, {"adjust_lr_fn": "x"}],
)
def test_bad_options(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Muon(parameters([(4, 4)]), **options)


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match="use AdamW"):
        Muon(parameters([(4,)]))


def test_views_and_scales() -> None:
    assert matrix_view(torch.zeros(3, 5)) == (1, 3, 5)
    assert matrix_view(torch.zeros(2, 3, 5)) == (2, 3, 5)
    assert matrix_view(torch.zeros(6, 3, 5, 5)) == (1, 6, 75)
    assert muon_scale(None, 8, 2) == 2.0 and muon_scale("original", 2, 8) == 1.0
    assert muon_scale("match_rms_adamw", 25, 4) == pytest.approx(1.0)
