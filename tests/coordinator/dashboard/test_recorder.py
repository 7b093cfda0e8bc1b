"""What the dashboard remembers of a run."""

from __future__ import annotations

import math

import pytest

from coordinator import events
from coordinator.dashboard.recorder import (
    CURVE_POINTS,
    EVENTS,
    OPEN_ROUNDS,
    ROUNDS,
    Recorder,
    category,
)
from coordinator.events import Event


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


def committed(index: int, seconds: float = 2.0, after_first: float = 0.5) -> events.RoundCommitted:
    return events.RoundCommitted(
        index, 1, ("node-0", "node-1"), (), "all are in", seconds, after_first, 128, 0.75, (1, 1)
    )


def opened(index: int) -> events.RoundOpened:
    return events.RoundOpened(index, 1, ("node-0", "node-1", "node-2"), (), 10.0, "as ever")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def recorder(clock: Clock) -> Recorder:
    return Recorder(
        lambda event: type(event).__name__, lambda event: None, now=clock.now, wall=lambda: clock.time + 1e9
    )


def play(recorder: Recorder, clock: Clock, rounds: range) -> None:
    for index in rounds:
        recorder(opened(index))
        clock.time += 2.0
        recorder(committed(index))
        clock.time += 0.25


def test_phases_of_rounds(recorder: Recorder, clock: Clock) -> None:
    play(recorder, clock, range(3))
    first, second, _ = recorder.rounds
    assert math.isnan(first.between)
    assert (second.between, second.training, second.closing) == pytest.approx((0.25, 1.5, 0.5))
    assert (second.members, second.voters, second.nbytes) == (3, 2, 128)
    assert second.opened == pytest.approx(1e9 + 102.25)
    assert recorder.pace() == pytest.approx(2.25)


def test_the_pace_is_unknown_before_the_second_round(recorder: Recorder, clock: Clock) -> None:
    play(recorder, clock, range(1))
    assert math.isnan(recorder.pace())


def test_what_is_kept_is_bounded_and_rounds_push_out_nothing_else(recorder: Recorder, clock: Clock) -> None:
    recorder(events.NodeJoined("node-0", "gpu", "ipv4:192.0.2.1:1", 0))
    play(recorder, clock, range(2 * EVENTS))
    assert len(recorder.rounds) == ROUNDS
    kept = recorder.happened()
    assert len(kept) == EVENTS + 1
    assert kept[-1].text == "NodeJoined" and kept[0].text == "RoundCommitted"


def test_the_listener_is_told_everything_and_reports_are_not_kept(clock: Clock) -> None:
    heard: list[Event] = []
    recorder = Recorder(str, heard.append, now=clock.now, wall=clock.now)
    report = events.NodeReported("node-0", 0, 2.5, "digest")
    recorder(report)
    assert heard == [report] and recorder.happened() == ()


def test_losses_may_come_late_and_bytes_are_those_of_the_commit(recorder: Recorder, clock: Clock) -> None:
    losses = {0: (math.nan, math.nan)}
    moved = [10]
    recorder.losses = lambda index: losses.get(index, (math.nan, math.nan))
    recorder.moved = lambda: moved[0]
    play(recorder, clock, range(1))
    moved[0] = 99
    losses[0] = (2.5, 2.75)
    (point,) = recorder.points()
    assert (point.round, point.nbytes, point.loss, point.validation_loss) == (0, 10, 2.5, 2.75)


def test_a_long_curve_is_thinned_but_keeps_its_validation_losses(recorder: Recorder, clock: Clock) -> None:
    rounds = 6 * CURVE_POINTS
    recorder.losses = lambda index: (5.0 - index / rounds, 4.0 if index % 1000 == 7 else math.nan)
    play(recorder, clock, range(rounds))
    points = recorder.points()
    assert len(points) <= 2 * CURVE_POINTS + OPEN_ROUNDS + 1
    assert [p.round for p in points] == sorted({p.round for p in points})
    assert points[0].round == 0 and points[-1].round == rounds - 1
    measured = [p.round for p in points if math.isfinite(p.validation_loss)]
    assert measured == list(range(7, rounds, 1000))


def test_every_event_has_a_category() -> None:
    assert category(opened(0)) == category(committed(0)) == "rounds"
    assert category(events.NodeExpelled("node-0", "gpu", "why")) == "admin"
    assert category(events.CoordinatorStopped("done", "all", 9)) == "run"
