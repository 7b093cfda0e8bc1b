"""A listening coordinator against damaged streams, strangers and raw bytes, while others train on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from bench.fuzzing.inputs import any_message
from coordinator.rounds import Policy
from protos import atoll_pb2 as pb
from protos import exporting, wire
from protos.address import Address
from protos.limits import Limits
from protos.refusal import FLOOD, SILENT
from tests.coordinator.contribution_rig import contribution_frames, random_payload
from tests.coordinator.coordinator_rig import eventually, join_request, soon
from tests.coordinator.server_rig import Client, Site, site

# every round waits for all: who is late here is so because of the machine
PATIENT: dict[str, Any] = {"policy": Policy(120.0, 240.0, 0.6), "adaptive": False}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def http2(kind: int, flags: int, stream: int, body: bytes, length: int | None = None) -> bytes:
    """A frame of HTTP/2, whose length may lie."""
    size = len(body) if length is None else length
    return size.to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + body


def raw_inputs(rng: random.Random) -> Iterator[bytes]:
    """What does not speak gRPC, or stops doing so."""
    settings = http2(4, 0, 0, b"")
    yield b""
    yield b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01" + rng.randbytes(500)  # TLS
    yield PREFACE[:10]
    yield PREFACE + rng.randbytes(300)
    yield PREFACE + settings + http2(1, 4, 1, rng.randbytes(100))  # HEADERS
    yield PREFACE + settings + http2(0, 0, 1, b"x", length=(1 << 24) - 1)  # DATA that never comes
    yield PREFACE + settings + http2(9, 0, 1, rng.randbytes(1000)) * 50  # CONTINUATION of nothing
    yield PREFACE + settings + http2(6, 0, 0, bytes(8)) * 200  # PING
    yield PREFACE + settings * 200
    yield PREFACE + settings + b"".join(http2(3, 0, 2 * n + 1, bytes(4)) for n in range(200))  # RST_STREAM
    yield PREFACE + http2(4, 0, 0, b"\x00\x04\xff\xff\xff\xff")
    for size in (1, 9, 24, 4096, 65536):
        yield rng.randbytes(size)


async def train(here: Site, clients: list[Client], rounds: int) -> None:
    """Honest nodes go on."""
    for number in range(rounds):
        for download in await here.play(clients, seed=number):
            assert download.commit is not None and len(download.commit.voters) == len(clients)


async def test_raw_bytes_on_the_port_disturb_nobody() -> None:
    rng = random.Random(3)
    async with site(nodes=2, rounds=20, **PATIENT) as here:
        clients = await here.clients(2)
        where = (here.server.address.host, here.server.address.port)
        with contextlib.ExitStack() as stack:
            for data in raw_inputs(rng):
                near = stack.enter_context(socket.create_connection(where))
                near.setblocking(False)
                with contextlib.suppress(OSError):
                    await soon(asyncio.get_running_loop().sock_sendall(near, data))
            await train(here, clients, 3)
        await train(here, clients, 2)
        assert here.hub.run.round == 5
        for client in clients:
            await client.close()


def streams(rng: random.Random, order: pb.RoundOpen, table: object, payload: bytes) -> Iterator[list[bytes]]:
    """Contributions that are none."""
    good = contribution_frames(order, table, payload, chunk=64)  # type: ignore[arg-type]
    yield []
    yield [b""]
    yield good[:2]
    yield good[1:]
    yield [good[0], *reversed(good[1:])]
    yield [*good, *good]
    yield [good[0], good[0]]
    yield [rng.randbytes(n) for n in (1, 16, 100)]
    yield [bytes(wire.MAX_MESSAGE_BYTES + 1)]
    yield [good[0], wire.encode_frame(wire.CHUNK, payload + b"x")]
    for _ in range(12):
        header = any_message(pb.ContributionHeader, rng).SerializeToString()
        yield [wire.encode_frame(wire.HEADER, header), *good[1:]]
    for _ in range(12):
        damaged = bytearray(rng.choice(good))
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        yield [bytes(damaged), *good[1:]]


async def test_damaged_contributions_disturb_nobody() -> None:
    rng = random.Random(4)
    async with site(nodes=2, rounds=20, **PATIENT) as here:
        first, second = await here.clients(2)
        third = await Client(here).join(name="liar")
        orders = [await client.opened() for client in (first, second)]
        payload = random_payload(9, here.table)
        seen: set[grpc.StatusCode] = set()
        for frames in streams(rng, orders[0], here.table, payload):
            call = third.exchange()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                for frame in frames:
                    await soon(call.write(frame))
                await soon(call.done_writing())
            seen.add(await soon(call.code()))
        assert grpc.StatusCode.OK not in seen  # the third is no member: nothing of it can count
        honest = zip((first, second), orders, strict=True)
        for download in await asyncio.gather(
            *(client.contribute(order, payload) for client, order in honest)
        ):
            assert download.commit is not None and len(download.commit.voters) == 2
        for client in (first, second, third):
            await client.close()


async def test_a_session_that_talks_nonsense_goes_on_and_so_do_the_others() -> None:
    rng = random.Random(5)
    async with site(nodes=2, rounds=20, **PATIENT) as here:
        clients = await here.clients(2)
        third = await Client(here).join(name="babbler")
        told = 0
        for _ in range(100):
            message = any_message(pb.NodeMessage, rng)
            assert isinstance(message, pb.NodeMessage)
            if message.WhichOneof("kind") != "leave":
                await soon(third.stream.write(message.SerializeToString()))
                told += 1
        for size in (1, 100, 70_000):
            await soon(third.stream.write(rng.randbytes(size)))
        await train(here, clients, 2)
        assert told and here.hub.run.counters["bad-message"]
        assert third.id in here.hub.run.registry.nodes
        for client in (*clients, third):
            await client.close()


async def test_what_has_no_token_is_not_read() -> None:
    async with site(nodes=2) as here:
        stranger = Client(here, token="wrong")
        request = join_request(here.table).SerializeToString() + bytes(1 << 20)
        call = stranger.channel.unary_unary(f"/{wire.CONTROL_SERVICE}/Join")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await soon(call(request, metadata=stranger.metadata()))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert here.hub.bytes_in == 0
        await stranger.close()


async def test_too_many_joins_and_questions_are_told_to_wait() -> None:
    async with site(nodes=2, limits=Limits(joins=2, questions=4)) as here:
        clients = await here.clients(2)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await Client(here).join()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "try again in a moment" in (refused.value.details() or "")
        await clients[0].unary("GetStatus", pb.StatusRequest(), pb.StatusReply)  # the joins asked as well
        with pytest.raises(grpc.aio.AioRpcError):
            await clients[0].unary("GetStatus", pb.StatusRequest(), pb.StatusReply)
        assert here.hub.run.counters[FLOOD] == 2
        for client in clients:
            await client.close()


async def test_a_connection_that_shows_no_token_is_cut() -> None:
    async with site(nodes=2, limits=Limits(first_call_seconds=0.5)) as here:
        with socket.create_connection((here.server.address.host, here.server.address.port)) as near:
            near.setblocking(False)
            loop = asyncio.get_running_loop()
            await soon(loop.sock_sendall(near, PREFACE + http2(4, 0, 0, b"")))  # a proper beginning
            while await soon(loop.sock_recv(near, 4096)):
                pass
        await eventually(lambda: here.hub.run.counters[SILENT] == 1, "the cut to be counted")


def test_a_request_for_metrics_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "REQUEST_SECONDS", 0.2)
    server = exporting.MetricsServer(CollectorRegistry(), Address("127.0.0.1", 0))
    try:
        with socket.create_connection((server.address.host, server.address.port), timeout=30) as near:
            near.sendall(b"GET /metrics HTT")
            assert near.recv(1) == b""
    finally:
        server.close()
