"""The waits of a run: their order, and the rule about it in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.runfile import RunFile, RunFileError
from protos.runfile_text import advice
from protos.waits import HEARTBEAT_SECONDS, MISSED, longest_round, waits


@given(start=st.floats(15.1, 1e6), share=st.floats(0.001, 1.0))
def test_each_wait_outlasts_what_it_waits_for(start: float, share: float) -> None:
    heartbeat, departure, others, first, result = (wait.seconds for wait in waits(share * start, start))
    assert heartbeat < departure == MISSED * HEARTBEAT_SECONDS < first
    assert others <= first < result
    assert result > first + others + first, "the latest verdict: no first one in time, then no quorum"
    assert result == longest_round(share * start, start)


def test_a_deadline_beyond_the_start_is_refused_with_the_rule() -> None:
    with pytest.raises(RunFileError) as caught:
        RunFile.parse("[round]\ndeadline = 700\n")
    assert "must not be longer than start_timeout = 600 s; raise start_timeout" in str(caught.value)
    assert "must end before that for its first contribution would" in str(caught.value)


@pytest.mark.parametrize(("seconds", "count"), [(14.0, 1), (15.0, 0)])
def test_a_start_before_a_departure_is_advised_against(seconds: float, count: int) -> None:
    said = [
        text
        for text in advice(RunFile.parse(f"[round]\ndeadline = 5\nstart_timeout = {seconds}\n"))
        if "start_timeout" in text
    ]
    assert len(said) == count
    assert all(
        "shorter than the 15 s (3 heartbeats)" in text and "make it 15 s or more" in text for text in said
    )
