"""The gRPC server on loopback, against a client that can send anything."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
import torch
from google.protobuf.message import Message

from coordinator.access import Access
from coordinator.calls import DRAIN_SECONDS
from coordinator.hub import Hub
from coordinator.pacing import Pacer
from coordinator.pool import ThreadPool
from coordinator.rounds import Policy
from coordinator.run import Run
from coordinator.server import Server, serve
from coordinator.timer import LoopTimer
from optim.aggregate import ReducerMemory
from optim.bits import tally
from optim.reduce import reduce_payloads
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import Bucket, BucketTable
from protos.certificate import Credential
from protos.grpc_options import CHANNEL_OPTIONS
from protos.identity import NodeKey
from protos.listening import ListenError
from tests.coordinator.coordinator_rig import (
    Download,
    abstain_frames,
    contribution_frames,
    eventually,
    join_request,
    lane_frames,
    make_plan,
    random_payload,
    schedule,
    slow_tally,
    soon,
    voted_table,
)
from tests.coordinator.state_rig import SharedState, StateDownload

TOKEN = "the-token"
LARGE = voted_table(lines=(3 << 20) // 64)  # three chunks
M = TypeVar("M", bound=Message)


class Client:
    """A node in name only: raw calls on channels of its own."""

    def __init__(self, site: Site, token: str = TOKEN) -> None:
        self.site = site
        self.token = token
        self.key = NodeKey.new()
        self.session = ""
        self.id = ""
        self.sent = self.received = self.sent_before = 0  # the last one: before it was admitted
        options = (*CHANNEL_OPTIONS, ("grpc.use_local_subchannel_pool", 1))
        self.channel = grpc.aio.insecure_channel(str(site.server.address), options=options)
        self.stream: Any = None

    def metadata(self) -> list[tuple[str, str]]:
        pairs = [(wire.TOKEN_KEY, self.token)]
        return [*pairs, (wire.SESSION_KEY, self.session)] if self.session else pairs

    async def unary(self, name: str, request: Message, reply: type[M]) -> M:
        data = request.SerializeToString()
        call = self.channel.unary_unary(f"/{wire.CONTROL_SERVICE}/{name}")
        answer = await soon(call(data, metadata=self.metadata()))
        self.sent += len(data)
        self.received += len(answer)
        return reply.FromString(answer)

    async def join(self, **changes: Any) -> Client:
        request = join_request(self.site.table, **{"state_bytes": self.site.state.nbytes, **changes})
        reply = await self.unary("Join", await self.proven(request), pb.JoinReply)
        self.session, self.id, self.sent_before = reply.session, reply.node, self.sent
        self.stream = self.open_session()
        await self.say(heartbeat=pb.Heartbeat())
        return self

    async def proven(self, request: pb.JoinRequest) -> pb.JoinRequest:
        """A join that shows that it is this client's."""
        run = await self.unary("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply)
        self.key.prove(request, run.nonce)
        return request

    def open_session(self) -> Any:
        return self.channel.stream_stream(f"/{wire.CONTROL_SERVICE}/Session")(metadata=self.metadata())

    async def say(self, **kind: Any) -> None:
        data = pb.NodeMessage(**kind).SerializeToString()
        await soon(self.stream.write(data))
        self.sent += len(data)

    async def order(self) -> pb.CoordinatorMessage | None:
        message = await soon(self.stream.read())
        if not isinstance(message, bytes):
            return None
        self.received += len(message)
        return pb.CoordinatorMessage.FromString(message)

    async def opened(self) -> pb.RoundOpen:
        message = await self.order()
        assert message is not None and message.WhichOneof("kind") == "round_open", message
        return message.round_open

    def exchange(self) -> Any:
        return self.channel.stream_stream(f"/{wire.BULK_SERVICE}/Exchange")(metadata=self.metadata())

    async def write(self, call: Any, frames: Sequence[bytes]) -> None:
        for frame in frames:
            await soon(call.write(frame))
            self.sent += len(frame)

    async def read(self, call: Any) -> Download:
        download = Download(self.site.table.result_nbytes)
        while isinstance(message := await soon(call.read()), bytes):
            self.received += len(message)
            download.add(message)
        assert download.commit is not None
        assert await soon(call.code()) is grpc.StatusCode.OK
        return download

    async def contribute(
        self, order: pb.RoundOpen, payload: bytes, lane: Sequence[int] | None = None
    ) -> Download:
        """A whole contribution, or a lane of it."""
        call = self.exchange()
        frames = (
            contribution_frames(order, self.site.table, payload)
            if lane is None
            else lane_frames(order, self.site.table, payload, lane)
        )

        async def up() -> None:
            await self.write(call, frames)
            await call.done_writing()

        uploading = asyncio.ensure_future(up())
        download = await self.read(call)
        await uploading
        if self.stream is not None:
            digest = self.site.state.digest
            await self.say(report=pb.Report(round=order.round, state_digest=digest, loss=1.0, tokens=8))
        return download

    async def ordered(self, kind: str) -> Any:
        """The next order of this kind; others are passed over."""
        while (message := await self.order()) is not None:
            if message.WhichOneof("kind") == kind:
                return getattr(message, kind)
        raise AssertionError(f"no {kind}")

    def get(self, name: str, request: Message | bytes) -> Any:
        """A download."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return self.channel.unary_stream(f"/{wire.BULK_SERVICE}/{name}")(data, metadata=self.metadata())

    def put_chunks(self) -> Any:
        return self.channel.stream_unary(f"/{wire.BULK_SERVICE}/PutChunks")(metadata=self.metadata())

    async def donate(self, order: pb.Donate) -> pb.ChunksReceipt:
        call = self.put_chunks()
        await self.write(call, self.site.state.frames(order))
        await call.done_writing()
        return pb.ChunksReceipt.FromString(await soon(call))

    async def leave(self) -> None:
        await self.say(leave=pb.Leave(reason="done"))
        assert await self.order() is None  # the coordinator has heard it
        await self.close()

    async def close(self) -> None:
        await soon(self.channel.close(None))


class Site:
    """A hub behind a real server."""

    hub: Hub
    server: Server
    table: BucketTable
    state = SharedState.of(nbytes=24 << 20)  # after every round

    async def clients(self, count: int) -> list[Client]:
        return [await Client(self).join() for _ in range(count)]

    async def play(self, clients: Sequence[Client], seed: int = 0) -> list[Download]:
        orders = [await client.opened() for client in clients]
        return list(
            await asyncio.gather(
                *(
                    client.contribute(order, random_payload(seed + i, self.table))
                    for i, (client, order) in enumerate(zip(clients, orders, strict=True))
                )
            )
        )


@contextlib.asynccontextmanager
async def site(
    table: BucketTable | None = None,
    listen: str = "127.0.0.1:0",
    drain: float = DRAIN_SECONDS,
    credential: Credential | None = None,
    token: str | Access = TOKEN,
    **plan: Any,
) -> AsyncIterator[Site]:
    made = Site()
    made.table = table or voted_table()
    pool = ThreadPool()
    made.hub = Hub(Run(make_plan(**plan), schedule(made.table), timer=LoopTimer(), pool=pool, tally=tally))
    made.server = await serve(made.hub, listen, token, drain=drain, credential=credential)
    try:
        yield made
    finally:
        await soon(made.server.stop(0.2))
        made.hub.close()
        pool.close()


async def code_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await soon(call)
    return error.value.code(), error.value.details() or ""


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    """Read a stream to its bad end."""

    async def read() -> None:
        while isinstance(await call.read(), bytes):
            pass

    return await code_of(read())


# ------------------------------------------------------------------------------------------- rounds


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


# ------------------------------------------------------------------------------------------- refusals

BAD: dict[str, tuple[Callable[[list[bytes]], list[bytes]], dict[str, Any], str, str]] = {
    "garbage": (lambda f: [b"\xff" * 99], {}, "bad-frame", "INVALID_ARGUMENT"),
    "no header": (lambda f: f[1:], {}, "bad-frame", "INVALID_ARGUMENT"),
    "truncated": (lambda f: f[:2], {}, "truncated", "INVALID_ARGUMENT"),
    "nothing": (lambda f: [], {}, "truncated", "INVALID_ARGUMENT"),
    "too long": (
        lambda f: [*f[:-1], wire.encode_frame(wire.CHUNK, b"x", offset=128)],
        {},
        "oversized",
        "INVALID_ARGUMENT",
    ),
    "announced too long": (lambda f: f, {"nbytes": 2**40}, "oversized", "INVALID_ARGUMENT"),
    "out of order": (lambda f: [f[0], f[2], f[1]], {}, "out-of-order", "INVALID_ARGUMENT"),
    "bad digest": (lambda f: [*f[:-1], wire.encode_frame(wire.END)], {}, "bad-digest", "INVALID_ARGUMENT"),
    "wrong table": (lambda f: f, {"table_digest": "x"}, "wrong-table", "FAILED_PRECONDITION"),
    "future round": (lambda f: f, {"round": 999}, "wrong-round", "FAILED_PRECONDITION"),
    "bad weight": (lambda f: f, {"weight": 9}, "bad-weight", "INVALID_ARGUMENT"),
}


async def test_bad_contributions_are_refused_and_every_round_commits() -> None:
    async with site(nodes=3, rounds=99) as here:
        clients = await here.clients(3)
        for count, (case, (change, header, kind, code)) in enumerate(BAD.items(), 1):
            orders = [await client.opened() for client in clients]
            call = clients[2].exchange()
            frames = contribution_frames(
                orders[2], here.table, random_payload(2, here.table), chunk=64, **header
            )
            reading = asyncio.ensure_future(ended(call))
            for frame in change(frames):
                try:
                    await soon(call.write(frame))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    break  # refused already
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await soon(call.done_writing())
            status, text = await reading
            if not text.startswith("Internal error from Core"):  # gRPC may lose the words of a status
                assert (case, status.name) == (case, code)
                assert text
            assert sum(here.hub.run.counters.values()) == count, case
            assert here.hub.run.counters[kind] >= 1, case
            fetch = clients[2].exchange()
            await clients[2].write(fetch, abstain_frames(orders[2], "it was refused"))
            downloads = await asyncio.gather(
                clients[0].contribute(orders[0], random_payload(0, here.table)),
                clients[1].contribute(orders[1], random_payload(1, here.table)),
                clients[2].read(fetch),
            )
            for download, counted in zip(downloads, (True, True, False), strict=True):
                assert download.commit is not None and download.commit.counted is counted, case
                assert list(download.commit.voters) == ["node-0", "node-1"], case
                assert "refused: node-2" in download.commit.reason
        for client in clients:
            await client.close()


async def test_a_late_contribution_that_is_still_coming_gets_the_result() -> None:
    async with site(LARGE, nodes=3, rounds=9, policy=Policy(0.2, 5.0, 0.6)) as here:
        clients = await here.clients(3)
        order = await clients[2].opened()
        frames = contribution_frames(order, LARGE, random_payload(2, LARGE))
        call = clients[2].exchange()
        await clients[2].write(call, frames[:2])
        on_time = (await here.play(clients[:2]))[0]
        download = Download(LARGE.nbytes)
        while download.commit is None:
            download.add(await soon(call.read()))
        await clients[2].write(call, frames[2:])  # raises if the call has been ended
        assert await soon(call.read()) is grpc.aio.EOF
        assert await soon(call.code()) is grpc.StatusCode.OK
        assert not download.commit.counted and download.payload == on_time.payload
        assert here.hub.run.counters["broken-stream"] == 0
        for client in clients:
            await client.close()


LATE_REFUSALS: dict[str, tuple[int, dict[str, Any], Callable[[list[bytes]], list[bytes]], str, str]] = {
    "wrong-table": (1, {"table_digest": "x"}, lambda f: f, "FAILED_PRECONDITION", "laid out by table x"),
    "out-of-order": (3, {}, lambda f: [*f[:2], *f[3:4], *f[2:3], *f[4:]], "INVALID_ARGUMENT", "expected"),
    "bad-frame": (3, {}, lambda f: [*f[:2], b"?" * 99, *f[2:]], "INVALID_ARGUMENT", ""),
    "bad-digest": (5, {}, lambda f: [*f[:-1], wire.encode_frame(wire.END)], "INVALID_ARGUMENT", "announces"),
}


@pytest.mark.parametrize("kind", LATE_REFUSALS)
async def test_a_refusal_reaches_a_node_that_is_still_sending(kind: str) -> None:
    """``first`` frames are enough for the refusal; the others are sent after it."""
    first, header, change, code, words = LATE_REFUSALS[kind]
    async with site(LARGE, nodes=1, rounds=9) as here:
        client = await Client(here).join()
        order = await client.opened()
        frames = change(contribution_frames(order, LARGE, random_payload(0, LARGE), **header))
        call = client.exchange()
        reading = asyncio.ensure_future(ended(call))
        await client.write(call, frames[:first])
        await eventually(lambda: here.hub.run.counters[kind] == 1, "the refusal")
        await client.write(call, frames[first:])
        status, text = await reading
        assert (status.name, words in text) == (code, True), text
        assert sum(here.hub.run.counters.values()) == 1
        await client.close()


async def test_an_upload_without_end_is_cut_after_its_answer() -> None:
    """By time if the node falls silent, by bytes if it sends on and on, and when it opens another call."""
    async with site(nodes=1, rounds=9, drain=0.05) as here:
        client = await Client(here).join()
        order = await client.opened()
        bad = contribution_frames(order, here.table, random_payload(0, here.table), table_digest="x")
        call = client.exchange()
        await client.write(call, bad[:1])
        assert (await ended(call))[0] is grpc.StatusCode.FAILED_PRECONDITION
        await client.close()
    async with site(nodes=2, rounds=9, drain=3600.0) as here:  # the other one keeps the round open
        client, other = await here.clients(2)
        order = await client.opened()
        call = client.exchange()
        reading = asyncio.ensure_future(ended(call))
        before = here.hub.bytes_in
        await client.write(call, bad[:1])
        chunk = wire.encode_frame(wire.CHUNK, bytes(wire.CHUNK_BYTES))

        async def send_for_ever() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                while True:
                    await call.write(chunk)

        await soon(send_for_ever())
        await reading
        assert here.hub.bytes_in - before < 8 * wire.MAX_MESSAGE_BYTES
        silent = other.exchange()
        await other.write(silent, bad[:1])
        await eventually(lambda: here.hub.run.counters["wrong-table"] == 2, "the refusal")
        fetch = other.exchange()
        await other.write(fetch, abstain_frames(order, "it was refused"))
        assert (await ended(silent))[0] is grpc.StatusCode.FAILED_PRECONDITION
        assert (await other.read(fetch)).commit is not None
        await client.close()
        await other.close()


async def test_an_ignored_contribution_has_a_size_too() -> None:
    async with site(nodes=2, rounds=9) as here:
        clients = await here.clients(2)
        order = await clients[1].opened()
        call = clients[1].exchange()
        reading = asyncio.ensure_future(ended(call))
        await clients[1].write(call, abstain_frames(order)[:1])
        chunk = wire.encode_frame(wire.CHUNK, bytes(wire.CHUNK_BYTES))
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for _ in range(64):
                await soon(call.write(chunk))
        await reading
        assert here.hub.run.counters["oversized"] == 1
        for client in clients:
            await client.close()


async def test_messages_over_the_limit() -> None:
    async with site(nodes=2, rounds=9) as here:
        clients = await here.clients(2)
        options = [pair for pair in CHANNEL_OPTIONS if pair[0] != "grpc.max_send_message_length"]
        wide = grpc.aio.insecure_channel(str(here.server.address), options=options)
        # Somewhat too long: refused in words, and the round goes on. Far too long: gRPC ends the stream.
        for size, kind, code in (
            (wire.MAX_MESSAGE_BYTES + 1, "oversized", grpc.StatusCode.INVALID_ARGUMENT),
            (5 * wire.MAX_MESSAGE_BYTES, "broken-stream", grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            orders = [await client.opened() for client in clients]
            call = wide.stream_stream(f"/{wire.BULK_SERVICE}/Exchange")(metadata=clients[1].metadata())
            reading = asyncio.ensure_future(ended(call))
            await soon(call.write(bytes(size)))
            assert (await reading)[0] is code
            await eventually(lambda kind=kind: here.hub.run.counters[kind] == 1, kind)  # type: ignore[misc]
            good = asyncio.ensure_future(clients[0].contribute(orders[0], random_payload(0, here.table)))
            if kind == "broken-stream":  # which may be tried again
                await clients[1].contribute(orders[1], random_payload(1, here.table))
            commit = (await soon(good)).commit
            assert commit is not None
            assert len(commit.voters) == (1 if kind == "oversized" else 2)
            if kind == "oversized":
                fetch = clients[1].exchange()
                await clients[1].write(fetch, abstain_frames(orders[1], "it was refused"))
                await clients[1].read(fetch)
        asked = wide.unary_stream(f"/{wire.BULK_SERVICE}/GetResults")
        code, text = await ended(asked(bytes(2 << 20), metadata=clients[0].metadata()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "cannot be read" in text
        await soon(wide.close(None))
        for client in clients:
            await client.close()


async def test_without_the_token_nothing_works() -> None:
    async with site() as here:
        for token in ("", "wrong", TOKEN + "x", TOKEN[:-1]):
            client = Client(here, token)
            calls: list[Awaitable[Any]] = [
                client.unary("GetRun", pb.GetRunRequest(protocol=wire.PROTOCOL), pb.GetRunReply),
                client.unary("Join", join_request(here.table), pb.JoinReply),
                client.unary("GetStatus", pb.StatusRequest(), pb.StatusReply),
                client.open_session().read(),
                client.exchange().read(),
            ]
            for call in calls:
                code, text = await code_of(call)
                assert code is grpc.StatusCode.UNAUTHENTICATED
                assert text == "the invite's token is not this run's: ask for a new invite"
            await client.close()
        assert here.hub.run.counters["bad-token"] == 20
        assert not here.hub.run.registry.nodes


async def test_without_a_session_there_is_no_exchange() -> None:
    async with site() as here:
        client = Client(here)
        client.session = "made up"
        for call in (client.exchange().read(), client.open_session().read()):
            code, text = await code_of(call)
            assert code is grpc.StatusCode.UNAUTHENTICATED and "session" in text
        await client.close()


async def test_a_second_session_is_refused_and_the_first_lives() -> None:
    async with site(nodes=1) as here:
        client = await Client(here).join()
        code, text = await code_of(client.open_session().read())
        assert code is grpc.StatusCode.ALREADY_EXISTS and "has a session already" in text
        assert (await client.opened()).round == 0
        await client.close()


async def test_join_refusals_name_both_values() -> None:
    async with site() as here:
        client = Client(here)
        request = join_request(here.table, table_digest="mine")
        code, text = await code_of(client.unary("Join", await client.proven(request), pb.JoinReply))
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "mine" in text and schedule(here.table).digest in text
        code, _ = await code_of(
            client.channel.unary_unary(f"/{wire.CONTROL_SERVICE}/Join")(
                b"\xff\xff", metadata=client.metadata()
            )
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT
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


# ------------------------------------------------------------------------------------------- states


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
            await client.write(
                call, here.state.frames(orders[client.id])[: 0 if loss == "of the header" else 3]
            )
        partial = snapshots.gathering
        assert partial is not None
        if loss == "of the header":
            await calls[0].done_writing()
            code, text = await code_of(calls[0])
            assert (code.name, "ended before its header" in text) == ("INVALID_ARGUMENT", True)
            assert snapshots.gathering is partial  # nobody knows whose it was to be
            calls[0] = clients[0].put_chunks()
            await clients[0].write(calls[0], here.state.frames(orders[clients[0].id])[:3])
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


# ------------------------------------------------------------------------------------------- addresses


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def test_port_0_is_a_real_port() -> None:
    async with site() as one, site() as two:
        assert one.server.address.port not in (0, two.server.address.port)
        assert one.server.address.host == "127.0.0.1"


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
async def test_ipv6() -> None:
    async with site(listen="[::1]:0", nodes=1, rounds=1) as here:
        assert str(here.server.address).startswith("[::1]:")
        client = await Client(here).join()
        await here.play([client])
        await client.close()


async def test_a_busy_port_is_named() -> None:
    async with site() as here:
        with pytest.raises(ListenError, match=f"port {here.server.address.port} is in use") as error:
            async with site(listen=str(here.server.address)):
                pass
        assert "port 0 takes a free one" in str(error.value)


async def test_an_address_of_another_host_is_named() -> None:
    with pytest.raises(ListenError, match=r"cannot listen on 192\.0\.2\.1:0: .*; choose another address"):
        async with site(listen="192.0.2.1:0"):
            pass
    with pytest.raises(ListenError, match="cannot be resolved"):
        async with site(listen="no-such-host.invalid:0"):
            pass


async def test_stopping_ends_open_calls_and_frees_the_port() -> None:
    async with site(nodes=2, rounds=9) as here:
        clients = await here.clients(2)
        order = await clients[0].opened()
        call = clients[0].exchange()
        await clients[0].write(call, contribution_frames(order, here.table, random_payload(0, here.table)))
        here.hub.stop("maintenance")
        stop = await clients[0].ordered("stop")
        assert stop.reason == "maintenance"
        code, text = await ended(call)
        assert (code, text) == (grpc.StatusCode.UNAVAILABLE, "the run has ended: maintenance")
        await soon(here.server.stop(0.2))
        with socket.socket() as probe:
            assert probe.connect_ex((here.server.address.host, here.server.address.port)) != 0
        for client in clients:
            await client.close()
