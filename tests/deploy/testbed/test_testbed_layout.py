from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.errors import UserError
from deploy.links.shape import Shape
from deploy.testbed.layout import MOST_SITES, layout, parse_site, reshaped, site_names
from deploy.testbed.setting import Options, layout_of

SHAPE = Shape(rate=10**8, delay=0.04)


def test_sites_are_named_like_columns_of_a_sheet() -> None:
    names = site_names(200)
    assert names[:3] == ["site-a", "site-b", "site-c"]
    assert names[25:28] == ["site-z", "site-aa", "site-ab"]
    assert len(set(names)) == 200
    assert max(map(len, names)) <= 15, "Linux takes no longer names of interfaces"


@given(st.integers(1, MOST_SITES), st.booleans(), st.integers(1, 3))
def test_every_end_has_a_network_of_its_own(sites: int, nat: bool, nodes: int) -> None:
    bed = layout(sites, SHAPE, nat=nat, nodes_per_site=nodes)
    networks = [ipaddress.ip_interface(f"{link.addresses.end}/24").network for link in bed.links]
    insides = [link.addresses.inside for link in bed.links if link.addresses.inside]
    networks += [ipaddress.ip_interface(f"{host}/24").network for host, _ in insides]
    assert len(set(networks)) == len(networks) == sites * (1 + nat) + 2
    assert len(insides) == sites * nat
    for link in bed.links:
        assert (
            ipaddress.ip_address(link.addresses.router)
            in ipaddress.ip_interface(f"{link.addresses.end}/24").network
        )
    assert len({name for name, _ in bed.nodes}) == sites * nodes


def test_a_site_behind_nat_is_reached_at_its_own_address() -> None:
    (site,) = layout(1, SHAPE, nat=True).sites
    assert site.addresses.host == "10.91.1.2" and site.addresses.end == "10.90.1.2"


def test_nodes_of_a_site_share_its_link() -> None:
    bed = layout(2, SHAPE, nodes_per_site=2)
    assert [(name, link.name) for name, link in bed.nodes] == [
        ("site-a-1", "site-a"),
        ("site-a-2", "site-a"),
        ("site-b-1", "site-b"),
        ("site-b-2", "site-b"),
    ]
    assert [name for name, _ in layout(2, SHAPE).nodes] == ["site-a", "site-b"]


def test_the_coordinators_link_is_unlimited_unless_it_is_said() -> None:
    assert not layout(1, SHAPE).coordinator.shape
    assert layout(1, SHAPE, hub=Shape(rate=10**7)).coordinator.shape.rate == 10**7
    assert not layout(1, SHAPE, hub=Shape(rate=10**7)).operator.shape


def test_a_site_may_have_a_link_of_its_own() -> None:
    name, shape = parse_site("site-b=10mbit,loss=1%", SHAPE)
    bed = layout(3, SHAPE, own={name: shape})
    assert bed.link("site-b").shape == Shape(rate=10**7, delay=0.04, loss=0.01)
    assert bed.link("site-a").shape == SHAPE
    assert parse_site("site-b=delay=50ms", SHAPE)[1] == Shape(rate=10**8, delay=0.05)


@pytest.mark.parametrize("text", ["site-b", "site-b:10mbit", "=10mbit", "site-b=10mbit,fast", "x y=10mbit"])
def test_what_is_no_site_is_said_so(text: str) -> None:
    with pytest.raises(UserError, match="write for example site-b=100mbit"):
        parse_site(text, SHAPE)


def test_a_kind_of_nat_that_is_none_is_found_before_anything_is_made() -> None:
    with pytest.raises(UserError, match="--nat-kind cone: there are port-preserving and symmetric"):
        layout_of(Options(Path("out"), nat="cone"))
    assert all(site.addresses.inside for site in layout_of(Options(Path("out"), nat="symmetric")).sites)


def test_links_that_are_not_there_are_named() -> None:
    with pytest.raises(UserError, match=r"site-d.*there are site-a, site-b, site-c"):
        layout(3, SHAPE, own={"site-d": SHAPE})
    with pytest.raises(UserError, match="no link 'site-d': there are site-a, coordinator"):
        layout(1, SHAPE).link("site-d")
    with pytest.raises(UserError, match="from 1 to 200"):
        layout(0, SHAPE)


def test_a_shape_changes_only_where_it_is_said() -> None:
    assert reshaped(SHAPE, {"jitter": "5ms", "rate": ""}, "x") == Shape(10**8, 0.04, 0.005)
    assert reshaped(SHAPE, {"rate": "unlimited"}, "x") == Shape(None, 0.04)
    with pytest.raises(UserError, match=r"x: .*jitter"):
        reshaped(Shape(), {"jitter": "5ms"}, "x")
    with pytest.raises(UserError, match=r"x: .*'fast'"):
        reshaped(SHAPE, {"rate": "fast"}, "x")
