"""Shares of a round against a linear program, slices cut by them, and slices that change hands."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from coordinator.shares import NOBODY, Site, shares
from coordinator.topology import GAIN, Assigned, Plan, moved, plan, plan_all, renewed
from optim.slices import Slice, slice_pieces, units
from protos.buckets import BucketTable
from tests.coordinator.contribution_rig import coded_table, mixed_table, schedule, voted_table

TABLES = {"votes": voted_table(4000), "few": mixed_table(), "coded": coded_table()}
RATE = st.one_of(st.sampled_from([1.0, 10.0]), st.floats(0.01, 1000.0))
KNOWN = st.builds(Site, node=st.just(""), uplink=RATE, downlink=RATE, able=st.booleans())
ANY = st.builds(
    Site, node=st.just(""), uplink=st.none() | RATE, downlink=st.none() | RATE, able=st.booleans()
)
COORDINATOR = st.none() | st.builds(Site, node=st.just("hub"), uplink=RATE, downlink=RATE)
NBYTES = st.integers(1, 10_000)
FEW = settings(deadline=None, max_examples=40)


def named(sites: Sequence[Site]) -> list[Site]:
    return [Site(f"node-{index}", s.uplink, s.downlink, s.able) for index, s in enumerate(sites)]


SITES = st.lists(KNOWN, min_size=1, max_size=6).map(named)
ANY_SITES = st.lists(ANY, min_size=1, max_size=6).map(named)


def links(
    sites: Sequence[Site], nbytes: int, out_nbytes: int, coordinator: Site | None
) -> list[tuple[str, int, int, Fraction]]:
    """Node, bytes without a share, more of them with all of it, and rate of every link, from the formulas."""
    count = len(sites)
    found = []
    for site in sites:
        up = (site.node, nbytes, out_nbytes * (count - 1) - nbytes, Fraction(site.uplink or 0))
        down = (site.node, out_nbytes, nbytes * (count - 1) - out_nbytes, Fraction(site.downlink or 0))
        found += [up, down]
    if coordinator is not None:
        found.append((coordinator.node, 0, out_nbytes * count, Fraction(coordinator.uplink or 0)))
        found.append((coordinator.node, 0, nbytes * count, Fraction(coordinator.downlink or 0)))
    return found


def slowest(
    fractions: dict[str, Fraction],
    sites: Sequence[Site],
    nbytes: int,
    out_nbytes: int,
    coordinator: Site | None,
) -> Fraction:
    everything = links(sites, nbytes, out_nbytes, coordinator)
    return max((base + slope * fractions[node]) / rate for node, base, slope, rate in everything)


# ----------------------------------------------------------------------------------------------------- shares


@FEW
@given(SITES, NBYTES, NBYTES, COORDINATOR)
@example([Site("node-0", 1.0, 1.0), Site("node-1", 1e3, 1e3)], 100, 10, None)
@example([Site("node-0", 1.0, 1.0), Site("node-1", 1e3, 1e3)], 10, 100, None)
@example([Site("node-0", 1.0, 9.0), Site("node-1", 1.0, 9.0)], 100, 10, None)
@example([Site("node-0", 1.0, 1.0)], 10, 20, Site("hub", 1.0, 1.0))
def test_no_shares_are_faster(
    sites: list[Site], nbytes: int, out_nbytes: int, coordinator: Site | None
) -> None:
    found = shares(sites, nbytes, out_nbytes, coordinator)
    assert list(found.fractions) == [site.node for site in sites] + ["hub"] * (coordinator is not None)
    if not any(site.able for site in sites):
        assert not any(found.fractions.values()) and found.seconds is None and found.reason == NOBODY
        return
    assert sum(found.fractions.values()) == 1 and min(found.fractions.values()) >= 0
    assert not any(found.fractions[site.node] for site in sites if not site.able)
    exact = slowest(found.fractions, sites, nbytes, out_nbytes, coordinator)
    assert found.seconds == float(exact)

    everything = links(sites, nbytes, out_nbytes, coordinator)
    place = {node: index for index, node in enumerate(found.fractions)}
    rows = np.zeros((len(everything), len(place) + 1))
    for row, (node, _, slope, rate) in zip(rows, everything, strict=True):
        row[place[node]], row[-1] = slope / rate, -1.0
    able = [site.able for site in sites] + [True] * (coordinator is not None)
    program = linprog(
        [0.0] * len(place) + [1.0],
        A_ub=rows,
        b_ub=[-float(base / rate) for _, base, _, rate in everything],
        A_eq=[[1.0] * len(place) + [0.0]],
        b_eq=[1.0],
        bounds=[(0.0, 1.0 if one else 0.0) for one in able] + [(0.0, None)],
    )
    assert program.status == 0
    assert found.seconds == pytest.approx(program.fun, rel=1e-6, abs=1e-6)


@FEW
@given(SITES, NBYTES, NBYTES, COORDINATOR)
def test_no_shares_as_fast_are_more_equal(
    sites: list[Site], nbytes: int, out_nbytes: int, coordinator: Site | None
) -> None:
    fractions = shares(sites, nbytes, out_nbytes, coordinator).fractions
    everything = links(sites, nbytes, out_nbytes, coordinator)
    seconds = slowest(fractions, sites, nbytes, out_nbytes, coordinator)
    full = {
        (node, slope > 0)
        for node, base, slope, rate in everything
        if slope and base + slope * fractions[node] == seconds * rate
    }
    able = [site.node for site in sites if site.able]
    for more, less in itertools.permutations(able, 2):
        if fractions[more] > fractions[less]:  # the one cannot give, or the other one cannot take
            assert (more, False) in full or (less, True) in full


@FEW
@given(SITES.filter(lambda sites: any(site.able for site in sites)), NBYTES, NBYTES, COORDINATOR)
def test_the_coordinator_takes_a_share_only_where_that_saves_time(
    sites: list[Site], nbytes: int, out_nbytes: int, coordinator: Site | None
) -> None:
    alone = shares(sites, nbytes, out_nbytes)
    found = shares(sites, nbytes, out_nbytes, coordinator)
    before = slowest(alone.fractions, sites, nbytes, out_nbytes, None)
    after = slowest(found.fractions, sites, nbytes, out_nbytes, coordinator)
    assert after <= before
    assert (found.fractions.get("hub", 0) > 0) == (after < before)


@FEW
@given(ANY_SITES, st.floats(0.01, 100.0))
def test_unknown_links_count_as_the_median(sites: list[Site], factor: float) -> None:
    ups = [site.uplink for site in sites if site.uplink is not None]
    downs = [site.downlink for site in sites if site.downlink is not None]
    up, down = (float(np.median(known)) if known else factor for known in (ups or downs, downs or ups))
    filled = [Site(s.node, s.uplink or up, s.downlink or down, s.able) for s in sites]
    found, expected = shares(sites, 1000, 900), shares(filled, 1000, 900)
    assert found.fractions == expected.fractions
    assert found.seconds == (expected.seconds if ups or downs else None)


@pytest.mark.parametrize("count", range(1, 12))
def test_equal_links_have_equal_shares(count: int) -> None:
    for rate in (None, 3e6):
        sites = [Site(f"node-{index}", rate, rate) for index in range(count)]
        found = shares(sites, 1000, 1000)
        assert set(found.fractions.values()) == {Fraction(1, count)}
        if rate is None:
            assert found.seconds is None
        else:
            assert found.seconds == pytest.approx(2000 * (count - 1) / count / rate)


def test_a_slow_uplink_has_a_small_share_or_none() -> None:
    def slow(uplink: float) -> dict[str, Fraction]:
        sites = [Site(name, 100.0, 100.0) for name in ("a", "b", "c")]
        return shares([*sites, Site("slow", uplink, 100.0)], 300, 300).fractions

    assert slow(90.0)["slow"] < Fraction(1, 4)
    assert slow(90.0)["slow"] > slow(70.0)["slow"] > 0
    assert slow(10.0) == {"a": Fraction(1, 3), "b": Fraction(1, 3), "c": Fraction(1, 3), "slow": 0}


def test_reasons_name_the_slowest_link() -> None:
    sites = [Site("a", 10.0, 10.0), Site("b", 1.0, 10.0), Site("c")]
    assert shares(sites, 100, 100).reason == (
        "2 reduce for 3 members; the slowest link is the uplink of b; "
        "links of 1 are not known and taken for the median"
    )
    assert shares([Site("a"), Site("b")], 100, 100).reason == (
        "2 reduce for 2 members; no link is known, all are taken for equal"
    )


def test_a_coordinator_whose_links_are_not_known_reduces_nothing() -> None:
    sites = [Site("a", 1.0, 1.0), Site("b", 1.0, 1.0), Site("c", 1.0, 1.0)]
    for hub in (Site("hub"), Site("hub", 1e9), Site("hub", 1e9, 1e9, able=False)):
        assert "hub" not in shares(sites, 100, 100, hub).fractions
    assert shares(sites, 100, 100, Site("hub", 1e9, 1e9)).fractions["hub"] > 0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_rates_that_are_none(rate: float) -> None:
    with pytest.raises(ValueError, match="a: its uplink"):
        Site("a", rate)
    with pytest.raises(ValueError, match="a: its downlink"):
        Site("a", None, rate)


def test_what_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="have one name"):
        shares([Site("a"), Site("a")], 1, 1)
    with pytest.raises(ValueError, match="nothing to share"):
        shares([Site("a")], 0, 1)
    assert shares([], 1, 1).reason == NOBODY


# ----------------------------------------------------------------------------------------------------- slices


def check(found: Plan, table: BucketTable, sites: Sequence[Site], coordinator: Site | None) -> None:
    """The slices are whole units, without gaps, in the order of the sites."""
    bounds = {(unit.end, unit.out_end) for unit in units(table, slice_pieces(table))}
    cuts = [(one.slice.start, one.slice.out_start) for one in found.slices]
    ends = [(one.slice.end, one.slice.out_end) for one in found.slices]
    assert [*cuts, (table.nbytes, table.result_nbytes)] == [(0, 0), *ends]
    assert set(ends) <= bounds and all(one.slice.out_nbytes for one in found.slices)
    order = [site.node for site in sites if site.able] + ["hub"] * (coordinator is not None)
    assert [one.reducer for one in found.slices] == [
        node for node in order if node in {one.reducer for one in found.slices}
    ]


def seconds_of(found: Plan, sites: Sequence[Site], coordinator: Site | None = None) -> Fraction:
    """Of the slowest link, counted from the slices themselves."""
    nbytes = sum(one.slice.nbytes for one in found.slices)
    out_nbytes = sum(one.slice.out_nbytes for one in found.slices)
    times = []
    for site in [*sites, coordinator] if coordinator else sites:
        own = [one.slice for one in found.slices if one.reducer == site.node]
        took, made = sum(part.nbytes for part in own), sum(part.out_nbytes for part in own)
        up, down = made * len(sites), took * len(sites)
        if site is not coordinator:  # its own contribution and result do not travel to itself
            up, down = up - made + nbytes - took, down - took + out_nbytes - made
        times += [Fraction(up) / Fraction(site.uplink or 1), Fraction(down) / Fraction(site.downlink or 1)]
    return max(times)


@pytest.mark.parametrize("name", TABLES)
@FEW
@given(sites=SITES, coordinator=COORDINATOR)
def test_slices_cover_the_table_by_shares(name: str, sites: list[Site], coordinator: Site | None) -> None:
    table = TABLES[name]
    found = plan(table, sites, coordinator)
    best = shares(sites, table.nbytes, table.result_nbytes, coordinator)
    assert found.reason == best.reason
    if not any(site.able for site in sites):
        assert found == Plan((), None, NOBODY)
        return
    check(found, table, sites, coordinator)
    assert found.seconds == float(seconds_of(found, sites, coordinator))
    largest = max(
        Fraction(unit.nbytes, table.nbytes) + Fraction(unit.out_nbytes, table.result_nbytes)
        for unit in units(table, slice_pieces(table))
    )
    for node, fraction in best.fractions.items():
        own = [one.slice for one in found.slices if one.reducer == node]
        share = sum(
            Fraction(part.nbytes, table.nbytes) + Fraction(part.out_nbytes, table.result_nbytes)
            for part in own
        )
        assert abs(share - 2 * fraction) <= largest
    assert plan(table, sites, coordinator) == found


@pytest.mark.parametrize("count", range(2, 9))
def test_bytes_of_a_node_with_equal_links(count: int) -> None:
    """``2 (M - 1) / M * P / 8`` in each direction, but for the rounding of a slice to units."""
    lines = 20_000
    table = voted_table(lines)
    sites = [Site(f"node-{index}") for index in range(count)]
    found = plan(table, sites)
    parameters = 512 * lines
    unit = max(unit.nbytes for unit in units(table, slice_pieces(table)))
    assert [one.reducer for one in found.slices] == [site.node for site in sites]
    for one in found.slices:
        sent = table.nbytes - one.slice.nbytes + one.slice.out_nbytes * (count - 1)
        received = table.result_nbytes - one.slice.out_nbytes + one.slice.nbytes * (count - 1)
        expected = 2 * (count - 1) / count * parameters / 8
        assert sent == pytest.approx(expected, abs=(count - 2) * unit)
        assert received == pytest.approx(expected, abs=(count - 2) * unit)
        assert sent == pytest.approx(expected, rel=0.02)


def test_every_table_of_a_run_has_a_plan() -> None:
    tables = schedule(*TABLES.values())
    sites = [Site("a", 1.0, 1.0), Site("b", 2.0, 2.0), Site("c", able=False)]
    assert plan_all(tables, sites) == tuple(plan(table, sites) for table in tables.tables)


def test_new_links_cut_anew_only_where_it_saves_time() -> None:
    table = TABLES["votes"]
    sites = [Site(name, 10.0, 10.0) for name in "abcd"]
    old = plan(table, sites).slices
    slower = [*sites[:3], Site("d", 9.9, 10.0)]
    kept = renewed(table, old, slower)
    assert kept.slices == old and kept.seconds == float(seconds_of(kept, slower))
    slow = [*sites[:3], Site("d", 8.0, 10.0)]
    fresh = renewed(table, old, slow)
    assert fresh == plan(table, slow) and len(fresh.slices) == len(old)
    assert seconds_of(fresh, slow) < (1 - GAIN) * seconds_of(Plan(old, None, ""), slow)
    gone = [*sites[:3], Site("d", 10.0, 10.0, able=False)]
    assert renewed(table, old, gone) == plan(table, gone)
    joined = [*sites, Site("e", 10.0, 10.0)]
    assert renewed(table, old, joined) == plan(table, joined)
    guest = [*sites, Site("e", 10.0, 10.0, able=False)]
    assert renewed(table, old, guest).slices == old
    nobody = [Site(name, able=False) for name in "abcd"]
    assert renewed(table, old, nobody) == Plan((), None, NOBODY)


# --------------------------------------------------------------------------------------------- changing hands


@FEW
@given(data=st.data(), sites=SITES, coordinator=COORDINATOR)
def test_only_slices_that_have_to_move_do(
    data: st.DataObject, sites: list[Site], coordinator: Site | None
) -> None:
    assigned = plan(TABLES["votes"], sites, coordinator).slices
    if not assigned:
        return
    away = data.draw(st.sets(st.sampled_from([site.node for site in sites])))
    left = data.draw(st.sets(st.sampled_from([site.node for site in sites]), max_size=len(sites) - 1))
    present = [site for site in sites if site.node not in left]
    found = moved(assigned, away, present, coordinator)
    able = {site.node for site in present if site.able and site.node not in away}
    able |= {"hub"} if coordinator else set()
    if not able and any(one.reducer in away | left for one in assigned):
        assert not found.slices and found.seconds is None and "nobody else" in found.reason
        return
    assert [one.slice for one in found.slices] == [one.slice for one in assigned]
    for before, after in zip(assigned, found.slices, strict=True):
        stays = before.reducer not in away | left
        assert after.reducer == before.reducer if stays else after.reducer in able
        assert stays or f"{after.reducer} reduces" in found.reason
    assert found.seconds == float(seconds_of(found, present, coordinator))


@FEW
@given(st.lists(KNOWN, min_size=2, max_size=6).map(named), COORDINATOR)
def test_a_slice_goes_where_the_round_is_done_soonest(sites: list[Site], coordinator: Site | None) -> None:
    sites[0] = Site("node-0", 500.0, 500.0)
    assigned = plan(TABLES["votes"], sites, coordinator).slices
    moving = assigned[0].reducer
    found = moved(assigned, [moving], sites, coordinator)
    able = [site.node for site in sites if site.able and site.node != moving]
    able += ["hub"] if coordinator and moving != "hub" else []
    times = {
        node: seconds_of(
            Plan((Assigned(assigned[0].slice, node), *assigned[1:]), None, ""), sites, coordinator
        )
        for node in able
    }
    if not able:
        assert not found.slices
        return
    taker = found.slices[0].reducer
    assert times[taker] == min(times.values())
    assert taker != "hub" or all(times[node] > times["hub"] for node in able if node != "hub")


def test_a_node_with_several_slices_gives_them_to_several() -> None:
    sites = [Site(name, 10.0, 10.0) for name in "abcde"]
    assigned = [Assigned(Slice(100 * i, 100 * i + 100, 100 * i, 100 * i + 100), "a") for i in range(4)]
    found = moved(assigned, ["a"], sites)
    assert [one.reducer for one in found.slices] == ["b", "c", "d", "e"]
    assert found.reason.startswith("b reduces 100 bytes instead of a; c reduces")
    assert moved(assigned, ["b"], sites).reason == "all reducers stay"
    assert moved(assigned, "abcde", sites) == Plan(
        (), None, "nobody else can be reached who could reduce for a"
    )
    with pytest.raises(ValueError, match="nothing to share"):
        moved([], ["a"], sites)
