"""What the bench of the demo makes of its numbers."""

from __future__ import annotations

import pytest

from bench import demo
from deploy.demo_results import Agreement, Course, Results


def _results(share: float, baseline: bool = True) -> Results:
    votes = Course(
        "sign-muon", 3, 1000, [1, 2, 3, 4], busy_seconds=1.2, compute_share=share, coordinator_seconds=0.04
    )
    alone = Course("ddp-muon", 1, 1000, [1, 2, 3, 4], busy_seconds=1.0, compute_share=0.95)
    return Results(votes, Agreement(4, 4, "d"), alone if baseline else None, "", 9.0)


def test_shares_and_milliseconds() -> None:
    report = demo.report(_results(0.9))
    figures = report.figures
    assert figures["nodes_outside_forward_backward"] == pytest.approx(0.1)
    assert figures["all_outside_forward_backward"] == pytest.approx(1 - 1.08 / 1.24)
    assert figures["one_process_outside_forward_backward"] == pytest.approx(0.05)
    assert figures["node_compute_milliseconds"] == pytest.approx(90)
    assert figures["node_other_milliseconds"] == pytest.approx(10)
    assert figures["coordinator_milliseconds"] == pytest.approx(10)
    assert not report.missed()
    (rows,) = [table.rows for table in report.tables]
    assert [row[0] for row in rows] == ["3 nodes: sign-muon", "one process, Muon: ddp-muon", "coordinator"]


def test_too_much_else_misses_the_bar() -> None:
    report = demo.report(_results(0.84, baseline=False))
    assert [sentence.split()[0] for sentence in report.missed()] == ["nodes_outside_forward_backward"]
    assert "one_process_outside_forward_backward" not in report.figures
