"""Streams of lanes that break, come late or again, or are open as their node departs."""

from __future__ import annotations

import pytest

from coordinator.active_round import MAX_BROKEN_STREAMS
from coordinator.rounds import Policy
from protos.refusal import Refused
from tests.coordinator.contribution_rig import Download, lane_frames, random_payload
from tests.coordinator.coordinator_rig import soon
from tests.coordinator.lane_rig import (
    EVERYTHING,
    HALVES,
    TABLE,
    collect,
    fetch,
    island_site,
    lane_of,
    reduced,
    send,
)

# ------------------------------------------------------------------------------------------- broken off


async def test_a_broken_lane_loses_its_part_and_may_be_sent_again() -> None:
    site = island_site(2, piece=64)
    orders = await site.opened()
    payload, other = random_payload(0, TABLE), random_payload(9, TABLE)
    island = site.nodes[0]
    kept = send(island, orders[0], payload, (1, 3, 4))
    lost = island.feed(*lane_frames(orders[0], TABLE, payload, (0, 2), chunk=64)[:3])
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    result = kept.result
    assert result is not None and result.frames
    download = Download(TABLE.result_nbytes)
    download.add(await soon(kept.next_frame()))  # type: ignore[arg-type]
    assert download.received  # of an attempt that is void soon
    lost.broke()
    assert (result.attempt, result.frames) == (1, [])
    again = send(island, orders[0], other, (0, 2))
    mixed = bytearray(payload)
    for i in (0, 2):
        place = slice(TABLE.offsets[i], TABLE.offsets[i] + TABLE.buckets[i].nbytes)
        mixed[place] = other[place]
    expected = reduced(site, orders, {0: bytes(mixed), 1: random_payload(1, TABLE)})
    while (frame := await soon(kept.next_frame())) is not None:
        download.add(frame)
    assert download.restarts == 1 and download.commit is not None and download.commit.counted
    assert bytes(download.payload[: download.received]) == lane_of(expected, (1, 3, 4))
    assert (await collect(island, again))[0] == lane_of(expected, (0, 2))
    assert site.run.counters == {"broken-stream": 1}


async def test_one_cut_of_all_lanes_is_one_break_of_each() -> None:
    site = island_site(1)
    order = await site.nodes[0].opened()
    payload = random_payload(0, TABLE)
    lanes = [(i,) for i in (0, 1, 2, 4)]
    for _ in range(MAX_BROKEN_STREAMS - 1):
        begun = [site.nodes[0].feed(*lane_frames(order, TABLE, payload, lane)[:1]) for lane in lanes]
        for exchange in begun:
            exchange.broke()
    for lane in [*lanes, (3,)]:
        exchange = send(site.nodes[0], order, payload, lane)
    assert (await collect(site.nodes[0], exchange))[1].counted


async def test_a_lane_that_keeps_breaking_is_not_waited_for() -> None:
    site = island_site(2)
    orders = await site.opened()
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    other = send(site.nodes[0], orders[0], random_payload(0, TABLE), (1, 2, 3, 4))
    for _ in range(MAX_BROKEN_STREAMS):
        assert site.run.round == 0
        site.nodes[0].feed(*lane_frames(orders[0], TABLE, random_payload(0, TABLE), (0,))[:1]).broke()
    commit = (await collect(site.nodes[0], other))[1]
    assert list(commit.voters) == ["node-1"] and "refused: node-0" in commit.reason


# ------------------------------------------------------------------------------------------- late and again


async def test_late_lanes_are_ignored_and_served_and_all_of_them_count_as_one_node() -> None:
    site = island_site(3, rounds=9)
    orders = await site.opened()
    island = site.nodes[0]
    payload = random_payload(0, TABLE)
    early = send(island, orders[0], payload, HALVES[0])
    for node, order in zip(site.nodes[1:], orders[1:], strict=True):
        node.send(order, random_payload(1, TABLE))
    site.idle(11.0)
    result = site.run.results.get(0)
    assert result is not None and result.voters == ("node-1", "node-2")
    assert (await collect(island, early))[1].counted is False
    assert island.node.state == "lagging" and island.node.position == 0
    late = send(island, orders[0], payload, HALVES[1])
    assert island.node.position == 1
    whole = reduced(site, orders, {1: random_payload(1, TABLE), 2: random_payload(1, TABLE)})
    assert (await collect(island, late))[0] == lane_of(whole, HALVES[1])
    assert site.run.counters == {"late": 1}
    assert (await island.opened(1)).lease_count == 4


async def test_a_lane_that_is_sent_twice_counts_once() -> None:
    site = island_site(2)
    orders = await site.opened()
    island = site.nodes[0]
    payload = random_payload(0, TABLE)
    first = send(island, orders[0], payload, HALVES[0])
    again = send(island, orders[0], random_payload(5, TABLE), HALVES[0])
    assert first.refusal is not None and first.refusal.code == "ABORTED"
    assert site.run.counters == {"replaced-stream": 1, "duplicate": 1}
    rest = send(island, orders[0], payload, HALVES[1])
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    expected = reduced(site, orders, {0: payload, 1: random_payload(1, TABLE)})
    for lane, exchange in zip(HALVES, (again, rest), strict=True):
        assert (await collect(island, exchange))[0] == lane_of(expected, lane)
    once_more = send(island, orders[0], payload, HALVES[1])  # from the ring
    assert (await collect(island, once_more))[0] == lane_of(expected, HALVES[1])
    assert site.run.counters["duplicate"] == 2


async def test_an_open_lane_is_replaced_by_the_same_lane() -> None:
    site = island_site(1)
    island = site.nodes[0]
    order = await island.opened()
    payload = random_payload(0, TABLE)
    frames = lane_frames(order, TABLE, payload, HALVES[0], chunk=64)
    old = island.feed(*frames[:2])
    other = island.feed(*lane_frames(order, TABLE, payload, HALVES[1])[:2])
    new = send(island, order, payload, HALVES[0])
    assert old.refusal is not None and other.refusal is None
    old.feed(frames[2])  # still under way
    assert island.node.exchanges == [other, new]
    other.feed(lane_frames(order, TABLE, payload, HALVES[1])[-1])
    assert (await collect(island, new))[1].counted


async def test_islands_catch_up_from_the_ring_in_lanes() -> None:
    site = island_site(2, rounds=9, policy=Policy(10.0, 60.0, 0.5))
    orders = await site.opened()
    results = []
    for index in range(3):
        order = orders[1] if index == 0 else await site.nodes[1].opened(index)
        whole = site.nodes[1].send(order, random_payload(index, TABLE))
        if site.run.round == index:
            site.idle(10.0)
        results.append((await collect(site.nodes[1], whole))[0])
    island = site.nodes[0]
    order = orders[0]
    for index, result in enumerate(results):
        assert order.round == index and (index == 0 or order.result_ready)
        for lane in HALVES:
            assert island.node.position == index
            assert (await collect(island, fetch(island, order, lane)))[0] == lane_of(result, lane)
        order = await island.opened(index + 1)
    assert not order.result_ready


async def test_what_is_left_of_an_earlier_round_gives_way() -> None:
    site = island_site(1, rounds=9)
    island = site.nodes[0]
    order = await island.opened()
    stale = [send(island, order, random_payload(0, TABLE), lane) for lane in HALVES]
    order = await island.opened(1)
    fresh = send(island, order, random_payload(0, TABLE), (0,))
    assert all(exchange.refusal is not None for exchange in stale)
    assert island.node.exchanges == [fresh]


async def test_a_stream_of_everything_replaces_all_lanes() -> None:
    site = island_site(1)
    island = site.nodes[0]
    order = await island.opened()
    payload = random_payload(0, TABLE)
    for lane in HALVES:
        island.feed(*lane_frames(order, TABLE, random_payload(4, TABLE), lane)[:2])
    whole = island.send(order, payload)
    assert (await collect(island, whole))[0] == reduced(site, [order], {0: payload})


async def test_open_streams_of_a_node_are_bounded_by_its_ranks() -> None:
    site = island_site(1)
    island = site.nodes[0]
    exchanges = [site.hub.open_exchange(island.node) for _ in range(9)]
    assert island.node.exchanges == exchanges[1:]
    assert exchanges[0].refusal is not None and site.run.counters["replaced-stream"] == 1


# ------------------------------------------------------------------------------------------- whole nodes


async def test_a_departure_ends_all_lanes() -> None:
    site = island_site(2)
    orders = await site.opened()
    island = site.nodes[0]
    payload = random_payload(0, TABLE)
    whole = send(island, orders[0], payload, HALVES[0])
    half = island.feed(*lane_frames(orders[0], TABLE, payload, HALVES[1])[:2])
    island.leave("interrupted by its user")
    for exchange in (whole, half):
        with pytest.raises(Refused, match="the session of node-0 has ended"):
            await soon(exchange.next_frame())
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    assert site.run.results.get(0).voters == ("node-1",)  # type: ignore[union-attr]


async def test_a_node_that_dies_after_all_its_lanes_have_arrived_counts() -> None:
    site = island_site(2)
    orders = await site.opened()
    for lane in HALVES:
        send(site.nodes[0], orders[0], random_payload(0, TABLE), lane)
    site.nodes[0].die()
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    assert site.run.results.get(0).voters == ("node-0", "node-1")  # type: ignore[union-attr]


async def test_each_lane_that_is_not_read_is_cut_off() -> None:
    site = island_site(1)
    order = await site.nodes[0].opened()
    exchanges = [send(site.nodes[0], order, random_payload(0, TABLE), (i,)) for i in EVERYTHING]
    await collect(site.nodes[0], exchanges[2])
    site.idle(61.0)
    assert site.run.counters["stalled"] == len(exchanges) - 1
    assert exchanges[2].refusal is None
