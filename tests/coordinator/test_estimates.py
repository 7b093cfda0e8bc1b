"""Rates that transfers have shown are rough: only what is far apart counts."""

from __future__ import annotations

from coordinator.estimates import evened
from coordinator.shares import Site

NAMES = ("a", "b", "c", "d")


def sites(*ups: float | None, down: float | None = None) -> list[Site]:
    return [Site(name, up, down) for name, up in zip(NAMES, ups, strict=False)]


def test_rates_that_are_near_each_other_count_as_their_median() -> None:
    evened_sites = evened(sites(15.0, 17.0, 19.0, 30.0), NAMES, ())
    assert [site.uplink for site in evened_sites] == [18.0] * 4
    assert all(site.downlink is None for site in evened_sites)


def test_what_is_far_apart_stays() -> None:
    ups = [site.uplink for site in evened(sites(1.0, 12.0, 12.5, 100.0), NAMES, ())]
    assert ups == [1.0, 12.25, 12.25, 100.0]


def test_the_word_of_a_user_stays_and_counts_for_the_median() -> None:
    evened_sites = evened(sites(10.0, 12.0, 14.0, None, down=7.0), ("a", "c", "d"), NAMES)
    assert [site.uplink for site in evened_sites] == [12.0, 12.0, 12.0, None]
    ups = [site.uplink for site in evened(sites(10.0, 12.0, 14.0), ("c",), ())]
    assert ups == [10.0, 12.0, 12.0]


def test_directions_are_apart_and_all_else_stays() -> None:
    before = [Site("a", 10.0, 3.0), Site("b", 14.0, 4.0, able=False)]
    assert evened(before, (), ("a", "b")) == [Site("a", 10.0, 3.5), Site("b", 14.0, 3.5, able=False)]
    assert evened(before, (), ()) == before
    assert evened([], (), ()) == []
