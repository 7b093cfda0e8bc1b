"""The bench of memory: its figures and bars from made-up measurements, and the counter of live bytes."""

from __future__ import annotations

from dataclasses import replace

import torch

from bench import memory
from bench.live_bytes import LiveBytes
from bench.memory import QUICK, RANKS, Held
from bench.report import Report

METHODS = ("sign-muon", "muloco")


def as_the_formula_says() -> dict[str, dict[int, list[Held]]]:
    def held(name: str, ranks: int) -> list[Held]:
        return [
            Held(one.weights, one.gradients, one.state.device + one.state.host, one.resting, one.peak)
            for one in memory.formula(memory.run_file(name, QUICK), ranks)
        ]

    return {name: {ranks: held(name, ranks) for ranks in (1, RANKS)} for name in METHODS}


def test_the_formula_holds_its_bars() -> None:
    report = memory.fill(Report("memory"), QUICK, as_the_formula_says())
    assert report.missed() == []
    assert report.figures["state_of_all_ranks_vs_one"] == 1.0
    assert 12 < report.figures["sign-muon_bytes_1"] < 12.2, "weight, gradient, momentum and a bit"
    assert 3 < report.figures["sign-muon_bytes_4"] < 3.2
    assert report.figures["muloco_peak_4"] > report.figures["muloco_bytes_4"]
    assert [row[0] for row in report.tables[0].rows] == list(METHODS)


def test_what_is_kept_twice_or_too_large_misses_a_bar() -> None:
    found = as_the_formula_says()
    first = found["muloco"][RANKS][0]
    found["muloco"][RANKS][0] = replace(
        first, state=2 * first.state, resting=2 * first.resting, peak=2 * first.peak
    )
    missed = {sentence.split()[0] for sentence in memory.fill(Report("memory"), QUICK, found).missed()}
    assert missed == {
        "resting_vs_formula_most",
        "state_of_all_ranks_vs_one",
        "fullest_rank_vs_average",
        "peak_vs_formula_most",
    }


def test_live_bytes_follow_storages_and_forget_them() -> None:
    kept = torch.zeros(10)
    with LiveBytes([kept]) as live:
        assert live.now() == 40
        more = torch.zeros(100)
        view = more[:50]
        torch.empty(1000, device="meta")  # takes no memory
        assert live.now() == 440
        more.untyped_storage().resize_(0)
        assert live.now() == 40 and live.most == 440
        more.untyped_storage().resize_(800)
        assert live.now() == 840
        del more, view
        assert live.now() == 40
