"""States and results over the gRPC server: uploads and downloads of nodes that come and go."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from coordinator.pacing import Pacer
from protos import atoll_pb2 as pb
from tests.coordinator.contribution_rig import Download
from tests.coordinator.coordinator_rig import eventually, soon
from tests.coordinator.server_rig import Client, Site, code_of, ended, site
from tests.coordinator.state_rig import StateDownload


async def kept(here: Site, donor: Client) -> str:
    """Have a snapshot kept, without orders; returns its name. A round has been played."""
    snapshots = here.hub.run.snapshots
    ((_, order),) = snapshots.begin(1, here.state.nbytes, [donor.id])
    receipt = await donor.donate(order)
    assert receipt.count == order.count
    await eventually(lambda: bool(snapshots.kept), "the snapshot")
    return order.snapshot


async def test_a_snapshot_goes_up_in_parts_and_down_while_rounds_go_on() -> None:
    async with site(nodes=2, rounds=99) as here:
        old = await here.clients(2)
        await here.play(old)
        joiner = await Client(here).join(state_digest="another", round=1)
        await here.play(old)
        donations = [await client.ordered("donate") for client in old]
        assert [order.count for order in donations] == [12, 12]
        uploads = [
            asyncio.ensure_future(client.donate(order)) for client, order in zip(old, donations, strict=True)
        ]
        await here.play(old)
        assert [(await soon(upload)).count for upload in uploads] == [12, 12]
        order = await joiner.ordered("load_state")
        assert (order.snapshot, order.round) == (donations[0].snapshot, 2)
        call, download = joiner.get("GetChunks", pb.ChunksRequest(snapshot=order.snapshot)), StateDownload()
        nbytes = 0
        while isinstance(message := await soon(call.read()), bytes):
            download.add(message)
            nbytes += len(message)
        assert download.complete and download.data == here.state.data
        assert await soon(call.code()) is grpc.StatusCode.OK
        node = here.hub.run.registry.get(joiner.id)
        assert node is not None and nbytes <= node.bytes_out < nbytes + 1000
        await joiner.say(ready=pb.Ready(round=2, state_digest=here.state.digest))
        await here.play(old)
        assert list((await joiner.opened()).members) == ["node-0", "node-1", "node-2"]
        assert not here.hub.run.counters
        for client in (*old, joiner):
            await client.close()


async def test_a_newcomer_replays_what_it_has_missed() -> None:
    async with site(nodes=2, rounds=9) as here:
        old = await here.clients(2)
        played = [(await here.play(old, seed=10 * index))[0] for index in range(4)]
        joiner = await Client(here).join()
        order = await joiner.ordered("replay")
        assert (order.first, order.count) == (0, 4)
        call = joiner.get("GetResults", pb.ResultsRequest(first=0, count=4))
        for index, original in enumerate(played):
            download = Download(here.table.result_nbytes)
            while download.commit is None:
                download.add(await soon(call.read()))
            assert (download.commit.round, download.payload) == (index, original.payload)
        assert await soon(call.code()) is grpc.StatusCode.OK
        await joiner.say(ready=pb.Ready(round=4, state_digest=here.state.digest))
        await here.play(old)
        assert (await joiner.opened()).round == 4
        for client in (*old, joiner):
            await client.close()


async def test_a_download_goes_on_where_it_broke() -> None:
    async with site(nodes=1, rounds=9) as here:
        (client,) = await here.clients(1)
        await here.play([client])
        name = await kept(here, client)
        whole = StateDownload()
        call = client.get("GetChunks", pb.ChunksRequest(snapshot=name))
        for _ in range(8):
            whole.add(await soon(call.read()))
        call.cancel()
        rest = StateDownload(first=7)
        call = client.get("GetChunks", pb.ChunksRequest(snapshot=name, first=7))
        while isinstance(message := await soon(call.read()), bytes):
            rest.add(message)
        assert rest.complete and whole.data + rest.data == here.state.data
        snapshot = here.hub.run.snapshots.open(name)
        await eventually(lambda: not snapshot.readers, "the end of both downloads")
        await client.close()


@pytest.mark.parametrize("loss", ["of the connection", "of the upload", "of the end"])
async def test_a_donor_that_is_lost_ends_the_snapshot_and_nothing_else(loss: str) -> None:
    async with site(nodes=2, rounds=9) as here:
        clients = await here.clients(2)
        for client in clients:
            await client.opened()  # or the beginning of the run would discard the snapshot
        snapshots = here.hub.run.snapshots
        orders = dict(snapshots.begin(1, here.state.nbytes, [client.id for client in clients]))
        calls = [client.put_chunks() for client in clients]
        for client, call in zip(clients, calls, strict=True):
            await client.write(call, here.state.frames(orders[client.id])[:3])
        partial = snapshots.gathering
        assert partial is not None
        await eventually(lambda: partial.received == 4 << 20, "the first chunks")
        if loss == "of the connection":
            await clients[0].close()
        elif loss == "of the end":
            await calls[0].done_writing()
            code, text = await code_of(calls[0])
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "ended after 2 whole chunks" in text
        else:
            calls[0].cancel()
        code, text = await code_of(calls[1])  # it was waited for: nobody has sent anything
        assert code is grpc.StatusCode.ABORTED
        assert "the snapshot was given up: " in text and "node-0" in text
        assert snapshots.gathering is None and not snapshots.kept
        assert here.hub.run.registry.get(clients[1].id) is not None
        for client in clients:
            await client.close()


async def test_an_upload_that_ends_before_its_header_costs_the_snapshot_nothing() -> None:
    async with site(nodes=1, rounds=9) as here:
        (client,) = await here.clients(1)
        await here.play([client])
        snapshots = here.hub.run.snapshots
        ((_, order),) = snapshots.begin(1, here.state.nbytes, [client.id])
        partial = snapshots.gathering
        assert partial is not None
        call = client.put_chunks()
        await soon(call.done_writing())
        code, text = await code_of(call)
        assert (code.name, "ended before its header" in text) == ("INVALID_ARGUMENT", True)
        assert snapshots.gathering is partial  # nobody knows whose it was to be
        assert (await client.donate(order)).count == order.count
        await eventually(lambda: bool(snapshots.kept), "the snapshot")
        await client.close()


async def test_a_state_that_is_not_read_is_cut_off() -> None:
    async with site(nodes=1, rounds=9, stall=0.3, heartbeat=60.0) as here:
        (client,) = await here.clients(1)
        await here.play([client])
        name = await kept(here, client)
        call = client.get("GetChunks", pb.ChunksRequest(snapshot=name))
        await eventually(lambda: here.hub.run.counters["stalled"] == 1, "the cut")
        code, text = await ended(call)
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "node-0 has not read for 0.3 s" in text
        assert not here.hub.run.snapshots.open(name).readers
        await client.close()


async def test_background_streams_wait_for_the_round() -> None:
    async with site(nodes=1, rounds=9) as here:
        (client,) = await here.clients(1)
        await here.play([client])
        name = await kept(here, client)
        looks, busy = 0, True

        def exchanging() -> bool:
            nonlocal looks
            looks += 1
            return busy

        hub = here.hub

        def pacer() -> Pacer:
            return Pacer(
                now=hub.run.now,
                exchanging=exchanging,
                moved=lambda: hub.bytes_out,
                members=lambda: 1,
                patience=1000.0,
            )

        hub.pacer = pacer()
        call = client.get("GetChunks", pb.ChunksRequest(snapshot=name, count=3))
        reading = asyncio.ensure_future(call.read())
        await eventually(lambda: looks > 3, "the waiting")
        assert not reading.done()
        busy = False
        download = StateDownload()
        download.add(await soon(reading))
        while isinstance(message := await soon(call.read()), bytes):
            download.add(message)
        assert download.complete and len(download.data) == 3 << 20
        busy, before = True, looks
        hub.pacer = pacer()
        call = client.get("GetChunks", pb.ChunksRequest(snapshot=name))
        await eventually(lambda: looks > before + 1, "the waiting")
        await soon(client.stream.done_writing())
        await eventually(lambda: not hub.run.registry.nodes, "the departure")
        busy = False
        code, text = await ended(call)
        assert code is grpc.StatusCode.ABORTED and "the session has ended" in text
        await client.close()


async def test_requests_for_states_and_results_that_are_refused() -> None:
    async with site(nodes=1, rounds=9) as here:
        (client,) = await here.clients(1)
        await here.play([client])
        name = await kept(here, client)
        for method, request, code, words in (
            ("GetChunks", pb.ChunksRequest(snapshot="none"), "NOT_FOUND", "is not kept"),
            ("GetChunks", pb.ChunksRequest(snapshot=name, first=25), "INVALID_ARGUMENT", "has 24 chunks"),
            ("GetChunks", b"\xff", "INVALID_ARGUMENT", "the ChunksRequest cannot be read"),
            ("GetResults", b"\xff", "INVALID_ARGUMENT", "the ResultsRequest cannot be read"),
            ("GetResults", pb.ResultsRequest(first=0, count=2), "FAILED_PRECONDITION", "1 are committed"),
            ("GetResults", pb.ResultsRequest(first=0, count=1, part=True), "FAILED_PRECONDITION", "no lane"),
        ):
            found, text = await ended(client.get(method, request))
            assert (found.name, words in text) == (code, True), text
        stranger = pb.Donate(snapshot=name, first=0, count=24, round=1)
        call = client.put_chunks()
        await client.write(call, [here.state.header(stranger)])
        code, text = await code_of(call)
        assert code is grpc.StatusCode.NOT_FOUND and "is not being made" in text
        counters = here.hub.run.counters
        assert counters == {"bad-transfer": 3, "bad-message": 2, "wrong-round": 1, "wrong-table": 1}
        client.session = "unknown"
        assert (await code_of(client.put_chunks()))[0] is grpc.StatusCode.UNAUTHENTICATED
        for call in (client.get("GetChunks", b""), client.get("GetResults", b"")):
            assert (await ended(call))[0] is grpc.StatusCode.UNAUTHENTICATED
        await client.close()
