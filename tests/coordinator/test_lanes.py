"""Islands in a run: a contribution in lanes, the result in lanes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.active_round import MAX_BROKEN_STREAMS
from coordinator.exchange import Exchange
from protos.wire import payload_digest
from tests.coordinator.contribution_rig import (
    Download,
    abstain_frames,
    contribution_frames,
    lane_frames,
    mixed_table,
    random_payload,
)
from tests.coordinator.coordinator_rig import Site, soon
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

# ------------------------------------------------------------------------------------------- any lanes


@st.composite
def streams_of_a_node(draw: st.DrawFn) -> list[tuple[int, ...]] | None:
    """One stream of everything, or a partition of the buckets; some of its lanes may be empty."""
    if draw(st.booleans()):
        return None
    ranks = draw(st.integers(1, 4))
    owners = [draw(st.integers(0, ranks - 1)) for _ in EVERYTHING]
    return [tuple(i for i in EVERYTHING if owners[i] == rank) for rank in range(ranks)]


@settings(max_examples=25, deadline=None)
@given(
    nodes=st.lists(streams_of_a_node(), min_size=2, max_size=4),
    chunk=st.integers(16, 900),
    piece=st.sampled_from([64, 256, 1 << 20]),
    data=st.data(),
)
async def test_any_lanes_in_any_order_give_the_same_result(
    nodes: list[list[tuple[int, ...]] | None], chunk: int, piece: int, data: st.DataObject
) -> None:
    site = island_site(len(nodes), piece=piece)
    orders = await site.opened()
    payloads = {i: random_payload(i, TABLE) for i in range(len(nodes))}
    uploads: list[tuple[int, Sequence[int] | None, Exchange, list[bytes], int]] = []

    def begin(i: int, lane: Sequence[int] | None, breaks: int) -> None:
        frames = (
            contribution_frames(orders[i], TABLE, payloads[i], chunk=chunk)
            if lane is None
            else lane_frames(orders[i], TABLE, payloads[i], lane, chunk=chunk)
        )
        uploads.append((i, lane, site.hub.open_exchange(site.nodes[i].node), frames, breaks))

    for i, lanes in enumerate(nodes):
        for lane in [None] if lanes is None else lanes:
            begin(i, lane, 0)
    downloads: list[tuple[int, Sequence[int] | None, Download]] = []
    reading = []

    async def read(i: int, lane: Sequence[int] | None, exchange: Exchange) -> None:
        download = Download(TABLE.result_nbytes)
        while (frame := await soon(exchange.next_frame())) is not None:
            download.add(frame)
        downloads.append((i, lane, download))

    while uploads:
        place = data.draw(st.integers(0, len(uploads) - 1))
        i, lane, exchange, frames, breaks = uploads[place]
        begun = exchange.result is not None
        if begun and breaks + 1 < MAX_BROKEN_STREAMS and data.draw(st.integers(0, 9)) == 0:
            del uploads[place]
            exchange.broke()
            begin(i, lane, breaks + 1)
            continue
        for frame in frames[: data.draw(st.integers(1, 4))]:
            exchange.feed(frame)
            frames.pop(0)
        assert exchange.refusal is None
        if not frames:
            del uploads[place]
            reading.append(asyncio.ensure_future(read(i, lane, exchange)))
        if data.draw(st.booleans()):
            await asyncio.sleep(0)  # whoever reads goes on
    await asyncio.gather(*reading)

    result = reduced(site, orders, payloads)
    assert sum(1 if lanes is None else len(lanes) for lanes in nodes) == len(downloads)
    for i, lane, download in downloads:
        commit = download.commit
        assert commit is not None and commit.counted
        assert list(commit.voters) == [node.id for node in site.nodes]
        wanted = result if lane is None else lane_of(result, lane)
        assert bytes(download.payload[: download.received]) == wanted
        assert commit.nbytes == len(wanted)
        assert commit.payload_digest == (payload_digest(wanted) if wanted else "")
        assert commit.agreement == site.nodes[i].node.agreement
    assert [order.round for order in await site.opened()] == [1] * len(nodes)
    assert not {"bad-lane", "duplicate", "late"} & set(site.run.counters)


# ------------------------------------------------------------------------------------------- while it is made


async def test_lanes_stream_down_while_the_others_still_come_up() -> None:
    site = island_site(2, table=mixed_table(), piece=64)
    table, order = site.table, (await site.opened())[0]
    payloads = {i: random_payload(i, table) for i in range(2)}
    island, single = site.nodes
    first, rest = ((1,), (0, 2))  # the middle bucket; what surrounds it
    outer = lane_frames(order, table, payloads[0], rest, chunk=64)
    upper, lower = island.feed(*outer[:1]), send(island, order, payloads[0], first)
    single.send(order, payloads[1])
    active = site.run.active
    assert active is not None
    result = active.result
    assert result.frames == []  # the first byte is missing, though all of the middle has come
    upper.feed(outer[1])
    assert len(result.frames) == 1  # of the first and of the middle bucket
    download = Download(table.result_nbytes)
    download.add(await soon(lower.next_frame()))  # type: ignore[arg-type]
    assert download.received == table.buckets[1].result_nbytes and not result.committed
    for frame in outer[2:]:
        upper.feed(frame)
    assert result.committed
    expected = reduced(site, [order, order], payloads)
    assert (await collect(island, upper))[0] == lane_of(expected, rest, table)
    download.add(await soon(lower.next_frame()))  # type: ignore[arg-type]
    assert download.commit is not None and download.commit.counted
    assert bytes(download.payload[: download.received]) == lane_of(expected, first, table)


# ------------------------------------------------------------------------------------------- refusals


async def test_a_refused_lane_takes_its_node_out_of_the_round() -> None:
    site = island_site(2)
    orders = await site.opened()
    island, single = site.nodes
    payload = random_payload(0, TABLE)
    other = send(island, orders[0], payload, HALVES[0])
    frames = lane_frames(orders[0], TABLE, payload, HALVES[1])
    bad = island.feed(frames[0], frames[-1])
    assert bad.refusal is not None and bad.refusal.kind == "truncated"
    whole = single.send(orders[1], random_payload(1, TABLE))
    bytes_, commit = await collect(island, other)
    assert list(commit.voters) == ["node-1"] and not commit.counted and "refused: node-0" in commit.reason
    result = (await collect(single, whole))[0]
    assert bytes_ == lane_of(result, HALVES[0])
    # Only when all its lanes have been served does the island go on.
    await single.opened(1)
    assert island.node.position == 0 and not island.outbox._messages
    assert (await collect(island, fetch(island, orders[0], HALVES[1])))[0] == lane_of(result, HALVES[1])
    assert (await island.opened(1)).lease_count == 4
    assert site.run.counters == {"truncated": 1, "replaced-stream": 1}


@pytest.mark.parametrize("second", [(2, 3, 4), (0, 1, 2, 3, 4), (0,)])
async def test_a_bucket_in_two_lanes_is_refused(second: tuple[int, ...]) -> None:
    site = island_site(2)
    orders = await site.opened()
    send(site.nodes[0], orders[0], random_payload(0, TABLE), HALVES[0])
    clash = send(site.nodes[0], orders[0], random_payload(0, TABLE), second)
    assert clash.refusal is not None and clash.refusal.kind == "bad-lane"
    assert "is carried by another stream of this node" in clash.refusal.text
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    assert site.run.results.get(0).voters == ("node-1",)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        ({"buckets": [0, 9]}, "bad-lane"),
        ({"buckets": [2, 0]}, "bad-lane"),
        ({"part": False}, "bad-lane"),
        ({"epoch": 7}, "wrong-round"),
        ({"round": 7}, "wrong-round"),
        ({"table_digest": "other"}, "wrong-table"),
        ({"weight": 3}, "bad-weight"),
        ({"nbytes": 64}, "truncated"),
        ({"nbytes": 2**40}, "oversized"),
    ],
)
async def test_a_bad_header_of_a_lane(header: dict[str, object], kind: str) -> None:
    site = island_site(2)
    orders = await site.opened()
    values = {"part": True, "buckets": [0, 2], **header}
    part = b"".join(random_payload(0, TABLE)[TABLE.offsets[i] :][: TABLE.buckets[i].nbytes] for i in (0, 2))
    bad = site.nodes[0].feed(*contribution_frames(orders[0], TABLE, part, **values))
    assert bad.refusal is not None and bad.refusal.kind == kind
    assert site.run.counters == {kind: 1}
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    assert site.run.results.get(0).voters == ("node-1",)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- abstentions


@pytest.mark.parametrize("when", ["first", "between", "last"])
async def test_one_lane_that_abstains_speaks_for_its_node(when: str) -> None:
    site = island_site(2)
    orders = await site.opened()
    island, single = site.nodes
    payload = random_payload(0, TABLE)
    order = orders[0]
    silent = (1,)
    lanes = [(0,), (2, 3, 4)]
    lanes.insert({"first": 0, "between": 1, "last": 2}[when], silent)
    exchanges = [
        island.feed(*abstain_frames(order, "loss is nan", part=True, buckets=lane))
        if lane == silent
        else send(island, order, payload, lane)
        for lane in lanes
    ]
    whole = single.send(orders[1], random_payload(1, TABLE))
    result, commit = await collect(single, whole)
    assert list(commit.voters) == ["node-1"] and "abstained: node-0" in commit.reason
    assert result == reduced(site, orders, {1: random_payload(1, TABLE)})
    for lane, exchange in zip(lanes, exchanges, strict=True):
        part, own = await collect(island, exchange)
        assert part == lane_of(result, lane) and not own.counted
    assert (island.node.abstained, island.node.missed) == (1, 1)
    assert (await island.opened(1)).lease_start == order.lease_start  # its samples came back


async def test_fetching_the_result_of_a_lane_that_has_arrived_is_no_abstention() -> None:
    site = island_site(1)
    island = site.nodes[0]
    order = await island.opened()
    payload = random_payload(0, TABLE)
    send(island, order, payload, HALVES[0]).broke()  # only after its END
    again = fetch(island, order, HALVES[0])
    last = send(island, order, payload, HALVES[1])
    result = reduced(site, [order], {0: payload})
    part, commit = await collect(island, again)
    assert part == lane_of(result, HALVES[0]) and commit.counted
    assert (await collect(island, last))[1].counted


async def test_a_round_without_voters_sends_nothing_to_lanes() -> None:
    site = island_site(1)
    order = await site.nodes[0].opened()
    exchanges = [fetch(site.nodes[0], order, lane) for lane in HALVES]
    for exchange in exchanges:
        part, commit = await collect(site.nodes[0], exchange)
        assert (part, commit.nbytes, list(commit.voters)) == (b"", 0, [])


# ------------------------------------------------------------------------------------------- nothing to carry


async def test_lanes_without_buckets_receive_the_commit_alone() -> None:
    site = island_site(1)
    island = site.nodes[0]
    order = await island.opened()
    payload = random_payload(0, TABLE)
    empty = [send(island, order, payload, ()) for _ in range(2)]  # of two ranks
    whole = send(island, order, payload, EVERYTHING)
    for exchange in empty:
        part, commit = await collect(island, exchange)
        assert (part, commit.nbytes, commit.payload_digest, commit.counted) == (b"", 0, "", True)
        assert list(commit.voters) == ["node-0"]
    assert (await collect(island, whole))[0] == reduced(site, [order], {0: payload})
    # One that comes after the commit finds the same, and is neither late nor a duplicate.
    assert (await collect(island, send(island, order, payload, ())))[1].counted
    assert not site.run.counters


async def test_a_round_does_not_wait_for_lanes_without_buckets() -> None:
    site = island_site(1)
    island = site.nodes[0]
    order = await island.opened()
    begun = island.feed(*lane_frames(order, TABLE, b"", ())[:1])
    send(island, order, random_payload(0, TABLE), EVERYTHING)
    assert site.run.round == 1
    await island.opened(1)
    assert (await collect(island, begun))[1].counted


async def test_a_lane_without_buckets_that_sends_some_is_refused() -> None:
    site = island_site(2)
    orders = await site.opened()
    header = contribution_frames(orders[0], TABLE, b"", part=True, nbytes=64)
    bad = site.nodes[0].feed(header[0])
    assert bad.refusal is not None and bad.refusal.kind == "oversized"
    site.nodes[1].send(orders[1], random_payload(1, TABLE))
    assert site.run.results.get(0).voters == ("node-1",)  # type: ignore[union-attr]


# ------------------------------------------------------------------------------------------- whole nodes


async def test_the_status_names_the_ranks() -> None:
    site = Site(nodes=3, present=0)
    for claim in ({}, {"ranks": 8}, {"ranks": 1}):
        site.add(**claim)
    assert [node.ranks for node in site.hub.status().nodes] == [1, 8, 1]


async def test_nodes_with_batches_of_their_own() -> None:
    """Leases of one round have the sizes that their nodes asked for; every sample is read once."""
    site = Site(nodes=3, present=0, rounds=9, table=TABLE, batch=4)
    batches = (4, 24, 1)
    for batch in (0, 24, 1):
        site.add(batch=batch)
    trained: list[int] = []
    for index in range(6):
        orders = await site.opened()
        leases = [range(order.lease_start, order.lease_start + order.lease_count) for order in orders]
        payloads = {i: random_payload(10 * index + i, TABLE) for i in range(3)}
        if index == 2:  # the large one has nothing to offer: its samples are handed out again
            del payloads[1]
        exchanges = [
            node.send(order, payloads[i]) if i in payloads else node.abstain(order)
            for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True))
        ]
        if index == 0:
            assert [len(lease) for lease in leases] == list(batches)
            expected = reduced(site, orders, payloads)
            assert (await collect(site.nodes[0], exchanges[0]))[0] == expected  # means weigh samples
        assert all(1 <= len(lease) <= batch for lease, batch in zip(leases, batches, strict=True))
        trained += [sample for i in payloads for sample in leases[i]]
    returned = [s for lease in site.run.leases.returned for s in range(lease.start, lease.end)]
    held = [s for lease in site.run.leases.held.values() for s in range(lease.start, lease.end)]
    assert sorted(trained + returned + held) == list(range(site.run.leases.frontier))
