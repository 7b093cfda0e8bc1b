"""The churn bench: its band, its figures and its picture from given courses, and seconds of a real run."""

from __future__ import annotations

import argparse
import dataclasses
import random
from pathlib import Path

import pytest
from rich.console import Console

from bench import churn
from bench.bed import TINY, Bed, merged
from bench.churn_band import Band, band_of
from bench.churn_play import EVENTS, FEWEST, MOST, RUN, Churn, Course
from bench.forked import ForkedChildren
from bench.report import Report
from coordinator.audit import Audit, Violation
from deploy.compare_outcome import Outcome, Point
from protos.runfile import RunFile

ROUNDS = 40
BAND = Band(tuple(range(9, ROUNDS, 10)), (3.0, 2.6, 2.4, 2.3), (3.2, 2.8, 2.6, 2.5), 0.1)


def quiet(*losses: float) -> Outcome:
    """A run of ten rounds for each loss, with three steps in each."""
    points = tuple(Point(30 * (i + 1), 0, 0, 0, loss, loss) for i, loss in enumerate(losses))
    last = points[-1]
    return Outcome(
        label="quiet", seed=0, run_digest="", method="sign-muon", nodes=3, rounds=10 * len(losses),
        steps=last.steps, tokens=0, parameters=0, state_bytes=0, bytes_up=0, bytes_down=0,
        validation_loss=last.loss, bits_per_byte=0.0, state_digest="", cpu_seconds=0.0, points=points,
    )  # fmt: skip


@pytest.fixture
def course() -> Course:
    """A round each second but for one minute without, and one event of each kind before that."""
    times = [1000.0 + index + (60.0 if index >= 20 else 0.0) for index in range(ROUNDS)]
    return Course(
        RunFile.model_validate(merged(TINY, RUN)),
        events=[(1005.5 + index, kind) for index, kind in enumerate(EVENTS)],
        commits=dict(enumerate(times)),
        voters=[5] * ROUNDS,
        losses=[(9, 3.25), (19, 2.7), (29, 2.45), (39, 2.35)],
        ended=times[-1] + 2.0,
    )


def report_of(course: Course, monkeypatch: pytest.MonkeyPatch) -> Report:
    def quiet_runs(file: RunFile, nodes: tuple[int, int]) -> Band:
        assert (file.run.rounds, nodes) == (ROUNDS, (FEWEST, MOST))
        return BAND

    monkeypatch.setattr(churn, "quiet_runs", quiet_runs)
    report = Report("churn")
    churn.fill(report, course, 1.0)
    return report


def test_the_band_spans_the_runs_and_is_widened_by_their_seeds() -> None:
    few = [quiet(3.0, 2.5, 2.4), quiet(3.9, 2.6, 2.6), quiet(3.1, 2.4, 2.3)]
    many = [quiet(2.9, 2.4, 2.3), quiet(2.0, 2.45, 2.4), quiet(2.1, 2.45, 2.35)]
    band = band_of([few, many])
    assert band.rounds == (9, 19, 29)
    assert (band.low, band.high) == ((2.0, 2.4, 2.3), (3.9, 2.6, 2.6))
    assert band.margin == pytest.approx(0.15), "the median of the second halves: 0.2, 0.3, 0.05 and 0.1"
    beside = band.beside([(9, 4.0), (14, 9.0), (19, 2.8), (29, 2.1)])
    assert [(point.round, point.inside) for point in beside] == [(9, True), (19, False), (29, False)]
    assert beside[0].middle == pytest.approx(2.95)


def test_a_course_knows_its_standstill_and_where_its_events_were(course: Course) -> None:
    assert course.standstill == 61.0
    assert [course.rounds_of(kind) for kind in EVENTS] == [[5], [6], [7], [8], [9], [10]]
    assert course.count("die") == 1 and course.count("resume") == 0
    late = dataclasses.replace(course, ended=course.ended + 500.0)
    assert late.standstill == 502.0, "an end without commits is a standstill, too"


def test_a_run_as_it_should_be_holds_all_bars(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(course, monkeypatch)
    assert report.missed() == []
    assert report.figures["rounds"] == ROUNDS and report.figures["points"] == 4
    assert report.figures["loss_minus_quiet"] == pytest.approx((0.15 + 0.0 - 0.05 - 0.05) / 4)


def test_whatever_goes_wrong_misses_a_bar(course: Course, monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(
        dataclasses.replace(
            course,
            ended=course.ended + 500.0,
            differing=[7],
            deviations=1,
            troubles=["n4 was killed by SIGSEGV"],
            losses=[(39, 2.7), (29, 2.2)],
            found=Audit(violations=[Violation("twice", "sample 7 was trained twice")]),
        ),
        monkeypatch,
    )
    assert [text.split()[0] for text in report.missed()] == [*report.bars]
    assert report.figures["digest_mismatches"] == 2 and report.figures["points_outside_the_band"] == 2
    assert {"sample 7 was trained twice", "n4 was killed by SIGSEGV"} <= {*report.notes}


def test_the_picture_is_written_beside_the_figures(
    course: Course, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report_of(course, monkeypatch).write_pictures(tmp_path / "churn.json")
    picture = (tmp_path / "churn-losses.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_nothing_happens_where_nothing_may(tmp_path: Path) -> None:
    played = Churn(Bed(tmp_path, ForkedChildren()), random.Random(0), 1, Console(quiet=True))
    played._present = [f"n{index}" for index in range(MOST)]
    assert played._drawn() in ("crash", "suspend"), "no round has had more votes than it must"
    played._back_at = 0.0
    assert played._drawn() == ""


@pytest.mark.slow
def test_a_run_goes_on_while_its_processes_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.churn_play.PAUSE", (1.0, 2.0))
    monkeypatch.setattr("bench.churn_play.FROZEN", (1.0, 2.0))
    with ForkedChildren() as children:
        bed = Bed(tmp_path, children, command=())
        played = Churn(bed, random.Random(6), 1, Console(quiet=True)).play(8.0, 100.0)
    assert sorted(played.commits) == list(range(len(played.voters)))
    assert played.losses and played.found.trained > 0
    assert played.events and {kind for _, kind in played.events} <= {*EVENTS}
    assert (played.differing, played.deviations, played.troubles) == ([], 0, [])
    assert played.found.violations == []


def test_options_have_their_defaults() -> None:
    parser = argparse.ArgumentParser()
    churn.add_options(parser)
    options = parser.parse_args([])
    assert (options.minutes, options.seed, options.folder) == (None, 0, None)
