"""Forked processes: what a bench has started ends with it, whichever way it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bench.bed import ENVIRONMENT, ROOT
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's end")

BENCH = """
import sys
from pathlib import Path
from bench.bed import Bed
from bench.forked import ForkedChildren
from deploy.processes import unwinding_signals

with unwinding_signals(), ForkedChildren() as children:
    bed = Bed(Path(sys.argv[1]), children, command=())
    bed.write({})
    hub = bed.lead()
    print(hub.pid, flush=True)
    children.wait(hub, 240)
"""


def status(pid: int) -> str:
    """The letter of a process's state, ``"-"`` once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "-"


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize(("number", "freeze"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_nothing_outlives_a_bench(tmp_path: Path, number: signal.Signals, freeze: bool) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(
        [sys.executable, "-c", BENCH, str(tmp_path)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as bench:
        assert bench.stdout is not None
        hub = int(bench.stdout.readline())
        server = parent(hub)
        assert server != bench.pid
        if freeze:  # as at the point of a fault
            os.kill(hub, signal.SIGSTOP)
            until(lambda: status(hub) == "T", "its standstill")
        bench.send_signal(number)
        bench.wait(60)
    until(lambda: status(hub) == status(server) == "-", "the end of what the bench had started", deadline=60)
