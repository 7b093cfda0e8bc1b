from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from bench import sweep
from bench.report import Report
from deploy.costs import Costs
from deploy.testbed.namespace import why_not
from deploy.testbed.script import Script
from deploy.testbed.setting import layout_of
from protos.runfile import RunFile

RATES = ["1gbit", "10mbit"]


@pytest.fixture(scope="module")
def planned() -> tuple[RunFile, Costs]:
    return sweep.costs_for(sweep.options_of("ddp-muon", True, Path("out")))


def _round(index: int, ended: float, seconds: float, steps: int = 1, tokens: int = 1000) -> dict[str, Any]:
    def node(compute: float) -> dict[str, Any]:
        phases = {"compute": compute, "apply": 0.1, "exchange": seconds - compute - 0.1, "evaluate": 9.0}
        return {"seconds": phases, "steps": steps}

    nodes = {"site-a": node(0.3), "site-b": node(0.5)}
    return {"round": index, "ended": ended, "seconds": seconds, "tokens": tokens, "nodes": nodes}


RESULTS = {
    "rounds": [_round(i, 1.0 + i, 1.0) for i in range(6)]
    + [_round(6 + i, 8.0 + 2 * i, 2.0) for i in range(4)],
    "events": [{"seconds": 5.5}, {"seconds": 6.2}],
}


def test_slow_links_get_fewer_rounds(planned: tuple[RunFile, Costs]) -> None:
    run, costs = planned
    fast, slow = sweep.schedule(run, costs, RATES, sweep.PHASE_SECONDS)
    assert sweep.SKIPPED + sweep.FEWEST <= slow < fast <= sweep.SKIPPED + sweep.MOST


def test_the_script_changes_every_link_after_the_rounds_of_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "script.toml"
    path.write_text(sweep.script_of(sweep.RATES, [5, 6, 7, 8]))
    links = [link.name for link in layout_of(sweep.options_of("diloco", True, tmp_path)).shaped]
    actions = Script.load(path, links).left
    assert [(action.round, action.change.link, action.change.rate) for action in actions] == [
        (5, "site-a", "1gbit"),
        (5, "site-b", "1gbit"),
        (11, "site-a", "100mbit"),
        (11, "site-b", "100mbit"),
        (18, "site-a", "10mbit"),
        (18, "site-b", "10mbit"),
    ]


def test_rounds_that_saw_two_rates_count_for_neither() -> None:
    fast, slow = sweep.phases_of(RESULTS, RATES)
    assert [one["round"] for one in fast] == [2, 3, 4], "without the first, and before the first link changed"
    assert [one["round"] for one in slow] == [7, 8, 9], "those that began after the last link had changed"


def test_a_step_is_the_slower_nodes_without_its_wait() -> None:
    assert sweep.step_seconds([_round(0, 9.0, 2.0, steps=2)]) == pytest.approx(0.3)


def test_points_compare_with_the_plan(planned: tuple[RunFile, Costs], tmp_path: Path) -> None:
    run, costs = planned
    _, slow = sweep.phases_of(RESULTS, RATES)
    point = sweep.point("ddp-muon", "10mbit", slow, run, costs)
    assert point.tokens == pytest.approx(500) and point.rounds == 3
    assert point.plan.compute_seconds == pytest.approx(0.6)
    bits = 8 * max(costs.bytes_up, costs.bytes_down)
    assert point.plan.exchange_seconds >= bits / 1e7
    assert point.planned == pytest.approx(1000 / point.plan.round_seconds)
    assert point.busy == pytest.approx(0.25)
    sweep.draw([point], tmp_path / "sweep.png")
    assert imread(tmp_path / "sweep.png").shape[1] > 900
    report = Report("sweep")
    sweep._methods(report, [point])
    assert report.figures["ddp-muon_10mbit_of_plan"] == pytest.approx(1 / (1 + point.off))


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_quick_sweep_measures_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "QUICK_METHODS", ("sign-muon",))
    monkeypatch.setattr(sweep, "QUICK_SECONDS", 2.0)
    report = sweep.run(True)
    for rate in sweep.QUICK_RATES:
        assert report.figures[f"sign-muon_{rate}_tokens_per_second"] > 0
        assert report.figures[f"link_{rate}_of_asked"] > 0
