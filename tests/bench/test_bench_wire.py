"""The bench of what a vote puts on the wire: nodes of its own making in a run of the real coordinator."""

from __future__ import annotations

import pytest

from bench import wire


@pytest.mark.slow
def test_a_vote_is_one_bit_a_parameter_each_way() -> None:
    report = wire.run(quick=True)
    assert report.missed() == []
    for way in ("up", "down"):
        assert 1.0 < report.figures[f"bits_per_param_{way}"] < 1.01
