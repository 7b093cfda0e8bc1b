"""Which parameter gets which role, and how it is seen as matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from optim.averaged import DDPAdamW, DDPMuon
from optim.lordo.low_rank_ddp import LowRankDDP
from optim.lordo.optimizer import LoRDO
from optim.roles import ParameterRole, RoleError, by_role, classify
from optim.sign_muon import SignMuon, Signum


def roles_of(model: nn.Module, **options) -> dict[str, ParameterRole]:
    return {item.name: item for item in classify(model, **options)}


def kinds_of(model: nn.Module, **options) -> dict[str, str]:
    return {name: item.role for name, item in roles_of(model, **options).items()}


class Decoder(nn.Module):
    """A language model whose head is tied, a module of its own, or the embedding's matrix used as a
    function."""

    def __init__(self, head: str, vocabulary: int = 32, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Parameter(torch.zeros(1, 16, width))
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        if head != "function":
            self.lm_head = nn.Linear(width, vocabulary, bias=False)
        if head == "tied":
            self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position_embedding[:, : tokens.shape[1]]
        for layer in self.layers:
            x = x + functional.silu(layer(x))
        return functional.linear(self.norm(x), self.embedding.weight)


@pytest.mark.parametrize("head", ["tied", "untied", "function"])
def test_language_models(head: str) -> None:
    kinds = kinds_of(Decoder(head))
    expected = {
        "embedding.weight": "embedding",
        "layers.0.weight": "matrix",
        "layers.1.weight": "matrix",
        "norm.bias": "vector",
        "norm.weight": "vector",
        "position_embedding": "embedding",
    }
    if head == "untied":
        expected["lm_head.weight"] = "embedding"
    assert kinds == expected


def test_a_last_layer_inside_the_blocks_is_no_head() -> None:
    # width = vocabulary / 4 makes the up-projection as large as the embedding, but it is not the last layer
    model = Decoder("function")
    model.layers.append(nn.Linear(8, 32, bias=False))
    model.layers.append(nn.Linear(32, 8, bias=False))
    kinds = kinds_of(model)
    assert kinds["layers.2.weight"] == kinds["layers.3.weight"] == "matrix"


def test_roles_are_sorted_by_name() -> None:
    names = [item.name for item in classify(Decoder("untied"))]
    assert names == sorted(names)


def test_a_classifier_ends_in_a_head() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Flatten(), nn.Linear(24, 12), nn.Linear(12, 10)
    )
    assert kinds_of(model) == {
        "0.bias": "vector",
        "0.weight": "matrix",
        "1.bias": "vector",
        "1.weight": "vector",
        "3.bias": "vector",
        "3.weight": "matrix",
        "4.bias": "vector",
        "4.weight": "embedding",
    }


def test_convolutions_are_seen_as_outputs_by_rest() -> None:
    model = nn.Sequential(
        nn.Conv1d(4, 6, 5),
        nn.Conv2d(6, 8, (3, 2), groups=2),
        nn.Conv3d(2, 4, 3),
        nn.ConvTranspose2d(8, 5, 3),
        nn.Linear(3, 3),
    )
    roles = roles_of(model)
    assert (roles["0.weight"].view, roles["0.weight"].fan_in) == ((1, 6, 20), 20)
    assert (roles["1.weight"].view, roles["1.weight"].fan_in) == ((1, 8, 18), 18)
    assert (roles["2.weight"].view, roles["2.weight"].fan_in) == ((1, 4, 54), 54)
    assert (roles["3.weight"].view, roles["3.weight"].fan_in) == ((1, 8, 45), 72)


def test_fused_weights_are_split_in_blocks() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)
            self.lstm = nn.LSTM(5, 6)
            self.cell = nn.GRUCell(5, 6)
            self.qkv = nn.Linear(8, 24)
            self.experts = nn.Parameter(torch.zeros(4, 6, 10))
            self.head = nn.Linear(8, 3)

    roles = roles_of(Fused(), blocks={"qkv.weight": 3, "experts": 2})
    assert roles["attention.in_proj_weight"].view == (3, 8, 8)
    assert roles["attention.out_proj.weight"].view == (1, 8, 8)
    assert roles["lstm.weight_ih_l0"].view == (4, 6, 5)
    assert roles["cell.weight_hh"].view == (3, 6, 6)
    assert (roles["qkv.weight"].view, roles["qkv.weight"].fan_in) == ((3, 8, 8), 8)
    assert (roles["experts"].view, roles["experts"].fan_in) == ((8, 3, 10), 10)
    with pytest.raises(RoleError, match="24 rows cannot be split into 5"):
        classify(Fused(), blocks={"qkv.weight": 5})
    with pytest.raises(RoleError, match="only a matrix can be split"):
        classify(Fused(), blocks={"head.weight": 3})


def test_weights_stored_as_inputs_by_outputs() -> None:
    class Conv1D(nn.Module):  # the linear layer of transformers' GPT-2
        def __init__(self, outputs: int, inputs: int) -> None:
            super().__init__()
            self.nf = outputs
            self.weight = nn.Parameter(torch.zeros(inputs, outputs))

    model = nn.Sequential(Conv1D(24, 8), nn.Linear(3, 3))
    role = roles_of(model)["0.weight"]
    assert (role.view, role.fan_in) == ((1, 8, 24), 8)
    with pytest.raises(RoleError, match="are columns"):
        classify(model, blocks={"0.weight": 2})


def test_frozen_and_empty_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    kinds = kinds_of(model)
    assert "0.weight" not in kinds and "2.weight" not in kinds and "empty" not in kinds
    assert kinds["1.weight"] == "matrix"  # a frozen head does not make its predecessor one


def test_tied_weights_count_once() -> None:
    model = nn.Sequential(
        nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)
    )
    model[1].weight = model[0].weight
    assert list(kinds_of(model)) == ["0.weight", "2.weight"]
    assert kinds_of(model, overrides={"1.weight": "embedding"})["0.weight"] == "embedding"


def test_overrides() -> None:
    model = Decoder("untied")
    kinds = kinds_of(model, overrides={"layers.0.*": "embedding", "layers.*": "vector", "lm_*": "matrix"})
    assert (kinds["layers.0.weight"], kinds["layers.1.weight"], kinds["lm_head.weight"]) == (
        "embedding",
        "vector",
        "matrix",
    )
    with pytest.raises(RoleError, match=r"no trainable parameter matches \['layer\.0\.\*'\]"):
        classify(model, overrides={"layer.0.*": "matrix"})
    with pytest.raises(RoleError, match="unknown role 'martix'"):
        classify(model, overrides={"layers.*": "martix"})  # type: ignore[dict-item]
    with pytest.raises(RoleError, match=r"norm\.weight: a tensor of shape"):
        classify(model, overrides={"norm.weight": "matrix"})


def test_norms_of_several_dimensions_and_scalars_are_vectors() -> None:
    model = nn.Sequential(nn.LayerNorm((4, 5)), nn.PReLU(), nn.Linear(4, 4))
    model.register_parameter("temperature", nn.Parameter(torch.tensor(1.0)))
    kinds = kinds_of(model)
    assert kinds["0.weight"] == kinds["1.weight"] == kinds["temperature"] == "vector"


def test_output_embeddings_of_a_model_that_names_them() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(4, 7)
            self.last = nn.Linear(4, 4)

        def get_output_embeddings(self) -> nn.Module:
            return self.out

    kinds = kinds_of(Named())
    assert (kinds["out.weight"], kinds["last.weight"]) == ("embedding", "matrix")


def test_selection_by_role() -> None:
    roles = classify(Decoder("function"))
    assert [item.name for item in by_role(roles, "vector")] == ["norm.bias", "norm.weight"]


@pytest.mark.parametrize("optimizer", [LoRDO, LowRankDDP, SignMuon, Signum, DDPMuon, DDPAdamW])
def test_parameters_in_place_of_the_model_are_refused_in_words(optimizer) -> None:
    with pytest.raises(TypeError, match=r"must be the model .*, not generator: pass the model itself"):
        optimizer(nn.Linear(2, 2).parameters())
