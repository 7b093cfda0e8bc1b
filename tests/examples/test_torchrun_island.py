"""The example runs under torchrun as its first line says, and what it trains gets better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "torchrun_island.py"


def losses(steps: int) -> list[float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*command, str(SCRIPT), str(steps)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(found) for found in re.findall(r"^step \d+: loss ([\d.]+)", done.stdout, re.MULTILINE)]


def test_three_steps_on_two_ranks() -> None:
    pytest.importorskip("transformers")
    first, _, last = losses(3)
    assert last < first - 0.2


def test_it_is_forty_lines_at_most() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 40


def test_it_differs_from_a_script_for_fsdp2_by_one_import_of_fully_shard() -> None:
    lines = SCRIPT.read_text().splitlines()
    at = lines.index("from node.island import fully_shard")
    assert lines[at - 1] == "# from torch.distributed.fsdp import fully_shard"
