"""What the inventory says of a model, on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from node.island.inventory import (
    BUILT_IN,
    ROOT,
    Matrices,
    Weight,
    blocks_of,
    elements,
    inventory_of,
)
from node.island.layout import LayoutError
from node.model import model_on_meta
from protos.sections import ModelConfig


class Experts(nn.Module):
    """A block with a fused projection, a stack of matrices and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(8, 16, bias=False)
        self.stack = nn.Parameter(torch.empty(4, 6, 8))
        self.norm = nn.RMSNorm(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.inner = nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(2))})
        self.inner["layers"][1].qkv_proj.weight = self.inner["layers"][0].qkv_proj.weight
        self.head = nn.Linear(8, 11, bias=False)


def meta_model() -> Model:
    with torch.device("meta"):
        return Model()


def test_blocks_roles_and_matrices() -> None:
    model = meta_model()
    assert list(blocks_of(model)) == ["inner.layers.0", "inner.layers.1"]
    assert blocks_of(model)["inner.layers.1"] is model.inner["layers"][1]
    at = "inner.layers"
    assert inventory_of(model) == [
        Weight("embed.weight", (11, 8), ROOT, "embedding"),
        Weight(f"{at}.0.stack", (4, 6, 8), f"{at}.0", "matrix", (Matrices(4, 6, 8),)),
        Weight(f"{at}.0.qkv_proj.weight", (16, 8), ROOT, "matrix", (Matrices(1, 16, 8),)),  # shared
        Weight(f"{at}.0.norm.weight", (8,), f"{at}.0", "vector"),
        Weight(f"{at}.1.stack", (4, 6, 8), f"{at}.1", "matrix", (Matrices(4, 6, 8),)),
        Weight(f"{at}.1.norm.weight", (8,), f"{at}.1", "vector"),
        Weight("head.weight", (11, 8), ROOT, "embedding"),
    ]


def test_fused_weights_are_split_by_name() -> None:
    model = meta_model()

    def qkv(split: dict[str, int | tuple[int, ...]]) -> tuple[Matrices, ...]:
        return next(w.matrices for w in inventory_of(model, split=split) if "qkv" in w.name)

    assert qkv({"*.qkv_proj.weight": (8, 4, 4)}) == (Matrices(1, 8, 8), Matrices(1, 4, 8), Matrices(1, 4, 8))
    assert qkv({"*.qkv_proj.weight": 2}) == (Matrices(2, 8, 8),)
    with pytest.raises(LayoutError, match=r"parts of \(8, 4\) rows"):
        qkv({"*.qkv_proj.weight": (8, 4)})
    with pytest.raises(LayoutError, match=r"matches \['\*\.qkv'\]"):
        qkv({"*.qkv": (8, 8)})
    with pytest.raises(LayoutError, match="only a matrix can be split, this is a embedding"):
        qkv({"head.weight": (8, 3)})


def test_frozen_tensors_and_other_dtypes_have_their_own_groups() -> None:
    model = meta_model()
    model.inner["layers"][0].stack.requires_grad_(False)
    model.inner["layers"][1].norm.bfloat16()
    found = {weight.name: weight for weight in inventory_of(model)}
    assert found["inner.layers.0.stack"].group == "inner.layers.0 (frozen)"
    assert found["inner.layers.0.stack"].matrices == ()
    assert found["inner.layers.0.stack"].role == "embedding"
    assert found["inner.layers.1.norm.weight"].group == "inner.layers.1 (bfloat16)"


def test_a_run_files_model() -> None:
    model = model_on_meta(ModelConfig(name="llama", d_model=32, layers=3, heads=2))
    weights = inventory_of(model)
    assert elements(weights) == sum(parameter.numel() for parameter in model.parameters())
    assert [weight.name for weight in weights] == [name for name, _ in model.named_parameters()]
    assert len({weight.group for weight in weights}) == 4
    assert len(blocks_of(model)) == 3


def test_built_in_models_have_their_sizes() -> None:
    dense = BUILT_IN["llama3-70b"]()
    assert elements(dense) == 70_553_706_496
    assert sum(len(weight.matrices) for weight in dense) == 560
    experts = BUILT_IN["moe-2.4t"]()
    assert elements(experts) == pytest.approx(2.4e12, rel=0.01)
    assert sum(len(weight.matrices) for weight in experts) == 65_268
