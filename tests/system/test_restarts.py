"""A coordinator that is killed again and again: the run comes to the same states as without."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.restarts import course

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are read from Linux's /proc"),
]

ROUNDS, KILLS = 60, 4


def test_states_are_those_of_the_run_without_kills(tmp_path: Path) -> None:
    quiet = course(tmp_path / "quiet", ROUNDS, 0)
    killed = course(tmp_path / "killed", ROUNDS, KILLS, seed=3)
    assert sorted(quiet.digests) == list(range(ROUNDS))
    assert killed.digests == quiet.digests
    assert killed.violations == quiet.violations == []
    assert len(set(quiet.digests.values())) == ROUNDS, "the state must change in every round"
