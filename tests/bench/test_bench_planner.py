"""The planner bench on small models: its figures, their bars, and that they are taken from plans."""

from __future__ import annotations

import pytest

from bench import planner
from node.island.inventory import ROOT, Matrices, Weight


def small() -> list[Weight]:
    weights = [
        Weight(f"layers.{n}.{name}", shape, f"layers.{n}", "matrix", (Matrices(1, *shape),))
        for n in range(12)
        for name, shape in (("a", (64, 64)), ("b", (128, 64)), ("c", (64, 128)))
    ]
    return [*weights, Weight("embed", (4096, 64), ROOT, "embedding")]


def test_figures_and_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "llama3_70b", small)
    monkeypatch.setattr(planner, "moe_2t4", small)
    report = planner.run(quick=True)
    assert {"seconds_70b_1024", "seconds_2t4_1000", "padding_70b_64"} <= set(report.figures)
    for name in ("seconds_70b_1024", "seconds_2t4_1000"):
        assert report.bars[name].ceiling == planner.SECONDS and report.figures[name] > 0
    assert report.bars["padding_70b_64"].ceiling == planner.PADDING
    assert report.figures["bytes_70b_64"] >= 1
    assert report.figures["largest_group_70b"] > 1
    assert len(report.tables[0].rows) == 15


def test_the_median_of_repeats_and_the_last_result() -> None:
    results = iter(range(9))
    seconds, last = planner.timed(lambda: next(results), 5)
    assert last == 4 and seconds >= 0
