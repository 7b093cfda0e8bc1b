"""`atoll export`: what it writes, says and refuses."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from deploy.cli import app
from node.checkpoint import save
from node.model import build_model
from protos.digests import state_digest
from protos.runfile import RunFile

runner = CliRunner()


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    run = RunFile.parse("[run]\nname = 'reef'\n[model]\nd_model = 16\nlayers = 1\nheads = 1\ncontext = 16\n")
    model = build_model(run.model, 0)
    shared = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save(
        folder,
        round_index=4,
        run_name=run.run.name,
        run_toml=run.to_toml(),
        run_digest=run.digest,
        shared=shared,
        shared_digest=state_digest(shared),
        local={},
    )
    return shared


def run(*arguments: object, code: int = 0) -> str:
    result = runner.invoke(app, ["export", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_file_and_folder(tmp_path: Path) -> None:
    shared = checkpoint(tmp_path / "ck")
    file = tmp_path / "model.safetensors"
    output = run(tmp_path / "ck", "-o", file)
    assert output == (
        f"wrote {file}: {len(shared)} tensors, {file.stat().st_size:,} bytes, run reef after 4 rounds\n"
    )
    assert state_digest(load_file(file)) == state_digest(shared)

    output = run(tmp_path / "ck" / "round-00000004", "--out", tmp_path / "hf", "--dtype", "bf16")
    assert f"wrote {tmp_path / 'hf'}: {len(shared) + 1} tensors" in output, "a head beside the embedding"
    assert "the model's tokens are the bytes of UTF-8" in output
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_refusals_are_one_line(tmp_path: Path) -> None:
    output = run(tmp_path, "-o", tmp_path / "m.safetensors", code=16)
    assert output.startswith(f"atoll: there is no checkpoint in {tmp_path}: ")
    checkpoint(tmp_path / "ck")
    (tmp_path / "m.safetensors").write_text("")
    output = run(tmp_path / "ck", "-o", tmp_path / "m.safetensors", code=16)
    assert output == (
        f"atoll: {tmp_path / 'm.safetensors'} exists already: give --force to overwrite it, or choose "
        "another name\n"
    )
    run(tmp_path / "ck", "-o", tmp_path / "m.safetensors", "--force")
    (tmp_path / "ck" / "round-00000004" / "model.safetensors").unlink()
    assert "model.safetensors is missing" in run(tmp_path / "ck", "-o", tmp_path / "x", code=16)
    run(tmp_path / "ck", "-o", tmp_path / "x", "--dtype", "int3", code=2)


def test_help_shows_examples() -> None:
    output = run("--help")
    assert "atoll export checkpoints -o model.safetensors" in output
    assert "from_pretrained('my-model')" in output
