"""`atoll train` and `atoll join` as processes: their ends, exit codes and what they leave."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.starting import Start, starting
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0
TINY = """
[run]
nodes = 2
rounds = {rounds}
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


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `atoll` with some arguments; whatever is left ends with the test."""
    with starting("-m", "deploy.cli", deadline=DEADLINE) as run:
        yield run


def _run_file(tmp_path: Path, rounds: int) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TINY.format(rounds=rounds))
    return path


def _until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    until(condition, "what was expected", watch=process, fate=lambda: process.communicate()[0])


def _has(path: Path, text: str) -> Callable[[], bool]:
    return lambda: path.exists() and text in path.read_text()


def test_train_to_the_end(tmp_path: Path, start: Start) -> None:
    events = tmp_path / "events.jsonl"
    process = start(
        "train", str(_run_file(tmp_path, 5)), "--save", str(tmp_path / "ck"), "--events", str(events),
        "--log-dir", str(tmp_path / "logs"),
    )  # fmt: skip
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, text
    assert "round 5/5" in text and "saved" in text
    rounds = [json.loads(line) for line in events.read_text().splitlines()]
    assert sum(event["event"] == "RoundDone" for event in rounds) == 5
    assert (tmp_path / "ck" / "round-00000005" / "model.safetensors").exists()
    (kept,) = (tmp_path / "logs").iterdir()
    assert text.splitlines()[-1] == f"logs are in {kept}: rounds.csv"
    assert len((kept / "rounds.csv").read_text().splitlines()) == 1 + 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_training_ends_and_says_what_is_saved(
    number: signal.Signals, code: int, tmp_path: Path, start: Start
) -> None:
    events, save = tmp_path / "events.jsonl", tmp_path / "ck"
    process = start(
        "train", str(_run_file(tmp_path, 1_000_000)), "--save", str(save), "--events", str(events), "--quiet"
    )
    _until(_has(events, '"round": 3'), process)
    process.send_signal(number)
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == code, text
    assert "Traceback" not in text
    assert f"stopped before the end; the state is saved in {save}" in text
    assert list(save.glob("round-*/meta.json"))


def test_a_node_leaves_with_ctrl_c(tmp_path: Path, start: Start) -> None:
    invite, events = tmp_path / "invite", tmp_path / "events.jsonl"
    coordinator = start(
        "coordinator", str(_run_file(tmp_path, 5)), "--listen", "127.0.0.1:0", "--metrics", "off",
        "--invite-file", str(invite), "--journal", str(tmp_path / "journal"),
        "--log-dir", str(tmp_path / "logs"),
    )  # fmt: skip
    _until(invite.exists, coordinator)
    node = start("join", invite.read_text().strip(), "--name", "reef", "--events", str(events))
    _until(_has(events, '"Joined"'), node)
    node.send_signal(signal.SIGINT)
    text, _ = node.communicate(timeout=DEADLINE)
    assert node.returncode == 130, text
    assert "joined 127.0.0.1" in text and "left the run of 127.0.0.1" in text and "Traceback" not in text
    coordinator.send_signal(signal.SIGTERM)
    text, _ = coordinator.communicate(timeout=DEADLINE)
    assert coordinator.returncode == 143, text
    assert "Traceback" not in text
    kept = tmp_path / "logs" / "atoll-coordinator"
    assert f"logs are in {kept}: rounds.csv, events.jsonl" in text
    assert '"NodeLeft"' in (kept / "events.jsonl").read_text()


def test_a_coordinator_that_is_not_there(start: Start) -> None:
    process = start("join", "atoll+insecure://secret@127.0.0.1:1", "--wait", "1s")
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 31
    assert "127.0.0.1:1" in text and "secret" not in text and "Traceback" not in text
