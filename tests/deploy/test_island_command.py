"""`atoll island plan`: what it shows, writes and refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from deploy.cli import app
from deploy.island_command import Question, answer, kinds
from node.island.layout import Plan

runner = CliRunner()

RUN_FILE = """
[model]
d_model = 64
layers = 3
heads = 2
context = 32
"""


def run(*arguments: str, code: int = 0) -> str:
    result = runner.invoke(app, ["island", "plan", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def test_a_plan_as_a_table() -> None:
    output = run("llama3-70b", "--ranks", "1024", "--memory", "80GB")
    for expected in (
        "70,553,706,496 parameters in 723 tensors",
        "auto for 1,024 ranks, muon",
        "28672 x 8192",
        "cut every 8,192, gathered in the step",
        "whole, on its owner",
        "packed, on one rank of the block",
        "optimizer TFLOP a step",
        "shard over 256 ranks and replicate 4 times (HSDP)",
        "left for activations",
    ):
        assert expected in output, expected
    assert "rank  " not in output


def test_few_ranks_have_a_row_each() -> None:
    output = run("llama3-70b", "--ranks", "4", "--placement", "owner", "--optimizer", "soap")
    assert "with what is gathered" in output
    assert "every matrix is whole on one rank: the optimizer needs no communication" in output
    output = run("llama3-70b", "--ranks", "16", "--optimizer", "adamw", "--memory", "80GB")
    assert "the optimizer needs no whole matrix and no communication" in output
    assert "any number of ranks is sensible" in output
    output = run("llama3-70b", "--ranks", "8", "--memory", "80GB")
    assert "more than it has: take 15 ranks" in output


def test_a_run_files_model_as_json_and_its_layouts_as_a_file(tmp_path: Path) -> None:
    file, layouts = tmp_path / "run.toml", tmp_path / "plan.json"
    file.write_text(RUN_FILE)
    values = json.loads(run(str(file), "--ranks", "3", "--json", "--save", str(layouts)))
    plan = Plan.from_json(layouts.read_text())
    assert plan.hash() == values["hash"]
    assert sum(map(len, (group.tensors for group in plan.groups))) == values["tensors"]
    assert sum(values["per_rank"]["entries"]) == values["parameters"]
    assert sum(kind["elements"] for kind in values["kinds"]) == values["parameters"]
    assert sum(kind["count"] for kind in values["kinds"]) == values["tensors"]
    assert sum(layout.total for layout in plan.groups) == values["parameters"] + values["padding"]
    assert values["policy"]["placement"] == "auto" and values["step_bytes"] == 0
    assert values["fits"] is True and values["proposal"] is None
    assert len(values["per_rank"]["resident_bytes"]) == len(values["per_rank"]["flops"]) == 3
    again = json.loads(run(str(file), "--ranks", "3", "--json"))
    assert again == values


def test_granularities(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(RUN_FILE)
    for granularity in ("element", "row", "rows:4", "block", "matrix", "32"):
        question = Question(str(file), 3, placement="ragged", granularity=granularity)
        found = answer(question)
        assert int(found.plan.elements.sum()) == int(found.plan.priced.numel.sum())
        if granularity == "matrix":
            assert {one.placed for one in kinds(found.plan)} == {"whole, among what is cut"}


class Decoder(nn.Module):
    """What the fake library builds: a fused projection in each of two layers."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, 16)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv_proj": nn.Linear(16, 32, bias=False)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(16, vocab, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for the library; the list of what was asked for."""
    asked: list[str] = []

    def configuration(source: str, *, trust_remote_code: bool) -> SimpleNamespace:
        asked.append(source)
        return SimpleNamespace(vocab_size=101, torch_dtype=None)

    def build(shape: SimpleNamespace, *, trust_remote_code: bool) -> Decoder:
        model = Decoder(shape.vocab_size)
        assert all(parameter.device.type == "meta" for parameter in model.parameters())
        return model

    library = SimpleNamespace(
        AutoConfig=SimpleNamespace(from_pretrained=configuration),
        AutoModelForCausalLM=SimpleNamespace(from_config=build),
    )
    monkeypatch.setitem(sys.modules, "transformers", library)
    return asked


def test_a_model_of_another_library_is_not_allocated(transformers: list[str], tmp_path: Path) -> None:
    layouts = tmp_path / "plan.json"
    values = json.loads(run("hf:some/model", "--ranks", "2", "--json", "--save", str(layouts)))
    assert transformers == ["some/model"]
    assert values["parameters"] == 2 * 101 * 16 + 2 * 32 * 16
    plan = Plan.from_json(layouts.read_text())
    assert "layers.0.qkv_proj.weight" in plan and "embed_tokens.weight" in plan
    found = answer(Question("hf:some/model", 2, split=("*.qkv_proj.weight=16,8,8",)))
    assert [one.placed for one in kinds(found.plan) if one.shape == (32, 16)] == [
        "matrix by matrix, whole on their owners"
    ]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("nowhere",), "no model 'nowhere': write hf:NAME, a run file (.toml), llama3-70b or moe-2.4t"),
        (("hf:",), "lacks a folder"),
        (("llama3-70b", "--placement", "rows"), "placement 'rows' is unknown: use auto, owner or ragged"),
        (("llama3-70b", "--optimizer", "adam"), "optimizer 'adam' is unknown: use muon"),
        (("llama3-70b", "--granularity", "tile"), "granularity 'tile' is unknown"),
        (("llama3-70b", "--memory", "80 bananas"), "unknown unit"),
        (("llama3-70b", "--split", "*.w=2"), "are not fused"),
        (("llama3-70b", "--split", "w"), "write NAME=3"),
        (("missing.toml",), "missing.toml"),
    ],
)
def test_refusals_say_what_to_write(arguments: tuple[str, ...], text: str) -> None:
    code = 10 if arguments[0].endswith(".toml") else 12  # bad-run-file, bad-value
    output = run(*arguments, "--ranks", "4", code=code)
    assert text in output and "Traceback" not in output
