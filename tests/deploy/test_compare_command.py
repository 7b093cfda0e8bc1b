"""`atoll compare` as a user meets it: processes, resuming, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deploy.cli import app
from deploy.compare_outcome import stored
from tests.waiting import until

ROOT = Path(__file__).parents[2]
TINY = [
    *("--set", "model.d_model=16", "--set", "model.layers=1", "--set", "model.context=16"),
    *("--set", "run.nodes=2", "--set", "data.batch=1", "--set", "run.validation_windows=4"),
]
STEP = 2 * 16  # tokens
runner = CliRunner()


def test_it_has_help() -> None:
    result = runner.invoke(app, ["compare", "--help"])
    assert result.exit_code == 0
    assert "Example: atoll compare" in result.output and "--seeds" in result.output


def test_unknown_names_end_with_a_sentence(tmp_path: Path) -> None:
    result = runner.invoke(app, ["compare", "sign-moun", "--out", str(tmp_path)])
    assert result.exit_code == 12 and "did you mean sign-muon" in result.output
    assert "Traceback" not in result.output


def compare(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "deploy.cli",
        "compare",
        "sign-muon",
        "ddp-adamw",
        *TINY,
        "--out",
        str(out),
    ]
    environment = {**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


def test_runs_are_simulated_once_and_shown(tmp_path: Path) -> None:
    out = tmp_path / "compared"
    first = compare(out, "--seeds", "2", "--tokens", str(8 * STEP), "--json")
    assert first.returncode == 0, first.stderr
    values = json.loads(first.stdout)
    assert [row["label"] for row in values["methods"]] == ["sign-muon", "ddp-adamw"]
    votes, dense = values["methods"]
    assert votes["tokens"] == dense["tokens"] == 8 * STEP
    assert dense["ratio"] == pytest.approx(1.0, rel=0.05) and votes["ratio"] > 15
    assert [run["seed"] for run in votes["runs"]] == [0, 1] and "points" not in votes["runs"][0]
    assert votes["runs"][0]["validation_loss"] != votes["runs"][1]["validation_loss"]
    files = sorted(path.name for path in (out / "runs").iterdir())
    assert files == [f"{label}-seed{seed}.json" for label in ("ddp-adamw", "sign-muon") for seed in (0, 1)]
    assert all((out / name).stat().st_size > 10_000 for name in ("loss.png", "front.png"))
    assert json.loads((out / "compare.json").read_text())["methods"][0]["runs"][0]["points"]

    again = compare(out, "--seeds", "2", "--tokens", str(8 * STEP), "--json")
    assert "4 of 4 runs are done already" in again.stderr
    assert json.loads(again.stdout) == values
    longer = compare(out, "--seeds", "1", "--jobs", "1", "--tokens", str(9 * STEP))
    assert "done already" not in longer.stderr, "another run digest is another run"
    assert "loss: validation" in longer.stdout and str(out / "front.png") in longer.stdout


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_the_processes_and_keeps_what_is_done(tmp_path: Path) -> None:
    out = tmp_path / "compared"
    log = tmp_path / "log"
    command = [sys.executable, "-m", "deploy.cli", "compare", "sign-muon", *TINY, "--out", str(out)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, "--seeds", "500", "--tokens", str(20 * STEP)],
            cwd=ROOT,
            env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        until(
            lambda: any((out / "runs").glob("*-seed*.json")),
            "the first run's end",
            watch=process,
            fate=lambda: log.read_text(),
            deadline=120.0,
        )
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        assert process.wait(60) == 130, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    text = log.read_text()
    assert "interrupted" in text and "Traceback" not in text, text
    assert f"runs that have ended are kept in {out / 'runs'}; the same command goes on" in text, text
    until(lambda: not alive(process.pid), "the end of all processes", deadline=60.0)
    done = list((out / "runs").iterdir())
    assert 0 < len(done) < 500
    for path in done:
        assert stored(path, json.loads(path.read_text())["run_digest"]) is not None
