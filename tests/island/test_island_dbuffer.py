"""Pinned buffers: what may happen to weights between forward and backward, and what may not."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from node.island import (
    LayoutError,
    TensorMeta,
)
from node.island.dbuffer import DBuffer
from node.island.layout import owned, ragged
from tests.island.rig import device


def weights(size: int = 32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(device())


class Linear:
    """One product with weights in a buffer, forward done; ``check`` runs backward."""

    def __init__(self, form: str) -> None:
        self.layout = owned([TensorMeta("w", (4, 8))], [0], 1, align=1)
        self.buffer = DBuffer(self.layout, 0, dtype=torch.float32, device=device())
        self.buffer.allocate().copy_(weights())
        self.weight = self.buffer.unsharded[0]
        self.x = torch.ones(3, 8, device=device(), requires_grad=True)
        y = {
            "view": lambda: self.x @ self.weight.t(),
            "leaf": lambda: F.linear(self.x, self.weight),
            "cast": lambda: self.x @ self.weight.to(torch.float64).t().float(),
        }[form]()
        self.sum = y.sum()

    def error(self) -> float:
        self.sum.backward()
        assert self.x.grad is not None
        return (self.x.grad - weights().view(4, 8).sum(0)).abs().max().item()


FORMS = pytest.mark.parametrize("form", ["view", "leaf", "cast"])


@FORMS
def test_pinned_storage_serves_views_saved_before_it_was_emptied(form: str) -> None:
    linear = Linear(form)
    address = linear.buffer.storage._cdata
    linear.buffer.release()
    assert linear.buffer.full_bytes == 0 and linear.weight.untyped_storage().nbytes() == 0
    torch.empty(1 << 16, device=device()).fill_(7.0)
    linear.buffer.allocate().copy_(weights())
    assert linear.buffer.full_bytes == 128 and linear.weight.untyped_storage()._cdata == address
    assert linear.error() < 1e-5


@FORMS
def test_filling_without_an_alias_is_taken_for_a_modification(form: str) -> None:
    linear = Linear(form)
    version = linear.weight._version
    linear.buffer.release()
    linear.buffer.allocate().copy_(weights())
    assert linear.weight._version == version
    linear.buffer.full.copy_(weights())
    assert linear.weight._version > version
    if form == "cast":
        assert linear.error() < 1e-5  # autograd saved a copy: correct, but not released either
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            linear.error()


def test_a_buffer_that_another_group_fills_gives_silently_wrong_gradients() -> None:
    """Why storages are pinned: neither autograd nor the allocator would notice."""
    linear = Linear("view")
    linear.buffer.allocate().fill_(7.0)  # another group's weights
    linear.weight.data = weights().view(4, 8)  # ours gathered elsewhere
    assert linear.error() > 1.0


def test_swapping_the_data_keeps_the_old_weights_alive() -> None:
    linear = Linear("view")
    alive = ref(linear.buffer.storage)
    linear.weight.data = weights().view(4, 8)
    linear.buffer = None  # type: ignore[assignment]
    gc.collect()
    assert linear.sum.grad_fn is not None
    saved = linear.sum.grad_fn.next_functions[0][0]
    assert saved is not None
    assert saved._saved_mat2.untyped_storage().nbytes() == 128  # the old storage, not the new one
    assert saved._saved_mat2.data_ptr() != linear.weight.data_ptr()
    assert alive is not None and linear.error() < 1e-5


def test_reading_released_weights_is_loud() -> None:
    for form in ("view", "leaf"):
        linear = Linear(form)
        linear.buffer.release()
        with pytest.raises(RuntimeError):
            linear.error()


def test_buffer_wide_operations_and_refusals() -> None:
    layout = ragged([TensorMeta("a", (3, 4), 4), TensorMeta("b", (), 1)], 2, align=1)
    buffer = DBuffer(layout, 0, dtype=torch.float32, compute_dtype=torch.bfloat16, device=device())
    buffer.fill(0, torch.arange(12.0).view(3, 4))
    buffer.scale_(2.0)
    assert buffer.sharded[0].tolist() == [[0.0, 2.0, 4.0, 6.0], [8.0, 10.0, 12.0, 14.0]]
    assert buffer.segment().dtype == torch.bfloat16 and buffer.sharded[1].shape == (0,)
    buffer.zero_()
    assert not buffer.sharded[0].any()
    with pytest.raises(LayoutError, match=r"a has shape \(3, 4\), not \(4, 3\)"):
        buffer.fill(0, torch.zeros(4, 3))
    with pytest.raises(LayoutError, match="a was replaced by a tensor of shape"):
        buffer.move([nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(0))])
