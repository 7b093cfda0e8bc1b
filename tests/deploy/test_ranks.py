"""Nodes of several ranks on one machine: command lines, exit codes, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.ranks import without_option
from node.torchrun import leads, ranks_here, under_torchrun
from tests.waiting import DEADLINE, free_port, until

ROOT = Path(__file__).parents[2]
RUN = """
[run]
rounds = 100000
nodes = 1
evaluate_every = 0
[model]
d_model = 16
layers = 2
heads = 1
context = 8
[data]
batch = 2
"""


@pytest.mark.parametrize(
    ("arguments", "rank"),
    [
        (["join", "--nproc", "4", "atoll://t@h:1"], ["join", "atoll://t@h:1"]),
        (
            ["--debug", "train", "run.toml", "--nproc=2", "--save", "x"],
            ["--debug", "train", "run.toml", "--save", "x"],
        ),
        (["train", "run.toml"], ["train", "run.toml"]),
    ],
)
def test_a_rank_has_the_command_line_of_its_node_without_their_number(
    arguments: list[str], rank: list[str]
) -> None:
    assert without_option(arguments) == rank


def test_ranks_are_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not under_torchrun() and leads() and ranks_here() == 1
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert under_torchrun() and not leads() and ranks_here() == 2
    monkeypatch.setenv("RANK", "0")
    assert leads()


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return [int(child) for child in text.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("ended", ["interrupted", "rank killed"])
def test_ranks_end_together(ended: str, tmp_path: Path) -> None:
    file, saves, log = tmp_path / "run.toml", tmp_path / "saves", tmp_path / "log"
    file.write_text(RUN, encoding="utf-8")
    command = [sys.executable, "-m", "atoll", "train", str(file), "--nproc", "2", "--save", str(saves)]
    command += ["--metrics", f"127.0.0.1:{free_port()}"]  # one rank serves them
    with log.open("wb") as out:
        node = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )

    def said() -> str:
        return log.read_text(encoding="utf-8", errors="replace")

    try:
        until(lambda: "loss" in said(), "the first round", watch=node, fate=said)
        ranks = _children(node.pid)
        assert len(ranks) == 2
        if ended == "interrupted":
            node.send_signal(signal.SIGINT)
            assert node.wait(DEADLINE) == 130, said()
            (saved,) = saves.glob("round-*")
            assert len(list(saved.glob("model-*-of-00002.safetensors"))) == 2
            assert "the state is saved in" in said()
        else:
            os.kill(ranks[1], signal.SIGKILL)
            assert node.wait(DEADLINE) == 18, said()
            assert "rank 1 has not come" in said()
            assert f"rank 1 of this node (process {ranks[1]}) was ended by SIGKILL" in said()
        assert "Traceback" not in said()
        for rank in ranks:
            until(lambda rank=rank: not Path(f"/proc/{rank}").exists(), "the end of a rank")  # type: ignore[misc]
    finally:
        if node.poll() is None:
            os.killpg(node.pid, signal.SIGKILL)
            node.wait()
