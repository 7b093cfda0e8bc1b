"""The adapter for models of the transformers library; most of it runs only where that is installed."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from node.language import ModelError
from node.model import LlamaShape, build_model, model_on_meta
from optim.roles import classify

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 256,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def save(folder: Path, config: dict[str, Any]) -> LlamaShape:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return LlamaShape(name=f"hf:{folder}", context=32)


@pytest.mark.parametrize("build", [lambda c: build_model(c, 0), model_on_meta])
def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModelError, match=r"needs the transformers library.*pip install 'PATH\[hf\]'"):
        build(LlamaShape(name="hf:gpt2"))


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("transformers")


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_weights_come_from_the_seed_alone_and_train(tmp_path: Path, config: dict[str, Any]) -> None:
    shape = save(tmp_path / "model", config)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = build_model(shape, 5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    second = build_model(dataclasses.replace(shape, name=f"{shape.name}/config.json"), 5)
    other = build_model(shape, 6)
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs) and any(not torch.equal(a, c) for a, _, c in pairs)
    assert {p.dtype for p in first.parameters()} == {torch.float32}

    tokens = torch.arange(66).view(2, 33)
    optimizer = torch.optim.Adam(first.parameters(), lr=3e-3)
    start = first.loss(tokens)
    for _ in range(8):
        optimizer.zero_grad()
        first.loss(tokens).backward()
        optimizer.step()
    assert start.item() == pytest.approx(5.55, abs=0.3) and first.loss(tokens) < start - 0.5


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("tied", [True, False])
def test_meta_model_has_the_same_parameters_and_ties(tmp_path: Path, tied: bool) -> None:
    shape = save(tmp_path / "model", {**LLAMA, "tie_word_embeddings": tied})
    meta, real = model_on_meta(shape), build_model(shape, 0)
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    rows = [[(n, tuple(p.shape)) for n, p in model.named_parameters()] for model in (meta, real)]
    assert rows[0] == rows[1]
    assert any("lm_head" in name for name, _ in rows[0]) is not tied
    roles = [item.role for item in classify(meta)]
    assert (roles.count("embedding"), roles.count("matrix")) == (1 if tied else 2, 14)


@pytest.mark.usefixtures("offline")
def test_text_is_generated_with_dropout_off(tmp_path: Path) -> None:
    model = build_model(save(tmp_path / "model", GPT2), 0)
    prompt = torch.tensor([1, 2, 3])
    assert torch.equal(model.generate(prompt, 40, 0.0), model.generate(prompt, 40, 0.0))
    assert model.training


@pytest.mark.usefixtures("offline")
def test_vocabulary_and_context_are_checked(tmp_path: Path) -> None:
    shape = save(tmp_path / "model", LLAMA | {"pad_token_id": 259})
    assert build_model(dataclasses.replace(shape, vocab=256), 0).vocab == 256
    assert build_model(shape, 0).vocab == 260
    with pytest.raises(ModelError, match="the data has 300 token ids"):
        build_model(shape, 0, vocab=300)
    with pytest.raises(ModelError, match="at most 64 positions"):
        build_model(dataclasses.replace(shape, context=65), 0)


@pytest.mark.usefixtures("offline")
def test_configurations_that_cannot_be_used(tmp_path: Path) -> None:
    for shape, words in (
        (LlamaShape(name="hf:"), "lacks a folder"),
        (LlamaShape(name=f"hf:{tmp_path / 'absent'}"), "no model configuration"),
        (save(tmp_path / "bad", {"model_type": "no-such-model"}), "no model configuration"),
        (save(tmp_path / "image", {"model_type": "vit"}), "no vocab_size"),
        (save(tmp_path / "t5", {"model_type": "t5", "d_model": 32}), "not a causal language model"),
    ):
        with pytest.raises(ModelError, match=words):
            build_model(shape, 0)
