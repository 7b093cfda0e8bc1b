"""Figures for other programs: which there are, where they go, and that nothing of it touches the training."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from deploy.errors import UserError
from deploy.writers import COLUMNS, Feed, figures, opened
from node.events import Evaluated, Notice, RoundDone, Started

STARTED = Started("reef", "sign-muon", 100, 64, "cpu", 1, 0)


def done(round_index: int, **changes: Any) -> RoundDone:
    values: dict[str, Any] = {
        **{"round": round_index, "rounds": 9, "loss": 2.5, "tokens": 64, "counted": True},
        **{"voters": ("a", "b"), "agreement": 0.75, "reason": "all are in", "digest": "d"},
        **{"bytes_up": 10, "bytes_down": 20, "compute_seconds": 1.0, "busy_seconds": 2.0},
        "seconds": {"compute": 0.5, "exchange": 0.25},
    }
    return RoundDone(**{**values, **changes})


def test_figures_are_what_is_finite_of_a_round() -> None:
    found = figures(done(4, loss=math.nan, validation_loss=1.5))
    assert found is not None
    rounds, values = found
    assert rounds == 5 and "loss" not in values and set(values) <= set(COLUMNS)
    assert values["validation_loss"] == 1.5 and values["voters"] == 2 and values["counted"] == 1
    assert values["seconds_compute"] == 0.5 and values["bytes_down"] == 20
    assert figures(Evaluated(7, 1.25, math.nan)) == (8, {"validation_loss": 1.25})
    assert figures(Notice("waiting")) is None and figures(STARTED) is None


def test_a_csv_file_goes_on_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rounds.csv"
    for first in (0, 2):
        with opened(f"csv:{path}") as feed:
            for event in (STARTED, done(first), done(first + 1, validation_loss=1.0)):
                feed(event)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["round"] for row in rows] == ["1", "2", "3", "4"]
    assert rows[3]["validation_loss"] == "1.0" and rows[2]["validation_loss"] == ""
    assert float(rows[0]["agreement"]) == 0.75


class Recorder:
    """Stands for the writers of both services."""

    def __init__(self, **options: Any) -> None:
        self.options, self.scalars, self.text, self.ended = options, [], "", 0
        self.config: dict[str, Any] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def add_text(self, tag: str, text: str) -> None:
        self.text = text

    def log(self, values: dict[str, float], step: int) -> None:
        self.scalars += [(name, value, step) for name, value in values.items()]

    def close(self) -> None:
        self.ended += 1

    finish = close


class Config(dict[str, Any]):
    def update(self, values: Any, allow_val_change: bool = False) -> None:  # type: ignore[override]
        assert allow_val_change, "a node that is restarted tells it again"
        super().update(values)


def test_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorder] = []
    module = ModuleType("torch.utils.tensorboard")

    def summary_writer(**options: Any) -> Recorder:
        made.append(Recorder(**options))
        return made[-1]

    module.SummaryWriter = summary_writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    with opened("tensorboard:runs/reef") as feed:
        feed(STARTED)
        feed(done(0))
    (writer,) = made
    assert writer.options == {"log_dir": "runs/reef"} and "method: sign-muon" in writer.text
    assert ("loss", 2.5, 1) in writer.scalars and ("seconds/compute", 0.5, 1) in writer.scalars
    assert writer.ended == 1


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Recorder()
    run.config = Config()
    module, asked = ModuleType("wandb"), []

    def init(**options: Any) -> Recorder:
        asked.append(options)
        return run

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with opened("wandb:reefs", "lagoon") as feed:
        feed(STARTED)
        feed(done(2))
    assert asked == [{"project": "reefs", "name": "lagoon"}]
    assert run.config["method"] == "sign-muon" and ("loss", 2.5, 3) in run.scalars and run.ended == 1


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra 'tensorboard'"
    )
    with opened(f"tensorboard:{tmp_path}") as feed:
        for event in (STARTED, done(0), done(1, validation_loss=1.5)):
            feed(event)
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    assert [(item.step, item.value) for item in read.Scalars("loss")] == [(1, 2.5), (2, 2.5)]
    assert [(item.step, item.value) for item in read.Scalars("validation_loss")] == [(2, 1.5)]
    assert b"method: sign-muon" in read.Tensors("node/text_summary")[0].tensor_proto.string_val[0]


def test_wandb_keeps_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="the extra 'wandb'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    with opened("wandb:reefs", "lagoon") as feed:
        for event in (STARTED, done(0), done(1, validation_loss=1.5)):
            feed(event)
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    held = kept.read_bytes()
    assert b"reefs" in held and b"lagoon" in held and b"validation_loss" in held
    assert "no more figures" not in caplog.text


def test_a_service_that_lets_nobody_in_is_told_of_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class UsageError(Exception):
        """As wandb has it: no OSError."""

    def init(**options: Any) -> Recorder:
        raise UsageError("api_key not configured")

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(
        UserError, match="wandb:reefs: it cannot be used: api_key not configured; 'wandb login'"
    ):
        opened("wandb:reefs")


def test_a_writer_that_fails_is_told_of_once() -> None:
    class Broken:
        calls = 0

        def begin(self, facts: Any) -> None:
            return None

        def add(self, rounds: int, values: Any) -> None:
            self.calls += 1
            raise ConnectionError("no network")

        def close(self) -> None:
            raise AssertionError("it is broken already")

    told: list[str] = []
    broken = Broken()
    with Feed(broken, "wandb:reefs", told.append) as feed:
        for event in (STARTED, done(0), done(1)):
            feed(event)
    assert broken.calls == 1 and told == [
        "wandb:reefs gets no more figures, the training goes on: no network"
    ]


@pytest.mark.parametrize("text", ["reef", "csv:", "mlflow:x"])
def test_what_is_no_place_for_figures(text: str) -> None:
    with pytest.raises(UserError, match="write csv:FILE, tensorboard:DIR or wandb:PROJECT"):
        opened(text)


def test_what_is_missing_or_in_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match="needs the package wandb: pip install wandb"):
        opened("wandb:reefs")
    with pytest.raises(UserError, match="cannot be written"):
        opened(f"csv:{tmp_path}")
