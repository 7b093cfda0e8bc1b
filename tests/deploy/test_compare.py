"""Planning a comparison: which runs are meant, and how many rounds make their tokens equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deploy.compare import Entry, at_tokens, describe, entries, rounds_for, steps_of, trained_tokens
from deploy.errors import UserError
from protos.methods import PRESETS
from protos.runfile import RunFile, RunFileError

RUN = """
[run]
rounds = {rounds}
nodes = 3
[model]
d_model = 32
context = 32
[data]
batch = 2
[method]
name = "{method}"
{rest}
"""
STEP = 3 * 2 * 32  # tokens


def write(folder: Path, name: str, *, method: str = "sign-muon", rounds: int = 96, rest: str = "") -> str:
    path = folder / name
    path.write_text(RUN.format(method=method, rounds=rounds, rest=rest))
    return str(path)


def test_methods_take_everything_else_from_the_first_file(tmp_path: Path) -> None:
    chosen = entries(["muloco", write(tmp_path, "mine.toml"), "ddp-adamw"])
    assert [entry.label for entry in chosen] == ["muloco", "mine", "ddp-adamw"]
    runs = [entry.runfile(7) for entry in chosen]
    assert [run.method.name for run in runs] == ["muloco", "sign-muon", "ddp-adamw"]
    assert {(run.run.nodes, run.model.d_model, run.data.batch, run.run.seed) for run in runs} == {
        (3, 32, 2, 7)
    }
    assert [run.run.rounds for run in runs] == [3, 96, 96]
    assert {trained_tokens(run) for run in runs} == {96 * STEP}


def test_without_a_file_methods_are_compared_on_the_standard_task() -> None:
    chosen = entries(list(PRESETS))
    for entry in chosen:
        run = entry.runfile(0)
        assert (run.run.nodes, run.data.batch, run.model.context) == (4, 4, 64)
        assert trained_tokens(run) == pytest.approx(512 * 1024, rel=0.05)
    assert entries(["lordo"])[0].runfile(0).run.rounds == 17, "round 0 is a single batch"


def test_the_first_run_sets_the_tokens_unless_they_are_given(tmp_path: Path) -> None:
    one, two = write(tmp_path, "one.toml", rounds=64), write(tmp_path, "two.toml", rounds=500)
    assert [entry.runfile(0).run.rounds for entry in entries([one, two])] == [64, 64]
    assert [entry.runfile(0).run.rounds for entry in entries([two, one])] == [500, 500]
    assert [entry.runfile(0).run.rounds for entry in entries([one, two], tokens=80 * STEP)] == [80, 80]


def test_values_are_set_in_every_run(tmp_path: Path) -> None:
    chosen = entries([write(tmp_path, "one.toml"), "signum"], values={("model", "layers"): 1})
    assert [entry.runfile(0).model.layers for entry in chosen] == [1, 1]


def test_labels_are_unique(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    names = [write(tmp_path, "run.toml"), write(tmp_path / "sub", "run.toml"), "signum", "signum"]
    assert [entry.label for entry in entries(names)] == ["run-1", "run-2", "signum-1", "signum-2"]


@pytest.mark.parametrize(("steps", "rounds"), [(1, 1), (33, 2), (50, 3), (512, 17), (513, 17)])
def test_rounds_come_as_close_as_they_can(steps: int, rounds: int) -> None:
    run = RunFile.model_validate({"method": {"name": "lordo"}})
    tokens = steps * run.run.nodes * run.data.batch * run.model.context
    assert rounds_for(run, tokens) == rounds
    assert steps_of(run) == 1 + 32 * (run.run.rounds - 1)


def test_a_run_that_cannot_come_close_is_refused() -> None:
    entry = Entry("far", {"method": {"name": "diloco"}})
    with pytest.raises(
        UserError, match=r"far: 1 round of 100 batches is 76,800 tokens, too far from 38,400"
    ) as refusal:
        at_tokens(entry, 50 * 768)
    assert "from 768,000 on any will do, or the run fewer local steps" in str(refusal.value)
    for tokens in (768_000, 768_000 + 76_800 // 2, 768_000 + 76_799):
        at_tokens(entry, tokens)
    with pytest.raises(UserError, match=r"from 7,680 on any will do$"):
        at_tokens(Entry("one", {"method": {"name": "sign-muon"}}), 10)
    assert at_tokens(entry, 100 * 768, points=0).runfile(0).run.evaluate_every == 0


def test_a_deviation_is_told() -> None:
    (entry,) = entries(["diloco"])
    assert describe(entry, 512 * 1024) == (
        "diloco: 5 rounds of 100 batches on 4 nodes, 512,000 tokens (2.3% fewer)"
    )
    assert describe(entry, 512_000).endswith("512,000 tokens")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["sing-muon"], "did you mean sign-muon"),
        (["nothing-like-it-at-all"], "the methods are"),
    ],
)
def test_unknown_names_are_refused(names: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text):
        entries(names)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"gone\.toml"):
        entries([str(tmp_path / "gone.toml")])


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("context = 32", "context = 64", "[model] context"),
        ("nodes = 3", "nodes = 3\nvalidation_windows = 9", "[run] validation_windows"),
    ],
)
def test_losses_on_different_data_are_not_compared(tmp_path: Path, old: str, new: str, key: str) -> None:
    one, two = write(tmp_path, "one.toml"), write(tmp_path, "two.toml")
    path = Path(two)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError) as caught:
        entries([one, two])
    assert key in str(caught.value) and "one and two" in str(caught.value)


def test_what_follows_from_the_rounds_follows_the_new_ones(tmp_path: Path) -> None:
    values: dict[str, Any] = {"run": {"rounds": 1000}, "method": {"name": "muloco", "local_steps": 4}}
    long, short = (
        at_tokens(Entry("x", values), rounds * 4 * 768).runfile(0).method.outer_momentum
        for rounds in (200, 20)
    )
    assert (long, short) == (0.9, 0.5)
