"""Rounds whose slices travel between nodes: one result on all of them, by the bytes of the formula."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest

from node.exchange.filling import Filling
from optim.aggregate import ReducerMemory
from optim.slices import slice_pieces, units
from protos import atoll_pb2 as pb
from protos.buckets import Bucket, BucketTable
from tests.coordinator.contribution_rig import coded_table, random_payload, voted_table
from tests.node.peers.peer_rig import DEADLINE, Coordinator, Node, expected

MIXED = BucketTable(
    (
        Bucket.of("a", "majority", [("a", (70, 250))]),
        Bucket.of("b", "mean", [("b", (700,))]),
        Bucket.of("c", "majority", [("c", (9000,))]),
    )
)
TABLES = {"votes": voted_table(3000), "mixed": MIXED, "coded": coded_table()}

Test = Callable[[], Awaitable[None]]


def play(test: Test) -> None:
    asyncio.run(asyncio.wait_for(test(), DEADLINE))


def names(count: int) -> list[str]:
    return [f"node-{index}" for index in range(count)]


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_nodes_hold_the_result_of_one_reducer(table: BucketTable, count: int) -> None:
    async def test() -> None:
        run = Coordinator(table, names(count))
        run.plan(names(min(count, len(units(table, slice_pieces(table))))))
        memory = ReducerMemory()
        for index in range(2):
            order = run.open(names(count))
            payloads = {name: random_payload(10 * index + i, table) for i, name in enumerate(names(count))}
            commits = await asyncio.gather(
                *(run.nodes[name].reduce(order, payload) for name, payload in payloads.items())
            )
            result = expected(table, list(payloads.values()), order.round, memory)
            for name, commit in zip(names(count), commits, strict=True):
                assert commit.round == order.round and commit.counted
                assert bytes(run.nodes[name].into) == result
                kept = run.nodes[name].desk.shelf.get(order.round)
                assert kept is not None and kept.payload == result
        assert not run.messages("slice_trouble")
        assert all(not node.said for node in run.nodes.values())
        await run.close()

    play(test)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_bytes_are_those_of_the_formula(count: int) -> None:
    table = TABLES["votes"]

    async def test() -> None:
        run = Coordinator(table, names(count))
        run.plan(names(count))
        order = run.open(names(count))
        await asyncio.gather(
            *(node.reduce(order, random_payload(i, table)) for i, node in enumerate(run.nodes.values()))
        )
        for index, node in enumerate(run.nodes.values()):
            own = run.slices[index][0].nbytes
            due = (table.nbytes - own) + own * (count - 1)  # contributions to others, results to others
            assert due == pytest.approx(2 * (count - 1) / count * table.nbytes, rel=0.01)
            frames = 2 * (count - 1) * 5  # HEADER, END, and chunks of 256 KiB at most, of a slice
            for direction in ("up", "down"):
                counts = node.meter.counts()
                total = counts[direction, "contribution"] + counts[direction, "result"]
                assert due <= total <= due + frames * 21 + (count - 1) * 250
                assert counts[direction, "state"] == 0
        await run.close()

    play(test)


def test_slices_of_many_chunks_travel_from_node_to_node() -> None:
    table = voted_table(40_000)  # 2.5 MB

    async def test() -> None:
        run = Coordinator(table, names(3), ways=())
        await asyncio.gather(*(node.listen() for node in run.nodes.values()))
        run.plan(names(3))
        for _ in range(2):
            order = run.open(names(3))
            payloads = [random_payload(order.round * 3 + i, table) for i in range(3)]
            await asyncio.gather(
                *(node.reduce(order, payloads[i]) for i, node in enumerate(run.nodes.values()))
            )
            result = expected(table, payloads, order.round)
            assert all(bytes(node.into) == result for node in run.nodes.values())
        for node in run.nodes.values():
            counts = node.meter.counts()
            for direction in ("up", "down"):
                total = counts[direction, "contribution"] + counts[direction, "result"]
                assert total == pytest.approx(2 * 2 * 2 / 3 * table.nbytes, rel=0.01)
        counted = {
            (name, peer, direction): nbytes
            for name, node in run.nodes.items()
            for peer, direction, _, nbytes in node.meter.traffic.counts()
        }
        for name, other in itertools.permutations(run.nodes, 2):
            sent = counted[name, other, "sent"]
            assert (
                sent == counted[other, name, "received"] == pytest.approx(2 * 2 / 3 * table.nbytes, rel=0.01)
            )
            assert run.nodes[name].rounds.ways == {"direct": 2}
        assert not run.messages("slice_trouble") and not any(node.said for node in run.nodes.values())
        await run.close()

    play(test)


def test_a_payload_that_is_still_being_written_travels_meanwhile() -> None:
    table = TABLES["votes"]

    async def test() -> None:
        run = Coordinator(table, names(2))
        run.plan(names(2))
        order = run.open(names(2))
        mine, theirs = random_payload(1, table), random_payload(2, table)
        payload, filling, sent = bytearray(len(mine)), Filling(len(mine)), asyncio.Event()
        slow, quick = run.nodes["node-0"], run.nodes["node-1"]
        work = asyncio.ensure_future(slow.reduce(order, payload, filling, on_sent=sent.set))
        other = asyncio.ensure_future(quick.reduce(order, theirs))
        half = len(mine) * 15 // 16 // 64 * 64
        payload[:half] = mine[:half]
        filling.advance(half)
        carrier = slow.carriers[0]
        while not carrier.opened or carrier.opened[0][1].written_bytes < half - run.slices[0][0].end:
            await asyncio.sleep(0)
        assert not sent.is_set() and not run.digests
        payload[half:] = mine[half:]
        filling.finish(True)
        await asyncio.gather(work, other)
        assert sent.is_set()
        assert bytes(slow.into) == bytes(quick.into) == expected(table, [mine, theirs])
        await run.close()

    play(test)


def test_a_payload_that_comes_to_nothing_is_an_abstention() -> None:
    table = TABLES["mixed"]

    async def test() -> None:
        run = Coordinator(table, names(3))
        run.plan(names(3))
        order = run.open(names(3))
        payloads = [random_payload(i, table) for i in range(3)]
        filling = Filling(table.nbytes)
        tasks = [
            asyncio.ensure_future(node.reduce(order, payloads[i], filling if not i else None))
            for i, node in enumerate(run.nodes.values())
        ]
        filling.advance(table.nbytes // 2)
        await asyncio.sleep(0)
        filling.finish(False, "a gradient is not finite")
        while not run.messages("abstention"):
            await asyncio.sleep(0)
        ((name, abstention),) = run.messages("abstention")
        assert (name, abstention.round, abstention.reason) == ("node-0", 0, "a gradient is not finite")
        run.expect(names(3)[1:])
        commits = await asyncio.gather(*tasks)
        assert [commit.counted for commit in commits] == [False, True, True]
        result = expected(table, payloads[1:])
        assert all(bytes(node.into) == result for node in run.nodes.values())
        await run.close()

    play(test)


def test_an_abstaining_node_reduces_and_fetches() -> None:
    table = TABLES["votes"]

    async def test() -> None:
        run = Coordinator(table, names(3))
        run.plan(names(3))
        order = run.open(names(3)[:2])
        payloads = [random_payload(i, table) for i in range(2)]
        nodes = list(run.nodes.values())
        await asyncio.gather(
            nodes[0].reduce(order, payloads[0]),
            nodes[1].reduce(order, payloads[1]),
            nodes[2].reduce(order, None, reason="no data"),
        )
        ((name, abstention),) = run.messages("abstention")
        assert (name, abstention.reason) == ("node-2", "no data")
        result = expected(table, payloads)
        assert all(bytes(node.into) == result for node in nodes)
        assert {name for name, _ in run.messages("holding")} == {"node-0", "node-1"}
        await run.close()

    play(test)


def test_a_contribution_that_a_reducer_refuses_is_withdrawn_everywhere() -> None:
    table = TABLES["mixed"]

    async def test() -> None:
        run = Coordinator(table, names(2))
        run.plan(names(2))
        order = run.open(names(2))
        payloads = [bytearray(random_payload(i, table)) for i in range(2)]
        start = table.offsets[1]
        payloads[1][start : start + 4] = b"\x00\x00\xc0\x7f"  # NaN
        tasks = [
            asyncio.ensure_future(node.reduce(order, payloads[i]))
            for i, node in enumerate(run.nodes.values())
        ]
        while not run.messages("abstention"):
            await asyncio.sleep(0)
        ((name, abstention),) = run.messages("abstention")
        assert name == "node-1" and "not finite" in abstention.reason
        run.expect(["node-0"])
        commits = await asyncio.gather(*tasks)
        assert [commit.counted for commit in commits] == [True, False]
        result = expected(table, [bytes(payloads[0])])
        assert all(bytes(node.into) == result for node in run.nodes.values())
        await run.close()

    play(test)


def test_a_round_without_voters_has_no_result() -> None:
    table = TABLES["mixed"]

    async def test() -> None:
        run = Coordinator(table, names(2))
        run.plan(names(2))
        order = run.open(names(2))
        tasks = [asyncio.ensure_future(node.reduce(order, None, reason="x")) for node in run.nodes.values()]
        while len(run.messages("abstention")) < 2:
            await asyncio.sleep(0)
        run.voters, run.slices = [], []
        run.commit()
        commits = await asyncio.gather(*tasks)
        assert all(not commit.slices and not commit.voters for commit in commits)
        assert run.nodes["node-0"].desk.shelf.get(0) is None
        await run.close()

    play(test)


def test_a_commit_that_came_before_the_payload_is_enough() -> None:
    table = TABLES["votes"]

    async def test() -> None:
        run = Coordinator(table, names(3))
        run.plan(names(3)[:2])
        order = run.open(names(3)[:2])
        payloads = [random_payload(i, table) for i in range(3)]
        nodes = list(run.nodes.values())
        await asyncio.gather(*(node.reduce(order, payloads[i]) for i, node in enumerate(nodes[:2])))
        assert nodes[2].rounds.decided(0)
        commit = await nodes[2].reduce(order, payloads[2])
        assert not commit.counted and bytes(nodes[2].into) == expected(table, payloads[:2])
        assert not run.messages("abstention")
        await run.close()

    play(test)


def test_a_topology_without_slices_is_of_later_rounds() -> None:
    table = TABLES["votes"]

    async def test() -> None:
        run = Coordinator(table, names(2))

        def without_slices(node: Node) -> None:
            run.number += 1
            topology = run.topology(node.node)
            del topology.tables[:]
            run.say(node, pb.CoordinatorMessage(topology=topology))

        for node in run.nodes.values():
            without_slices(node)
        run.plan(names(2))
        order = run.open(names(2))
        payloads = [random_payload(i, table) for i in range(2)]
        quick, cut_off = run.nodes.values()
        run.hold_back = True
        works = [
            asyncio.ensure_future(node.reduce(order, payload))
            for node, payload in zip(run.nodes.values(), payloads, strict=True)
        ]
        while len(run.holding) < 2:
            await asyncio.sleep(0)
        run.deaf.add(cut_off.node)
        run.commit()
        await works[0]
        run.deaf.clear()
        without_slices(cut_off)
        await asyncio.sleep(0)
        run.say(cut_off, pb.CoordinatorMessage(committed=run.commits[-1]))
        assert (await works[1]).round == order.round
        assert bytes(cut_off.into) == bytes(quick.into) == expected(table, payloads, order.round)
        await run.close()

    play(test)
