"""When reducers lose their slices: by what was said of them, or by their silence."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from coordinator.overdue import Overdue, Standing, overdue

STANDING = st.builds(
    Standing,
    reducer=st.sampled_from("abcd"),
    live=st.booleans() | st.just(True),
    trouble=st.just("") | st.just("b cannot reach it"),
    whole_at=st.none() | st.floats(100.0, 200.0),
)
SILENT = (Standing("a", whole_at=110.0), Standing("b", whole_at=120.0), Standing("c"))


def test_nothing_is_taken_as_long_as_all_goes_well() -> None:
    for whole in (None, 105.0):
        slices = [Standing(name, whole_at=whole) for name in "abc"]
        assert overdue(slices, opened_at=100.0, now=1e6) == Overdue({}, None)
    assert overdue([], opened_at=100.0, now=1e6) == Overdue({}, None)


@pytest.mark.parametrize("whole_at", [None, 105.0])
def test_a_reducer_that_left_loses_what_it_has_made_too(whole_at: float | None) -> None:
    slices = [Standing("a"), Standing("b", live=False, whole_at=whole_at)]
    assert overdue(slices, opened_at=100.0, now=106.0).taken == {"b": "b has left"}


@pytest.mark.parametrize("whole_at", [None, 105.0])
def test_trouble_with_one_slice_takes_all_of_its_reducer(whole_at: float | None) -> None:
    slices = [
        Standing("a"),
        Standing("b", whole_at=whole_at),
        Standing("b", trouble="c cannot reach b: refused"),
    ]
    assert overdue(slices, opened_at=100.0, now=106.0).taken == {"b": "c cannot reach b: refused"}


def test_a_silent_reducer_has_as_long_again_as_the_others_took() -> None:
    assert overdue(SILENT, opened_at=100.0, now=120.0) == Overdue({}, 140.0)
    assert overdue(SILENT, opened_at=100.0, now=139.9) == Overdue({}, 140.0)
    reason = "nothing whole from c 20 s after all others, who took 20 s"
    assert overdue(SILENT, opened_at=100.0, now=140.0) == Overdue({"c": reason}, None)
    assert overdue(SILENT, opened_at=100.0, now=120.0, factor=0.5).until == 130.0


def test_it_has_the_floor_at_least() -> None:
    assert overdue(SILENT, opened_at=119.0, now=120.0, floor=7.0) == Overdue({}, 127.0)
    assert overdue(SILENT, opened_at=119.0, now=127.0, floor=7.0).taken.keys() == {"c"}


def test_slices_of_one_reducer_are_not_compared_with_each_other() -> None:
    two = (*SILENT[:2], Standing("c", whole_at=115.0), Standing("c"), Standing("c"))
    assert overdue(two, opened_at=100.0, now=140.0).taken.keys() == {"c"}
    alone = [Standing("c"), Standing("c", whole_at=115.0)]
    assert overdue(alone, opened_at=100.0, now=1e6) == Overdue({}, None)


def test_who_waits_for_a_member_as_others_do_is_not_silent() -> None:
    slices = (*SILENT, Standing("d"))
    assert overdue(slices, opened_at=100.0, now=1e6) == Overdue({}, None)


@given(st.lists(STANDING, max_size=6), st.floats(100.0, 500.0), st.floats(0.0, 10.0), st.floats(0.0, 3.0))
def test_the_verdict_holds_until_it_says(
    slices: list[Standing], now: float, floor: float, factor: float
) -> None:
    def ask(at: float) -> Overdue:
        return overdue(slices, opened_at=100.0, now=at, floor=floor, factor=factor)

    verdict = ask(now)
    for reducer, reason in verdict.taken.items():
        assert reason
        assert any(
            not one.live or one.trouble or one.whole_at is None for one in slices if one.reducer == reducer
        )
    if verdict.until is None:
        assert ask(1e9).taken.keys() == verdict.taken.keys()
    else:
        assert verdict.until > now
        assert ask((now + verdict.until) / 2).taken.keys() == verdict.taken.keys()
        assert ask(verdict.until).taken.keys() > verdict.taken.keys()


@given(st.lists(STANDING, min_size=1, max_size=6), st.data())
def test_progress_never_takes_from_who_makes_it(slices: list[Standing], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(slices) - 1))
    assume(slices[index].whole_at is None)
    better = [*slices]
    better[index] = replace(slices[index], whole_at=150.0)
    reducer = slices[index].reducer
    before = overdue(slices, opened_at=100.0, now=200.0)
    if reducer not in before.taken:
        assert reducer not in overdue(better, opened_at=100.0, now=200.0).taken
