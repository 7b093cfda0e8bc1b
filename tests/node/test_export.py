"""Export of a checkpoint's model: a file, and folders that transformers loads."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from node import export as export_module
from node.checkpoint import CheckpointError, save
from node.export import ExportError, export
from node.language import LanguageModel, ModelError
from node.model import build_model
from node.tensor_file import FileLayout
from protos.digests import state_digest
from protos.runfile import RunFile

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 260,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 256, "n_positions": 64}
OURS = "[model]\nd_model = 24\nlayers = 2\nheads = 3\ncontext = 32\n"


def trained(folder: Path, text: str, round_index: int = 7, vocab: int = 256) -> tuple[Path, LanguageModel]:
    """A checkpoint of a model with weights that no rule of initialisation would give, and that model."""
    run = RunFile.parse(text)
    model = build_model(run.model, 3, vocab=vocab)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shared = {**parameters, "optimizer/layers.0.attention.q.weight/exp_avg": torch.zeros(3)}
    path = save(
        folder,
        round_index=round_index,
        run_name=run.run.name,
        run_toml=run.to_toml(),
        run_digest=run.digest,
        shared=shared,
        shared_digest=state_digest(shared),
        local={"optimizer/x/momentum_buffer": torch.zeros(3)},
    )
    return path, model.eval()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return pytest.importorskip("transformers")


def logits_of(transformers: Any, folder: Path) -> tuple[torch.Tensor, Any]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS, use_cache=False).logits.float(), model


TOKENS = torch.arange(64).view(2, 32) * 5 % 251


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
def test_file_with_the_parameters_of_the_newest_checkpoint(tmp_path: Path, dtype: Any) -> None:
    trained(tmp_path / "ck", OURS.replace("24", "48"), round_index=2)
    path, model = trained(tmp_path / "ck", OURS + "tied = false\n")
    target = tmp_path / "out" / "model.safetensors"
    done = export(tmp_path / "ck", target, dtype=dtype)
    assert (done.path, done.round, done.nbytes) == (target, 7, target.stat().st_size)
    found = load_file(target)
    wanted = {name: value.detach().to(dtype or torch.float32) for name, value in model.named_parameters()}
    assert state_digest(found) == state_digest(wanted) and done.tensors == len(wanted)
    with safe_open(target, framework="pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "run": "atoll",
            "round": "7",
            "state_digest": json.loads((path / "meta.json").read_text())["state_digest"],
        }


@pytest.mark.parametrize("tied", ["true", "false"])
def test_our_decoder_is_a_llama(tmp_path: Path, offline: Any, tied: str) -> None:
    path, model = trained(tmp_path / "ck", f"{OURS}tied = {tied}\n")
    done = export(path, tmp_path / "hf")
    assert "bytes of UTF-8" in done.note
    found, theirs = logits_of(offline, tmp_path / "hf")
    assert type(theirs).__name__ == "LlamaForCausalLM" and theirs.dtype == torch.float32
    with torch.no_grad():
        ours = model(TOKENS)
    assert ours.std() > 0.4
    torch.testing.assert_close(found, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [LLAMA, LLAMA | {"tie_word_embeddings": True}, GPT2])
def test_models_of_transformers_come_back(tmp_path: Path, offline: Any, config: dict[str, Any]) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config))
    text = f"[model]\nname = 'hf:{tmp_path / 'config'}'\ncontext = 32\nvocab = 256\n"
    path, model = trained(tmp_path / "ck", text)
    export(path, tmp_path / "hf")
    found, theirs = logits_of(offline, tmp_path / "hf")
    with torch.no_grad():
        assert torch.equal(found, model(TOKENS))
    assert theirs.config.vocab_size == 256 and theirs.config.architectures == [type(theirs).__name__]

    done = export(path, tmp_path / "flat.safetensors")
    assert load_file(done.path).keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()
    theirs.load_state_dict(load_file(done.path), strict=False)

    half = export(path, tmp_path / "half", dtype=torch.bfloat16)
    assert half.nbytes < 0.6 * done.nbytes
    assert logits_of(offline, tmp_path / "half")[1].dtype == torch.bfloat16


def test_tokenizer_goes_along(tmp_path: Path, offline: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "tok").mkdir()
    inner.save(str(tmp_path / "tok" / "tokenizer.json"))
    text = f"{OURS}vocab = 5\n[data]\ntokenizer = '{tmp_path / 'tok' / 'tokenizer.json'}'\n"
    path, _ = trained(tmp_path / "ck", text, vocab=5)
    done = export(path, tmp_path / "hf")
    assert done.note == f"the tokenizer in it is {tmp_path / 'tok' / 'tokenizer.json'}"
    loaded = offline.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded("to be or not to be", add_special_tokens=False)["input_ids"] == [1, 2, 3, 4, 1, 2]

    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"model_max_length": 77}')
    export(path, tmp_path / "hf", force=True)
    assert json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text()) == {"model_max_length": 77}
    (tmp_path / "tok" / "tokenizer.json").unlink()
    assert "is not here; copy it there as tokenizer.json" in export(path, tmp_path / "again").note


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    path, _ = trained(tmp_path / "ck", OURS)
    file, folder = tmp_path / "m.safetensors", tmp_path / "hf"
    file.write_text("mine")
    folder.mkdir()
    (folder / "notes.md").write_text("mine")
    for target in (file, folder):
        with pytest.raises(ExportError, match="exists already: give --force"):
            export(path, target)
    assert file.read_text() == "mine" and [each.name for each in folder.iterdir()] == ["notes.md"]
    for target in (file, folder):
        export(path, target, force=True)
    names = {each.name for each in folder.iterdir()}
    assert names == {"notes.md", "config.json", "model.safetensors"}, "what is not ours stays"
    assert load_file(file) and sorted(each.name for each in tmp_path.iterdir()) == [
        "ck",
        "hf",
        "m.safetensors",
    ]


def test_a_checkpoint_is_never_a_target(tmp_path: Path) -> None:
    path, _ = trained(tmp_path / "ck", OURS)
    before = (path / "model.safetensors").read_bytes()
    for target in (path, path / "model.safetensors"):
        with pytest.raises(ExportError, match="is a checkpoint: export to another folder"):
            export(path, target, force=True)
    assert (path / "model.safetensors").read_bytes() == before


def test_targets_of_the_wrong_kind(tmp_path: Path) -> None:
    path, _ = trained(tmp_path / "ck", OURS)
    (tmp_path / "a.safetensors").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="is a folder: choose another name"):
        export(path, tmp_path / "a.safetensors", force=True)
    with pytest.raises(ExportError, match=r"is a file: name a folder, or a file that ends in \.safetensors"):
        export(path, tmp_path / "file", force=True)
    with pytest.raises(ExportError, match="cannot be written: Not a directory"):
        export(path, tmp_path / "file" / "in" / "it")


@pytest.mark.parametrize("name", ["m.safetensors", "folder"])
def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path, _ = trained(tmp_path / "ck", OURS)

    def full(self: FileLayout, *arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export_module.FileLayout, "write", full)
    with pytest.raises(ExportError, match=f"{name} cannot be written: No space left on device"):
        export(path, tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == ["ck"]


@pytest.mark.parametrize("name", ["m.safetensors", "folder"])
def test_damage_is_noticed_and_nothing_is_left_behind(tmp_path: Path, name: str) -> None:
    path, _ = trained(tmp_path / "ck", OURS)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-20] ^= 1  # of the last parameter; the last 12 bytes are the optimizer's
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged: the digest of"):
        export(path, tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == ["ck"]


def test_models_that_cannot_be_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = trained(tmp_path / "ck", OURS)
    text = (path / "run.toml").read_text()
    (path / "run.toml").write_text(text.replace("layers = 2", "layers = 3"))
    with pytest.raises(CheckpointError, match=r"lacks 9 tensors .* its run file describes the model llama"):
        export(path, tmp_path / "hf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    changed = "\n".join(
        "name = 'hf:nowhere/nothing'" if line == 'name = "llama"' else line
        for line in text.splitlines()
        if not line.startswith(("d_model", "layers", "heads", "ff", "tied"))
    )
    (path / "run.toml").write_text(changed)
    with pytest.raises(ModelError, match="no model configuration in 'nowhere/nothing'"):
        export(path, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        export(tmp_path / "nowhere", tmp_path / "hf")
    assert [each.name for each in tmp_path.iterdir()] == ["ck"]
