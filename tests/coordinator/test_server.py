"""Rounds over the gRPC server on loopback, against a client that can send anything."""

from __future__ import annotations

import asyncio

import grpc
import numpy as np
import pytest
import torch

from coordinator.rounds import Policy
from optim.aggregate import ReducerMemory
from optim.bits import tally
from optim.reduce import reduce_payloads
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import Bucket, BucketTable
from tests.coordinator.contribution_rig import (
    abstain_frames,
    contribution_frames,
    random_payload,
    schedule,
    slow_tally,
    voted_table,
)
from tests.coordinator.coordinator_rig import eventually, soon
from tests.coordinator.server_rig import LARGE, Client, ended, site


@pytest.mark.parametrize("nodes", [3, 4])
@pytest.mark.parametrize("table", [voted_table(), LARGE])
async def test_a_run(nodes: int, table: BucketTable) -> None:
    async with site(table, nodes=nodes, rounds=3) as here:
        clients = await here.clients(nodes)
        for index in range(3):
            downloads = await here.play(clients, seed=10 * index)
            votes = [np.frombuffer(random_payload(10 * index + i, table), np.uint8) for i in range(nodes)]
            expected = tally(votes, casting=index % nodes).tobytes()
            if table is not LARGE:
                assert expected == slow_tally(votes, casting=index % nodes).tobytes()
            for download in downloads:
                assert download.commit is not None
                assert bytes(download.payload) == expected
                assert download.commit.counted and len(download.commit.voters) == nodes
                assert 0.5 < download.commit.agreement <= 1.0
        for client in clients:
            order = await client.order()
            assert order is not None and order.stop.done
            await client.leave()
        await soon(here.hub.run.finished.wait())
        status = here.hub.status()
        assert (status.phase, status.state_digest, dict(status.counters)) == ("done", here.state.digest, {})
        # The transport's counters are the sizes of all messages.
        assert status.bytes_in == sum(client.sent for client in clients)
        assert status.bytes_out == sum(client.received for client in clients)
        assert sum(node.bytes_up for node in status.nodes) > 3 * nodes * table.nbytes


async def test_a_run_of_encoded_means_and_a_basis() -> None:
    """Buckets larger than a message, reduced on the pool's thread; results smaller than contributions."""
    table = BucketTable(
        (
            Bucket.of("votes", "majority", [("votes", (700, 900))]),
            Bucket.of("w", "mean", [("w", (1200, 1000))], codec="int8", result="int4"),
            Bucket.of("w/basis", "basis", [("optimizer/w/basis", (1000, 4))], source="w"),
            Bucket.of("[vectors]", "mean", [("v", (333,))]),
        )
    )
    memory = ReducerMemory()
    async with site(table, nodes=3, rounds=3) as here:
        clients = await here.clients(3)
        for index in range(3):
            downloads = await here.play(clients, seed=10 * index)
            payloads = [
                torch.frombuffer(bytearray(random_payload(10 * index + i, table)), dtype=torch.uint8)
                for i in range(3)
            ]
            expected = reduce_payloads(table, payloads, round_index=index, memory=memory)
            assert expected is not None
            for download in downloads:
                assert bytes(download.payload) == expected.numpy().tobytes()
        for client in clients:
            order = await client.order()
            assert order is not None and order.stop.done
            await client.leave()
        status = here.hub.status()
        assert (status.payload_bytes, status.result_bytes) == (table.nbytes, table.result_nbytes)
        assert not status.counters


async def test_an_island_and_a_node_of_one_process() -> None:
    """Lanes come on connections of their own and end apart; together they are one contribution."""
    table = BucketTable(tuple(Bucket.of(name, "majority", [(name, (10_240_000,))]) for name in "abcd"))
    lanes = ((0, 2), (1, 3), ())
    async with site(table, nodes=2, rounds=2) as here:
        leader, single = await Client(here).join(ranks=3), await Client(here).join()
        ranks = [leader, Client(here), Client(here)]
        for rank in ranks:
            rank.session = leader.session
        for index in range(2):
            orders = [await client.opened() for client in (leader, single)]
            payloads = [random_payload(10 * index + i, table) for i in range(2)]
            working = [
                rank.contribute(orders[0], payloads[0], lane) for rank, lane in zip(ranks, lanes, strict=True)
            ]
            whole, *parts = await asyncio.gather(single.contribute(orders[1], payloads[1]), *working)
            votes = [np.frombuffer(payload, np.uint8) for payload in payloads]
            expected = tally(votes, casting=index).tobytes()
            assert bytes(whole.payload) == expected
            for lane, part in zip(lanes, parts, strict=True):
                wanted = b"".join(expected[table.offsets[i] :][: table.buckets[i].nbytes] for i in lane)
                assert bytes(part.payload[: part.received]) == wanted
                assert part.commit is not None and part.commit.counted
                assert list(part.commit.voters) == ["node-0", "node-1"]
        clients = [*ranks, single]
        status = here.hub.status()
        assert not status.counters and status.phase == "done"
        assert {node.ranks for node in status.nodes} == {1, 3}
        up = {node.node: node.bytes_up for node in status.nodes}
        assert up["node-0"] == sum(rank.sent for rank in ranks) - leader.sent_before
        for client in (leader, single):
            order = await client.order()
            assert order is not None and order.stop.done
        for client in clients:
            await client.close()


async def test_status_and_get_run_for_anybody_with_the_token() -> None:
    async with site() as here:
        client = Client(here)
        run = await client.unary("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply)
        assert (run.run_file, run.table_digest) == ("[run]\n", schedule(here.table).digest)
        status = await client.unary("GetStatus", pb.StatusRequest(), pb.StatusReply)
        assert (status.phase, status.reason) == ("gathering", "0 of 3 nodes")
        assert (status.parameters, status.payload_bytes, status.result_bytes) == (
            here.table.elements,
            here.table.nbytes,
            here.table.nbytes,
        )
        await client.close()


async def test_a_slow_reader_holds_nobody_up() -> None:
    """One member does not read its results; the others go on, and it catches up later."""
    async with site(LARGE, nodes=3, rounds=9, policy=Policy(0.2, 0.2, 0.6)) as here:
        clients = await here.clients(3)
        slow, others = clients[0], clients[1:]
        order = await slow.opened()
        call = slow.exchange()
        await slow.write(call, contribution_frames(order, LARGE, random_payload(0, LARGE)))
        for _ in range(3):
            await here.play(others, seed=1)
        assert here.hub.run.round == 3
        download = await slow.read(call)
        assert download.commit is not None and download.commit.round == 0 and download.commit.counted
        for client in clients:
            await client.close()


async def test_a_reader_that_never_reads_is_cut_off() -> None:
    table = voted_table(lines=(16 << 20) // 64)  # more than the flow control of a stream lets through
    async with site(table, nodes=1, rounds=9, heartbeat=0.4, stall=2.0) as here:
        client = await Client(here).join()
        order = await client.opened()
        call = client.exchange()
        await client.write(call, contribution_frames(order, table, random_payload(0, table)))

        async def beat() -> None:
            while True:
                await client.say(heartbeat=pb.Heartbeat())
                await asyncio.sleep(0.1)

        beating = asyncio.ensure_future(beat())
        await eventually(lambda: here.hub.run.counters["stalled"] == 1, "the cut")
        assert (await ended(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert here.hub.run.registry.get(client.id) is not None
        again = client.exchange()  # the result is still there
        await client.write(again, abstain_frames(order, "fetching"))
        assert (await client.read(again)).commit.counted  # type: ignore[union-attr]
        beating.cancel()
        await client.close()


async def test_a_silent_member_is_dropped_at_the_deadline() -> None:
    async with site(nodes=3, rounds=9, policy=Policy(0.2, 5.0, 0.6)) as here:
        clients = await here.clients(3)
        downloads = await here.play(clients[:2])
        for download in downloads:
            assert download.commit is not None
            assert "node-2 sent nothing within the deadline of 0.2 s" in download.commit.reason
        order = await clients[2].opened()
        late = await clients[2].contribute(order, random_payload(2, here.table))
        assert late.commit is not None and not late.commit.counted
        assert late.payload == downloads[0].payload
        assert here.hub.run.counters["late"] == 1
        for client in clients:
            await client.close()


@pytest.mark.parametrize("table", [voted_table(), LARGE])
async def test_a_client_that_is_killed_in_mid_round(table: BucketTable) -> None:
    async with site(table, nodes=3, rounds=9) as here:
        clients = await here.clients(3)
        orders = [await client.opened() for client in clients]
        frames = contribution_frames(orders[2], table, random_payload(2, table), chunk=table.nbytes // 3)
        doomed = clients[2].exchange()
        await clients[2].write(doomed, frames[:3])
        working = [
            asyncio.ensure_future(client.contribute(order, random_payload(i, table)))
            for i, (client, order) in enumerate(zip(clients[:2], orders, strict=False))
        ]
        active = here.hub.run.active
        assert active is not None
        await eventually(
            lambda: sum(bool(m.lanes.received) for m in active.members.values()) == 3,
            "the arrival of all three",
        )
        await clients[2].close()
        downloads = [await soon(work) for work in working]
        votes = [np.frombuffer(random_payload(i, table), np.uint8) for i in range(2)]
        for download in downloads:
            assert download.commit is not None
            assert list(download.commit.voters) == ["node-0", "node-1"]
            assert bytes(download.payload) == tally(votes, casting=0).tobytes()
        assert (await clients[0].opened()).epoch == 2
        for client in clients[:2]:
            await client.close()


async def test_the_end_of_a_session_is_a_departure() -> None:
    async with site(nodes=2) as here:
        clients = await here.clients(2)
        await clients[0].opened()
        await soon(clients[0].stream.done_writing())
        await eventually(lambda: len(here.hub.run.registry.nodes) == 1, "the departure")
        for client in clients:
            await client.close()
        await eventually(lambda: not here.hub.run.registry.nodes, "the other departure")
        assert here.hub.run.phase == "gathering"
