"""The island bench on a small model: equal trainings, counts, figures and bars; namespaces and their end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from bench import island, namespaces
from bench.island import A2A, GATHER, OURS, Outcome, Place, Row, Timing
from bench.island_methods import METHODS
from bench.island_ranks import Ranks, world
from bench.island_work import losses, peak_memory, reduce_seconds, reference_losses, timed_steps
from bench.report import Report

SMALL = island.SMALL
MATRICES, SHAPES = 14, 3  # of SMALL: two layers of seven; square, tall and wide
LINKS = pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with world(2) as ranks:
        yield ranks


def test_every_method_trains_as_one_process_does(pair: Ranks) -> None:
    alone = reference_losses(SMALL, 4)
    assert alone[-1] < alone[0]
    for method in METHODS:
        for found in pair.run(losses, 2, method, SMALL, 4, None):
            assert found == pytest.approx(alone, rel=0, abs=1e-12), method


def test_the_steps_and_their_collectives_are_counted(pair: Ranks) -> None:
    for steps, calls in pair.run(timed_steps, 2, METHODS, SMALL, 1, 2, 125e6):
        assert calls == {OURS: 0, GATHER: MATRICES, A2A: 2 * SHAPES}
        for method in METHODS:
            of = steps[method]
            assert len(of.training) == len(of.stepping) == len(of.cpu) == len(of.sent) == 2
            assert min(of.training + of.stepping) > 0
            assert min(of.sent) > 0 or not os.path.exists("/proc/self/net/dev")
    for scatter, exchange in pair.run(reduce_seconds, 2, SMALL, 2):
        assert len(scatter) == len(exchange) == 2 and min(scatter + exchange) > 0


def test_peaks_hold_at_least_what_stays() -> None:
    with world(2) as ranks:
        for peaks in ranks.run(peak_memory, 2, METHODS, SMALL, None):
            if peaks is None:
                pytest.skip("this system does not tell a process's peak")
            # half of weights, gradients and momenta
            assert min(peaks.values()) > 4 * SMALL.parameters / 2 * 3


def test_a_failing_rank_is_named() -> None:
    with (
        world(1) as ranks,
        pytest.raises(RuntimeError, match=r"(?s)losses failed on rank 0 of 1: .*missing 4 required"),
    ):
        ranks.run(losses, 1)


def timing(step: float, *, training: float = 1.0, collectives: int = 0) -> Timing:
    return Timing([training] * 3, [step] * 3, [step] * 3, 1.0, collectives)


def outcome(place: Place, ours: float, memory: int | None = 10) -> Outcome:
    timings = {OURS: timing(ours), GATHER: timing(6.0, collectives=28), A2A: timing(2.0, collectives=6)}
    rows = {ranks: Row(ranks, timings, 0.5) for ranks in island.RANKS}
    peaks = None if memory is None else {OURS: memory, GATHER: 20, A2A: 16}
    return Outcome(place, rows, peaks, 1e-15)


def test_figures_and_bars_of_all_links() -> None:
    report = Report("island")
    island.fill(report, [outcome(place, 1.0) for place in island.PLACES], bars=True)
    for suffix in ("", "_1gbit", "_100mbit"):
        assert report.figures[f"step_ratio{suffix}"] == 6.0
        assert report.figures[f"step_ratio_a2a{suffix}"] == 2.0
        assert report.figures[f"end_to_end_ratio{suffix}"] == 3.5
        assert report.figures[f"end_to_end_ratio_a2a{suffix}"] == 1.5
        assert report.figures[f"end_to_end_ratio_a2a{suffix}_2ranks"] == 1.5
        assert report.figures[f"end_to_end_ratio_a2a{suffix}_true_reduce"] == 1.25
        assert report.figures[f"collectives_in_step{suffix}"] == 0
        assert report.figures[f"loss_difference_fp64{suffix}"] == 1e-15
        assert report.figures[f"peak_memory_ratio{suffix}"] == 0.5
    assert report.missed() == []
    assert len(report.tables[0].rows) == 3 * 2 * 3
    assert any("all-reduce" in note for note in report.notes)


def test_bars_are_missed_by_a_step_that_is_slow_or_depends_on_the_link() -> None:
    report = Report("island")
    places = island.PLACES
    island.fill(report, [outcome(places[0], 1.0), outcome(places[1], 1.7, memory=30)], bars=True)
    missed = {sentence.split()[0] for sentence in report.missed()}
    assert missed == {
        "step_ratio_1gbit",
        "step_ratio_a2a_1gbit",
        "peak_memory_ratio_1gbit",
        "step_slowest_of_fastest_link",
    }


def test_without_namespaces_the_figures_of_links_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    reason = namespaces.why_not()
    assert reason is not None
    measure = island.measure

    def loopback_only(place: Place) -> Outcome:
        return outcome(place, 1.0, memory=None) if place.rate is None else measure(place)

    monkeypatch.setattr(island, "measure", loopback_only)
    report = island.run(quick=False)
    assert "step_ratio" in report.figures
    assert not any("bit" in name or "memory" in name for name in report.figures)
    assert f"no figures for 1 Gbit/s: {reason}" in report.notes
    assert f"no figures for 100 Mbit/s: {reason}" in report.notes


def test_quick_is_loopback_without_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island, "measure", lambda place: outcome(place, 1.0))
    report = island.run(quick=True)
    assert report.bars == {} and "step_ratio_1gbit" not in report.figures


def test_a_bucket_holds_two_milliseconds_and_at_least_a_segment() -> None:
    assert namespaces.token_bucket(1_000_000_000)[4] == "250000"
    assert namespaces.token_bucket(100_000_000)[4] == "70000"
    assert namespaces.token_bucket(1_000_000)[4] == "4542"


def names() -> set[str]:
    return set(os.listdir(namespaces.NAMES)) if namespaces.NAMES.exists() else set()


def interfaces() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.root
@LINKS
def test_ranks_behind_links_leave_nothing_behind() -> None:
    before = interfaces()
    with namespaces.linked(2, 100_000_000) as paths, world(2, paths) as ranks:
        assert names() == set() or not any(name.startswith("atoll-") for name in names())
        assert interfaces() == before
        for steps, _ in ranks.run(timed_steps, 2, [OURS], SMALL, 1, 1, 12.5e6):
            # half of the weights twice (the root's once) and the gradients, from the rank's own interface
            assert steps[OURS].sent[0] > 4 * SMALL.parameters / 2
    assert not any(os.path.exists(path) for path in paths)
    assert interfaces() == before


@pytest.mark.root
@LINKS
def test_a_failure_while_building_takes_the_names_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        made.update(name for name in names() if name.startswith("atoll-"))
        raise namespaces.NamespacesUnavailable("no bridges here")

    made: set[str] = set()
    monkeypatch.setattr(namespaces, "_build", fail)
    with pytest.raises(namespaces.NamespacesUnavailable, match="no bridges"), namespaces.linked(2, 1000):
        raise AssertionError("not reached")
    assert len(made) == 3 and not made & names()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
