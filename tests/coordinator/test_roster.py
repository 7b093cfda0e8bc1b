"""Rosters and their epochs."""

from __future__ import annotations

import pytest

from coordinator.roster import Roster


def test_epochs_count_changes() -> None:
    empty = Roster()
    assert (empty.epoch, len(empty)) == (0, 0)
    first = empty.changed(join=["a", "b", "c"])
    assert (first.epoch, first.members) == (1, ("a", "b", "c"))
    assert first.changed() is first
    second = first.changed(leave={"b"}, join=["d"])
    assert (second.epoch, second.members) == (2, ("a", "c", "d"))
    assert "b" not in second and "d" in second


def test_slots_close_up_and_newcomers_come_last() -> None:
    roster = Roster(4, ("a", "b", "c", "d"))
    assert roster.changed(leave={"a", "c"}, join=["x", "y"]).members == ("b", "d", "x", "y")


def test_nonsense_is_refused() -> None:
    roster = Roster(1, ("a", "b"))
    with pytest.raises(ValueError, match="z cannot leave epoch 1"):
        roster.changed(leave={"z"})
    with pytest.raises(ValueError, match="twice in epoch 2"):
        roster.changed(join=["a"])
    with pytest.raises(ValueError, match="twice"):
        roster.changed(join=["c", "c"])


def test_who_leaves_and_comes_back_has_the_last_slot() -> None:
    roster = Roster(1, ("a", "b"))
    assert roster.changed(leave={"a"}, join=["a"]).members == ("b", "a")
