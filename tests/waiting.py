"""Waiting for what another process does to files or to the process table: polled, because nothing else tells.

Within one process tests wait for events instead.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable

from bench.ports import free_port

__all__ = ["DEADLINE", "free_port", "until"]

DEADLINE = 240.0  # seconds; only a hang reaches it
_POLL_SECONDS = 0.02
_never = threading.Event()


def until(
    holds: Callable[[], bool],
    what: str,
    *,
    watch: subprocess.Popen[str] | subprocess.Popen[bytes] | None = None,
    fate: Callable[[], str] = lambda: "",
    deadline: float = DEADLINE,
    pause: float = _POLL_SECONDS,
) -> None:
    """Wait until ``holds()``; fails when ``watch`` ends before it does, or at the deadline.

    ``what`` names what is waited for; ``fate()`` tells more of a failure; looks are ``pause`` seconds apart.
    """
    end = time.monotonic() + deadline
    while not holds():
        if watch is not None and watch.poll() is not None:
            assert holds(), f"the process ended with {watch.returncode} before {what}; {fate()}"
            return
        assert time.monotonic() < end, f"{what} did not come within {deadline:g} s; {fate()}"
        _never.wait(pause)
