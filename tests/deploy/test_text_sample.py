from __future__ import annotations

from pathlib import Path

import pytest

from deploy.text_sample import generate
from node.checkpoint import CheckpointError
from node.launch import Options, train
from protos.runfile import RunFile

TINY = """
[run]
rounds = 3
evaluate_every = 0
validation_windows = 1
[model]
d_model = 16
layers = 1
heads = 1
context = 16
[data]
batch = 2
"""


def test_a_checkpoint_writes_text(tmp_path: Path) -> None:
    summary = train(RunFile.parse(TINY), Options(save=tmp_path))
    assert summary.done
    text = generate(tmp_path, "To be", 40)
    assert text.startswith("To be") and len(text.encode()) >= 40
    assert text == generate(tmp_path, "To be", 40), "the same seed writes the same"
    assert text != generate(tmp_path, "To be", 40, seed=1)


def test_the_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    train(RunFile.parse(TINY), Options(save=tmp_path / "a"))
    train(
        RunFile.parse(TINY.replace("[data]", "[method]\nname = 'ddp-adamw'\nlr = 0.5\n[data]")),
        Options(save=tmp_path / "b"),
    )
    assert generate(tmp_path / "a", "To be", 40) != generate(tmp_path / "b", "To be", 40)


def test_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint"):
        generate(tmp_path, "To be", 4)
