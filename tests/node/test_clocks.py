"""When phases of a round begin and end."""

from __future__ import annotations

import pytest

from node.clocks import GRAIN, Stopwatch


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(clock: Clock, watch: Stopwatch, name: str, seconds: float) -> None:
    with watch.phase(name):
        clock.now += seconds


def test_spans_count_from_the_beginning_of_the_round() -> None:
    clock = Clock()
    watch = Stopwatch(clock, date=lambda: 1e9)
    assert (watch.began, watch.spans) == (0.0, ())
    watch.restart()
    run(clock, watch, "data", 0.25)
    with watch.phase("compute"):
        clock.now += 1.0
        run(clock, watch, "propose", 0.5)
    clock.now += 2.0
    run(clock, watch, "compute", 1.0)
    before = watch.spans
    assert watch.began == 1e9
    assert before == (
        ("data", 0.0, 0.25),
        ("compute", 0.25, 1.75),
        ("propose", 1.25, 1.75),
        ("compute", 3.75, 4.75),
    )
    assert watch.seconds == {"data": 0.25, "compute": 2.0, "propose": 0.5}
    watch.restart()
    assert watch.spans == () and len(before) == 4


def test_something_beside_the_phases_is_in_the_spans_alone() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.restart()
    with watch.span("flight"):
        run(clock, watch, "compute", 3.0)
        with pytest.raises(RuntimeError), watch.span("other"):
            raise RuntimeError
    assert watch.spans == (("flight", 0.0, 3.0), ("compute", 0.0, 3.0), ("other", 3.0, 3.0))
    assert watch.seconds == {"compute": 3.0}


def test_turns_without_a_gap_worth_seeing_are_one_span() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.restart()
    steps = 2000
    for _ in range(steps):
        run(clock, watch, "compute", 0.25)
        clock.now += GRAIN / 2
    assert watch.spans == (("compute", 0.0, pytest.approx(steps * 0.25 + (steps - 1) * GRAIN / 2)),)
    watch.restart()
    for _ in range(steps):  # gaps of a quarter of a second stay until they are a thousandth of the round
        run(clock, watch, "compute", 0.25)
        clock.now += 0.25
    assert 500 <= len(watch.spans) <= 502
