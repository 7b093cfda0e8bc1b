"""Settings that all tests share."""

from __future__ import annotations

import signal

import pytest
from hypothesis import settings

# A loaded machine may take its time over one example; the timeout of the whole test still holds.
settings.register_profile("atoll", parent=settings.default, deadline=None)
settings.load_profile("atoll")

# A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that need a Docker engine run only if they are asked for: `-m docker`. Files with long tests come
    first: at the end of several processes' work none has such a file left."""
    long = {item.path for item in items if item.get_closest_marker("slow") or "system" in item.path.parts}
    items.sort(key=lambda item: item.path not in long)
    if "docker" in config.getoption("markexpr", ""):
        return
    kept = [item for item in items if item.get_closest_marker("docker") is None]
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept
