from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import UserError
from deploy.links.shape import Shape
from deploy.testbed.change import Change, State
from deploy.testbed.script import Action, Script

START = State(Shape(rate=10**8, delay=0.04))
LINKS = ["site-a", "site-b"]


def test_a_link_is_cut_degraded_and_reset() -> None:
    cut = Change("site-a", up=False).after(START, START)
    assert not cut.up and cut.shape == START.shape and cut.text == "cut"
    degraded = Change("site-a", rate="10mbit", loss="1%").after(cut, START)
    assert degraded == State(Shape(10**7, 0.04, loss=0.01), up=False), "still cut"
    assert Change("site-a", up=True, reset=True).after(degraded, START) == START
    again = Change("site-a", reset=True, delay="1ms").after(degraded, START)
    assert again.shape == Shape(10**8, 0.001)


@given(
    st.none() | st.booleans(),
    st.sampled_from(["", "10mbit", "unlimited"]),
    st.sampled_from(["", "40ms"]),
    st.sampled_from(["", "5ms"]),
    st.sampled_from(["", "1%"]),
    st.booleans(),
)
def test_a_change_survives_its_way_to_the_bed(
    up: bool | None, rate: str, delay: str, jitter: str, loss: str, reset: bool
) -> None:
    if up is None and not reset and not (rate or delay or jitter or loss):
        return
    change = Change("site-a", up=up, rate=rate, delay=delay, jitter=jitter, loss=loss, reset=reset)
    assert Change.from_json(change.to_json()) == change


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({}, "needs link"),
        ({"link": "site-a"}, "nothing to do with site-a"),
        ({"link": "site-a", "rate": 10}, "rate = 10 is no text"),
        ({"link": "site-a", "rate": "quick"}, "site-a: 'quick'"),
        ({"link": "site-a", "down": False}, "write down = true"),
        ({"link": "site-a", "up": True, "down": True}, "up and down at once"),
        ({"link": "site-a", "speed": "10mbit"}, "unknown key 'speed'"),
        ({"link": "site-a", "reset": 1}, "write reset = true"),
    ],
)
def test_what_is_no_change_is_said_so(values: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        Change.from_json(values)


def test_a_jitter_without_a_delay_is_refused_where_it_is_applied() -> None:
    change = Change("site-a", jitter="5ms")
    assert change.after(START, START).shape.jitter == 0.005
    with pytest.raises(UserError, match="jitter"):
        change.after(State(Shape()), START)


def _script(tmp_path: Path, text: str) -> Script:
    path = tmp_path / "script.toml"
    path.write_text(text)
    return Script.load(path, LINKS)


def test_actions_are_done_once_as_their_times_come(tmp_path: Path) -> None:
    script = _script(
        tmp_path,
        '[[action]]\nround = 2\nlink = "site-a"\ndown = true\n'
        '[[action]]\nat = "20s"\nlink = "site-b"\nrate = "10mbit"\n'
        '[[action]]\nround = 4\nlink = "site-a"\nup = true\n',
    )
    assert script.due(1, 5.0) == []
    assert script.due(1, float("-inf")) == []
    assert [action.change for action in script.due(2, 19.9)] == [Change("site-a", up=False)]
    assert script.due(2, 19.9) == []
    both = script.due(9, 21.0)
    assert [action.change for action in both] == [Change("site-b", rate="10mbit"), Change("site-a", up=True)]
    assert script.due(99, 99.0) == [] and not script.left


def test_a_round_is_due_once_so_many_are_committed() -> None:
    action = Action(Change("site-a", up=False), round=0)
    assert action.due(0, float("-inf"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "tables"),
        ("action = 3", "tables"),
        ("[[actions]]\nround = 1", "tables"),
        ("[[action]]\nround = ", "is no TOML"),
        ('[[action]]\nlink = "site-a"\ndown = true', "action 1: give either round"),
        ('[[action]]\nround = 1\nat = "2s"\nlink = "site-a"\ndown = true', "action 1: give either round"),
        ('[[action]]\nround = 1\nlink = "site-c"\ndown = true', "no link 'site-c': there are site-a, site-b"),
        ('[[action]]\nat = 3\nlink = "site-a"\ndown = true', "at = 3 is no text"),
        ('[[action]]\nat = "soon"\nlink = "site-a"\ndown = true', "action 1: 'soon' is not a duration"),
        ('[[action]]\nround = -1\nlink = "site-a"\ndown = true', "no whole number"),
        ('[[action]]\nround = true\nlink = "site-a"\ndown = true', "no whole number"),
    ],
)
def test_what_is_no_script_is_said_so(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(UserError, match=what):
        _script(tmp_path, text)


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        Script.load(tmp_path / "none.toml", LINKS)
