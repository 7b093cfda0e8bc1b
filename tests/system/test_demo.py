"""`atoll demo` from its command line: it trains, agrees, writes its results, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from matplotlib.image import imread

from tests.waiting import until

ROOT = Path(__file__).parents[2]
DEADLINE = 240.0  # for what takes ten seconds on two idle cores
ROUNDS = 12
SMALL = ["--set", "model.d_model=32", "--set", "model.layers=1", "--set", "model.heads=2"]
SMALL += ["--set", "model.context=32", "--set", "data.batch=4", "--set", "run.validation_windows=4"]


def _start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "deploy.cli", "demo", "--nodes", "3", "--out", str(out), *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Whatever a test starts ends with it."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()  # its children follow their parent
        process.communicate(timeout=DEADLINE)


def _wait_for_rounds(out: Path, process: subprocess.Popen[str]) -> None:
    """Until every node has applied two rounds."""
    logs = [out / f"node-{index}.jsonl" for index in (1, 2, 3)]

    def two_each() -> bool:
        return all(log.exists() and log.read_text().count('"RoundDone"') >= 2 for log in logs)

    until(two_each, "two rounds of every node", watch=process, fate=lambda: process.communicate()[0])


def test_the_demo_trains_agrees_and_compares(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    out = tmp_path / "out"
    process = _start(out, "--rounds", str(ROUNDS), *SMALL)
    started.append(process)
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, text

    values = json.loads((out / "results.json").read_text())
    votes, baseline = values["votes"], values["baseline"]
    assert values["digests_equal"] and values["rounds_compared"] == ROUNDS
    assert votes["steps"] == baseline["steps"] == list(range(1, ROUNDS + 1))
    assert votes["tokens"] == baseline["tokens"] == ROUNDS * 3 * 4 * 32
    assert votes["losses"][-1] < votes["losses"][0] and baseline["losses"][-1] < baseline["losses"][0]
    assert votes["losses"][0] == pytest.approx(baseline["losses"][0], abs=1e-3), "the same tokens and weights"
    assert 2 <= values["bits_per_parameter"] < 2.6, "votes, and the framing of a tiny model"
    assert values["ring_fp32_ratio"] > 32
    assert 0.5 < votes["agreement"] <= 1
    assert 0 < votes["compute_share"] < 1 and votes["busy_seconds"] > 0 and baseline["busy_seconds"] > 0
    assert (votes["coordinator_seconds"] > 0) is (sys.platform == "linux")
    assert imread(out / "demo.png").shape[1] > 900
    assert values["sample"].startswith("ROMEO.\n") and len(values["sample"]) > 100

    for expected in (f"round {ROUNDS}/{ROUNDS}", "summary", "all 3 nodes held the same bits", "demo.png"):
        assert expected in text, expected
    assert "Traceback" not in text and "nan" not in text
    assert not (out / "invite").exists(), "the token does not stay on disk"


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    out = tmp_path / "out"
    process = _start(out, "--rounds", "100000", *SMALL)
    started.append(process)
    _wait_for_rounds(out, process)
    family = _family(process.pid)
    assert len(family) == 4, "a coordinator and three nodes"
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130, text
    assert "Traceback" not in text
    assert not [child for child in family if child.is_running()]
    assert not (out / "invite").exists()
    for index in (1, 2, 3):
        assert "left the run" in (out / f"node-{index}.log").read_text()


def test_a_node_that_dies_is_reported_and_the_rest_ends(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    process = _start(out, "--rounds", "100000", *SMALL)
    started.append(process)
    _wait_for_rounds(out, process)
    family = _family(process.pid)
    victim = next(child for child in family if "node-2" in child.cmdline())
    os.kill(victim.pid, signal.SIGKILL)
    text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 18
    assert "node-2 was killed by SIGKILL; the last lines of" in text and "joined 127.0.0.1" in text
    assert not [child for child in family if child.is_running()]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent death signal is Linux's")
def test_a_killed_demo_takes_its_processes_along(
    tmp_path: Path, started: list[subprocess.Popen[str]]
) -> None:
    out = tmp_path / "out"
    process = _start(out, "--rounds", "100000", *SMALL)
    started.append(process)
    _wait_for_rounds(out, process)
    family = _family(process.pid)
    process.kill()
    _, alive = psutil.wait_procs(family, timeout=DEADLINE)
    assert not alive


def test_a_port_in_use_is_said_so(tmp_path: Path, started: list[subprocess.Popen[str]]) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = _start(tmp_path / "out", "--rounds", "4", "--port", str(port), *SMALL)
        started.append(process)
        text, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 18
    assert f"port {port} is in use" in text and "Traceback" not in text
