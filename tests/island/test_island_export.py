"""One safetensors file with whole tensors, written from and read into any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from node.island import full_state_dict, fully_shard
from node.island.checkpoint import CheckpointError
from node.island.export import export_safetensors, import_safetensors
from tests.island.mixed_model import Mixed, fresh
from tests.island.rig import Member, pool
from tests.island.tiny_llama import Case, build


def tied(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = build(Case(tied=True, frozen=True))
    model.register_buffer("scale", torch.tensor([1.5, float(seed)], dtype=torch.float32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    return model


def exporting(member: Member, path: str, hybrid: bool) -> dict[str, Tensor]:
    model = tied(0)
    mesh = member.grid if hybrid else member.mesh
    fully_shard(model, units=model.layers, mesh=mesh)  # type: ignore[arg-type]
    export_safetensors(model, path, metadata={"by": "test"})
    return full_state_dict(model)


def importing(member: Member, path: str) -> dict[str, Tensor]:
    model = tied(7)
    fully_shard(
        model,
        units=model.layers,  # type: ignore[arg-type]
        mesh=member.mesh,
        placement="ragged",
        granularity=7,
    )
    assert import_safetensors(model, path) == ([], [])
    return full_state_dict(model)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_file_goes_out_and_in(tmp_path: Path, hybrid: bool) -> None:
    path = tmp_path / "model.safetensors"
    whole = pool().run(exporting, 4, str(path), hybrid)[2]
    found = load_file(path)
    assert sorted(found) == sorted(name for name in whole if name != "head.weight")  # tied: once
    assert all(torch.equal(found[name], whole[name]) for name in found)
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "test"}
    for state in pool().run(importing, 3, str(path)):
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[name], whole[name]) for name in whole)


def test_dtype_and_prefix(tmp_path: Path) -> None:
    model = nn.ModuleDict({"inner": fresh()})
    fully_shard(model)
    export_safetensors(model, tmp_path / "m", dtype=torch.bfloat16, prefix="inner.")
    found = load_file(tmp_path / "m")
    assert sorted(found) == sorted(fresh().state_dict())
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    again = nn.ModuleDict({"inner": Mixed().double()})
    fully_shard(again)
    import_safetensors(again, tmp_path / "m", prefix="inner.")
    for name, tensor in full_state_dict(again).items():
        assert torch.equal(tensor, found[name.removeprefix("inner.")].double())
    with pytest.raises(CheckpointError, match=r"lacks .*inner"):
        import_safetensors(again, tmp_path / "m")
    missing, unknown = import_safetensors(again, tmp_path / "m", strict=False)
    assert len(missing) == len(unknown) == len(found)


def test_names_that_clash_are_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False)})
    model.register_buffer("weight", torch.zeros(2))
    fully_shard(model)
    with pytest.raises(CheckpointError, match="two tensors would be named weight"):
        export_safetensors(model, tmp_path / "m", prefix="a.")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    model = fresh()
    fully_shard(model)
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        import_safetensors(model, path)
    export_safetensors(model, path)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        import_safetensors(model, tmp_path)
    save_file({name: torch.zeros(3) for name in fresh().state_dict()}, path)
    with pytest.raises(CheckpointError, match=r"has shape \(3,\), in the model"):
        import_safetensors(model, path)
    with pytest.raises(CheckpointError, match="no sharded parameters"):
        export_safetensors(fresh(), path)


def test_a_folder_of_several_files(tmp_path: Path) -> None:
    state = fresh().state_dict()
    names, listing = list(state), {}
    for number in range(2):
        file = f"model-{number}.safetensors"
        save_file({name: state[name] + 1 for name in names[number::2]}, tmp_path / file)
        listing.update(dict.fromkeys(names[number::2], file))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": listing}))
    model = fresh()
    fully_shard(model)
    import_safetensors(model, tmp_path)
    assert all(torch.equal(tensor, state[name] + 1) for name, tensor in full_state_dict(model).items())
    index.write_text("{")
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        import_safetensors(model, tmp_path)


def failing(member: Member, path: str) -> str:
    model = fresh()
    fully_shard(model, mesh=member.mesh)
    with pytest.raises(CheckpointError) as caught:
        export_safetensors(model, path)
    return str(caught.value)


def test_all_ranks_learn_that_the_file_was_not_written(tmp_path: Path) -> None:
    said = pool().run(failing, 2, str(tmp_path / "no" / "folder" / "m"))
    assert "cannot be written" in said[0] and "No such file" in said[0]
    assert "the first rank says why" in said[1]


def tiny_transformer(seed: int) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_transformers_reads_what_was_exported(tmp_path: Path) -> None:
    model = tiny_transformer(0)
    tokens = torch.arange(12).view(2, 6)
    wanted = model(input_ids=tokens).logits.detach()
    model.config.save_pretrained(tmp_path)
    fully_shard(model, units=model.model.layers)
    export_safetensors(model, tmp_path / "model.safetensors")
    read = type(model).from_pretrained(tmp_path)
    assert torch.equal(read(input_ids=tokens).logits, wanted)
    read.save_pretrained(tmp_path / "theirs")
    other = tiny_transformer(1)
    fully_shard(other, units=other.model.layers)
    import_safetensors(other, tmp_path / "theirs")
    assert torch.equal(other(input_ids=tokens).logits, wanted)
