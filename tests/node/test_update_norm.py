"""The norm of a change, from a sample."""

from __future__ import annotations

import math

import pytest
import torch

from node.update_norm import ROWS, WIDTH, UpdateNorm


def test_a_step_by_signs_is_measured_exactly() -> None:
    tensors = {"w": torch.randn(300, 70), "b": torch.randn(5), "whole": torch.zeros(ROWS * WIDTH)}
    norm = UpdateNorm(tensors)
    norm.before()
    for tensor in tensors.values():
        tensor.sub_(0.5 * torch.sign(torch.randn(tensor.shape)))
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert math.sqrt(norm.after()) == pytest.approx(0.5 * math.sqrt(elements))


def test_any_change_is_estimated_and_the_last_one_counts() -> None:
    torch.manual_seed(7)
    weights = {"w": torch.zeros(512, 1024), "half": torch.zeros(64, 1024, dtype=torch.bfloat16)}
    norm = UpdateNorm(weights)
    for _ in range(2):
        norm.before()
        before = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            tensor.add_(torch.randn(tensor.shape))
        exact = sum(float((weights[n].float() - before[n].float()).square().sum()) for n in weights)
        assert norm.after() == pytest.approx(exact, rel=0.15)


def test_a_rank_without_weights_adds_nothing() -> None:
    norm = UpdateNorm({})
    norm.before()
    assert norm.after() == 0.0
