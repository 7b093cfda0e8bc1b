"""hivemind as it is loaded here: it leaves the rest of the process as it was."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("hivemind")

from node.exchange.swarm.library import hivemind


def test_log_levels_keep_their_names() -> None:
    hivemind()
    assert logging.getLevelName(logging.WARNING) == "WARNING"
