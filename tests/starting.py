"""Processes that a test starts, and that end with it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def starting(*first: str, deadline: float) -> Iterator[Start]:
    """Starts python with ``first`` and some arguments; whatever is left is killed at the end."""
    processes: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *first, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={"ATOLL_LOG_DIR": "off", **os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=deadline)
