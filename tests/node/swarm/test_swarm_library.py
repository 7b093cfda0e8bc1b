"""hivemind as it is loaded here: it leaves the rest of the process as it was."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("hivemind")

from node.exchange.swarm.library import hivemind


def test_log_levels_keep_their_names() -> None:
    hivemind()
    assert logging.getLevelName(logging.WARNING) == "WARNING"


def test_a_task_that_a_search_has_left_behind_is_no_error_for_people(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hivemind()
    log = logging.getLogger("asyncio")
    left = "Task was destroyed but it is pending!\ntask: <Task pending name='Task-3' coro=<%s() done>"
    for coroutine in ("Event.wait", "Session.send"):
        log.error(left, coroutine)
    assert [record.args for record in caplog.records] == [("Session.send",)]
