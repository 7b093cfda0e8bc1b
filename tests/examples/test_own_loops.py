"""The examples with loops of their own: they run as their first lines say, learn, and agree on every bit."""

from __future__ import annotations

import difflib
import importlib.util
import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import atoll
from deploy.cli import app
from deploy.costs import run_costs
from node import own_loop
from node.events import Joined, RoundDone
from protos.digests import state_digest
from protos.runfile import RunFile
from tests.node.fleet import DEADLINE, Fleet, Log

FOLDER = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _as_a_script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    sys.modules.pop("digits", None)


def run_file(path: Path, model: str, rounds: int, *more: str) -> RunFile:
    """What `atoll run init` makes of an example's model."""
    options = ["--model", f"{FOLDER}/{model}", "--rounds", str(rounds), *more]
    result = CliRunner().invoke(app, ["run", "init", str(path), *options])
    assert result.exit_code == 0, result.output
    return RunFile.load(path)


def code(name: str) -> list[str]:
    """Lines of a script without its first text."""
    return (FOLDER / f"{name}.py").read_text().split('"""', 2)[2].split("\n")


def test_an_own_loop_has_at_most_fifteen_lines_more_than_a_plain_one() -> None:
    changes = list(difflib.ndiff(code("plain_loop"), code("own_loop")))
    added = [line for line in changes if line.startswith("+ ")]
    assert len(code("own_loop")) - len(code("plain_loop")) <= 15
    assert 0 < len([line for line in added if "atoll" in line or "run." in line]) <= 15


def test_two_own_loops_agree_on_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_file(tmp_path / "own.toml", "own_loop.py:make_model", 3, "--nodes", "2", "--batch", "8")
    script, log, models = example("own_loop"), Log(), []
    make = script.make_model

    def kept() -> torch.nn.Module:
        models.append(make())
        return models[-1]

    monkeypatch.setattr(script, "make_model", kept)
    fleet, names = Fleet(), iter(("one", "two"))
    monkeypatch.setattr(
        atoll, "join", lambda where: own_loop.join(where, None, log.listener(next(names))), raising=False
    )
    try:
        coordinator = fleet.coordinator(run, run_costs(run).tables)
        with redirect_stdout(io.StringIO()):
            nodes = [fleet.pool.submit(script.main, str(coordinator.invite))]
            log.wait("one", Joined)  # its model is made: torch has one generator for all threads
            nodes.append(fleet.pool.submit(script.main, str(coordinator.invite)))
            for node in nodes:
                node.result(DEADLINE)
    finally:
        fleet.close()
    first, second = (state_digest(dict(model.named_parameters())) for model in models)
    assert first == second != state_digest(dict(make().named_parameters()))
    assert [event.digest for event in log.of("one", RoundDone)][-1] == first
    assert len(log.of("two", RoundDone)) == 3


def test_images_are_learned_by_voted_convolutions(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "images.toml"
    run = run_file(path, "image_classification.py:ResNet", 25, "--batch", "32")
    buckets = {b.name: b.reduce for table in run_costs(run).tables.tables for b in table.buckets}
    assert buckets["blocks.0.first.weight"] == "majority"
    assert example("image_classification").main(str(path), 256) > 0.3
    assert "% of images it has never seen" in capsys.readouterr().out


def test_a_model_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("transformers")
    monkeypatch.delenv("MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    run_file(tmp_path / "tune.toml", "finetune_transformers.py:make_model", 12)
    assert example("finetune_transformers").main("tune.toml") < 5.0
    assert (tmp_path / "tuned" / "config.json").exists() and "step 10" in capsys.readouterr().out
