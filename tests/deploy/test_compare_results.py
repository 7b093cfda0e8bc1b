"""Outcomes, their JSON, the front, the table and the pictures of a comparison."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread
from rich.console import Console

from deploy.compare_outcome import Outcome, Point, simulate, store, stored
from deploy.compare_picture import COLORS, NothingToDraw, draw_curves, draw_front
from deploy.compare_results import Comparison, front, results_table
from protos.runfile import RunFile


def outcome(label: str, seed: int, loss: float, nbytes: int) -> Outcome:
    points = tuple(
        Point(
            s,
            16 * s,
            nbytes * s // 20,
            nbytes * s // 20,
            loss + 3.2 / s,
            loss + 3.0 / s if s % 10 == 0 else math.nan,
        )
        for s in range(1, 21)
    )
    return Outcome(
        label=label, seed=seed, run_digest=f"{label}{seed}", method=label, nodes=2, rounds=20, steps=20,
        tokens=320, parameters=1000, state_bytes=4000, bytes_up=nbytes, bytes_down=nbytes,
        validation_loss=loss, bits_per_byte=loss / math.log(2), state_digest="0" * 32, cpu_seconds=1.0,
        points=points,
    )  # fmt: skip


def comparison() -> Comparison:
    table = {"dense": (80_000, 1.9), "vote": (2_500, 1.8), "thin": (200, 2.1), "bad": (1_000, 2.5)}
    groups = [
        [outcome(label, seed, loss + 0.01 * seed, nbytes) for seed in (0, 1, 2)]
        for label, (nbytes, loss) in table.items()
    ]
    return Comparison.of(groups, ["a note"])


def test_rows_hold_means_over_seeds_and_paired_differences() -> None:
    rows = comparison().rows
    assert [row.label for row in rows] == ["dense", "vote", "thin", "bad"]
    dense, vote, *_ = rows
    assert (dense.loss, dense.std) == (pytest.approx(1.91), pytest.approx(0.01))
    assert (dense.difference, vote.difference) == (pytest.approx(0.0), pytest.approx(-0.1))
    assert (dense.ratio, vote.ratio) == (1.0, 32.0)
    assert (dense.bits, vote.bits, dense.state) == (32.0, 1.0, 4.0)
    assert [row.front for row in rows] == [False, True, True, False]


def test_one_diverged_seed_takes_a_run_out() -> None:
    group = [outcome("dense", 0, 1.9, 100), outcome("dense", 1, math.nan, 100)]
    row = Comparison.of([group, [outcome("vote", seed, 2.0, 200) for seed in (0, 1)]]).rows[0]
    assert math.isnan(row.loss) and not row.front
    text = json.dumps(Comparison.of([group]).to_json(), allow_nan=False)
    assert json.loads(text)["methods"][0]["loss"] is None


def beaten(points: list[tuple[float, float]]) -> set[int]:
    """The definition of the front, word for word."""
    return {
        i
        for i, (b, loss) in enumerate(points)
        if math.isnan(loss)
        or any(
            (b2 < b and l2 <= loss) or (b2 <= b and l2 < loss) or (j < i and (b2, l2) == (b, loss))
            for j, (b2, l2) in enumerate(points)
            if j != i and not math.isnan(l2)
        )
    }


@given(st.lists(st.tuples(st.integers(0, 6), st.one_of(st.integers(0, 6), st.just(math.nan)))))
def test_the_front_is_what_nobody_beats(points: list[tuple[float, float]]) -> None:
    assert front(points) == set(range(len(points))) - beaten(points)


def test_outcomes_survive_json(tmp_path: Path) -> None:
    one = outcome("vote", 1, math.nan, 300)
    path = tmp_path / "runs" / "vote.json"
    store(path, one)
    back = stored(path, one.run_digest)
    assert back is not None and repr(back) == repr(one), "NaN included"
    assert [file.name for file in path.parent.iterdir()] == ["vote.json"]
    assert stored(path, "another run") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "atoll outcome 1", "points": [{"steps": 1}]}'])
def test_a_damaged_outcome_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(text)
    assert stored(path, "any") is None


def test_a_simulated_run_becomes_an_outcome() -> None:
    run = RunFile.model_validate(
        {
            "run": {"rounds": 6, "nodes": 2, "evaluate_every": 2, "validation_windows": 4, "seed": 5},
            "model": {"d_model": 16, "layers": 1, "heads": 2, "context": 16},
            "data": {"batch": 1},
            "method": {"name": "sign-muon"},
        }
    )
    shares: list[float] = []
    result = simulate("votes", run, lambda share, loss: shares.append(share))
    assert (result.label, result.seed, result.run_digest) == ("votes", 5, run.digest)
    assert (result.steps, result.tokens, result.rounds) == (6, 6 * 2 * 16, 6)
    assert len(shares) == 12 and shares == sorted(shares) and shares[-1] == 1.0
    assert [math.isfinite(point.validation_loss) for point in result.points] == [False, True] * 3
    assert result.points[-1].validation_loss == result.validation_loss
    assert result.state_bytes == 4 * result.parameters


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_shows_every_run(width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table(comparison()))
    text = console.export_text()
    for expected in ("1.9100 ±0.0100", "-0.1000", "32x", "note: a note", "320 tokens", "3 seeds"):
        assert expected in text, expected
    lines = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "●" in lines["vote"] and "●" in lines["thin"]
    assert "●" not in lines["dense"] and "●" not in lines["bad"]


def test_a_diverged_run_is_called_that() -> None:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table(Comparison.of([[outcome("vote", 0, math.nan, 10)]])))
    assert "diverged" in console.export_text()


def colors(path: Path) -> set[tuple[int, ...]]:
    image = (imread(path)[..., :3] * 255).round().astype(int)
    return {tuple(int(c) for c in row) for row in np.unique(image.reshape(-1, 3), axis=0)}


def rgb(text: str) -> tuple[int, ...]:
    return tuple(int(text[start : start + 2], 16) for start in (1, 3, 5))


@pytest.mark.parametrize("draw", [draw_curves, draw_front])
def test_pictures_show_every_run(tmp_path: Path, draw: object) -> None:
    path = tmp_path / "new" / "picture.png"
    draw(comparison(), path)  # type: ignore[operator]
    assert {rgb(color) for color in COLORS[:4]} <= colors(path)
    assert rgb(COLORS[4]) not in colors(path)


def test_a_run_that_diverged_is_left_out_of_the_pictures(tmp_path: Path) -> None:
    whole = comparison()
    bad = [replace(run, validation_loss=math.nan, points=()) for run in whole.outcomes[1]]
    partly = Comparison.of([whole.outcomes[0], bad])
    for draw in (draw_curves, draw_front):
        draw(partly, tmp_path / "partly.png")
        assert rgb(COLORS[1]) not in colors(tmp_path / "partly.png")
        with pytest.raises(NothingToDraw):
            draw(Comparison.of([bad]), tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()
