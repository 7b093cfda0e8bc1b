"""What is particular to the direct carrier: its port, its connections, strangers, and processes that die."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest

from coordinator.dialing import reach
from node.exchange.peers.base import Peer
from node.exchange.peers.direct import MAX_NONCE, DirectCarrier
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos.address import Address
from protos.listening import ListenError
from protos.wire import MAX_MESSAGE_BYTES, PEER_SERVICE
from tests.coordinator.coordinator_rig import eventually
from tests.coordinator.server_rig import site
from tests.node.peers.carriers_rig import LOOPBACK, RUN, Served, hall, soon

_CHILD = f"""
import asyncio, sys
from node.exchange.peers.base import Peer
from node.exchange.peers.direct import DirectCarrier
from protos.address import Address

async def handler(stream):
    await stream.write(await stream.read())
    await asyncio.Event().wait()

async def main():
    carrier = DirectCarrier(handler, {RUN!r})
    print((await carrier.listen(Address("127.0.0.1", 0))).port, flush=True)
    if sys.argv[1:]:
        stream = await carrier.open(Peer("node-1", direct=sys.argv[1]))
        await stream.write(b"hello")
    await asyncio.Event().wait()

asyncio.run(main())
"""


class Node:
    """A carrier that listens, and the streams that others have opened to it."""

    def __init__(self, **options: float) -> None:
        handler, self.arrivals = hall()
        self.carrier = DirectCarrier(handler, RUN, **options)
        self.address = LOOPBACK

    def peer(self) -> Peer:
        return Peer("node-1", direct=str(self.address))

    async def arrival(self) -> Served:
        return await soon(self.arrivals.get())


@contextlib.asynccontextmanager
async def node(*, listens: bool = True, **options: float) -> AsyncIterator[Node]:
    made = Node(**options)
    if listens:
        made.address = await made.carrier.listen(LOOPBACK)
    try:
        yield made
    finally:
        await soon(made.carrier.close())


@contextlib.asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A node in a process of its own, and its port; it calls the address that it is given."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CHILD, *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, int(await soon(process.stdout.readline()))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def connections(port: int) -> int:
    """Of this process, to ``port``."""
    found = psutil.Process().net_connections("tcp")
    return sum(bool(each.raddr) and each.raddr.port == port for each in found)


class Gated(DirectCarrier):
    """A carrier that takes streams only while its gate is open."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gate = asyncio.Event()
        self.gate.set()

    async def _stream(self, request: Any, context: Any) -> None:
        await self.gate.wait()
        await super()._stream(request, context)


@contextlib.asynccontextmanager
async def gated() -> AsyncIterator[tuple[Gated, Peer, asyncio.Queue[Served]]]:
    handler, arrivals = hall()
    carrier = Gated(handler, RUN)
    address = await carrier.listen(LOOPBACK)
    try:
        yield carrier, Peer("node-1", direct=str(address)), arrivals
    finally:
        carrier.gate.set()
        await soon(carrier.close())


async def refused(caller: Node, peer: Peer) -> Trouble:
    with pytest.raises(Trouble) as trouble:
        await soon(caller.carrier.open(peer))
    return trouble.value


# --------------------------------------------------------------------------------------- ports, connections


async def test_a_busy_port_is_named_with_the_way_out() -> None:
    async with node() as first, node(listens=False) as second:
        with pytest.raises(ListenError, match=f"port {first.address.port} is in use") as error:
            await second.carrier.listen(first.address)
        assert "another node" in str(error.value) and "--listen" in str(error.value)


async def test_closing_frees_the_port() -> None:
    async with node() as first:
        taken = first.address
    async with node(listens=False) as second:
        assert await second.carrier.listen(taken) == taken


async def test_streams_to_a_peer_share_a_connection_that_is_left_when_nobody_needs_it() -> None:
    async with node() as called, node(listens=False, idle=0.0) as caller:
        streams = [await soon(caller.carrier.open(called.peer())) for _ in range(3)]
        assert connections(called.address.port) == 1
        for stream in streams:
            (await called.arrival()).leave()
            await soon(stream.end())
            assert await soon(stream.read()) is None
        del stream, streams
        await eventually(lambda: not connections(called.address.port), "leaving the connection")
        again = await soon(caller.carrier.open(called.peer()))
        assert connections(called.address.port) == 1
        again.cancel()


async def test_a_connection_that_has_proved_itself_costs_no_round_trip() -> None:
    async with gated() as (called, peer, arrivals), node(listens=False) as caller:
        first = await soon(caller.carrier.open(peer))
        (await soon(arrivals.get())).leave()
        called.gate.clear()
        second = await soon(caller.carrier.open(peer))  # though nobody has taken it
        await soon(second.write(b"hello"))
        assert arrivals.empty()
        called.gate.set()
        served = await soon(arrivals.get())
        assert await soon(served.stream.read()) == b"hello"
        served.leave()
        first.cancel()
        second.cancel()


async def test_a_stream_that_is_not_taken_breaks_and_the_next_one_waits_again() -> None:
    async with gated() as (called, peer, arrivals), node(listens=False, seconds=0.2) as caller:
        first = await soon(caller.carrier.open(peer))
        (await soon(arrivals.get())).leave()
        called.gate.clear()
        second = await soon(caller.carrier.open(peer))
        with pytest.raises(Trouble, match="a stream to node-1") as trouble:
            await soon(second.read())
        assert trouble.value.kind is Kind.SILENT
        assert (await refused(caller, peer)).kind is Kind.SILENT
        first.cancel()


# --------------------------------------------------------------------------------------- deaths


async def test_the_death_of_the_process_that_is_called() -> None:
    async with child() as (process, port), node(listens=False) as caller:
        peer = Peer("node-1", direct=f"127.0.0.1:{port}")
        stream = await soon(caller.carrier.open(peer))
        await soon(stream.write(b"hello"))
        assert await soon(stream.read()) == b"hello"
        process.kill()
        with pytest.raises(Trouble, match="node-1") as trouble:
            await soon(stream.read())
        assert trouble.value.passing
        await process.wait()
        # gRPC tells the channel a moment later than the stream: till then calls go into the old connection,
        # which has not proved itself any more.
        gone = await refused(caller, peer)
        assert gone.kind in (Kind.BROKEN, Kind.NOBODY_LISTENS) and str(port) in str(gone)
        async with node(listens=False) as other:
            gone = await refused(other, peer)
            assert gone.kind is Kind.NOBODY_LISTENS and str(port) in str(gone)


@pytest.mark.parametrize("linger", [None, struct.pack("ii", 1, 0)], ids=["FIN", "RST"])
async def test_a_death_while_a_stream_is_opened(linger: bytes | None) -> None:
    async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        if linger is not None:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()

    async with await asyncio.start_server(die, "127.0.0.1", 0) as server, node(listens=False) as caller:
        port = server.sockets[0].getsockname()[1]
        found = await refused(caller, Peer("node-1", direct=f"127.0.0.1:{port}"))
        assert found.kind is Kind.BROKEN and found.passing and str(port) in str(found)


async def test_the_death_of_the_process_that_calls() -> None:
    async with node() as called, child(str(called.address)) as (process, _):
        served = await called.arrival()
        assert await soon(served.stream.read()) == b"hello"
        reading = asyncio.ensure_future(served.stream.read())
        process.kill()
        with pytest.raises(Trouble, match="the node that called"):
            await soon(reading)
        served.leave()


# --------------------------------------------------------------------------------------- strangers


async def test_who_answers_is_told_apart() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        port = silent.getsockname()[1]
        async with node(listens=False, seconds=0.3) as caller:
            found = await refused(caller, Peer("node-1", direct=f"127.0.0.1:{port}"))
            assert found.kind is Kind.SILENT and "node-1" in str(found)
        async with node(listens=False) as caller, site() as here:
            found = await refused(caller, Peer("node-1", direct=str(here.server.address)))
            assert found.kind is Kind.STRANGER and "is not an Atoll node" in str(found)
            found = await refused(caller, Peer("node-1", direct="unix:/tmp/socket"))
            assert found.kind is Kind.NAME and "node-1 cannot be called directly" in str(found)
    assert not caller.carrier.reaches(Peer("node-1"))


@pytest.mark.parametrize("sent", ["too long", "no end"])
async def test_a_stranger_that_calls_is_trouble_for_the_handler(sent: str) -> None:
    async with node() as called, grpc.aio.insecure_channel(str(called.address)) as channel:
        call = channel.stream_stream(f"/{PEER_SERVICE}/Stream")()
        served = await called.arrival()
        await soon(call.write(b"x" * (MAX_MESSAGE_BYTES + 1) if sent == "too long" else b"x"))
        await soon(call.done_writing())
        with pytest.raises(Trouble) as trouble:
            while await soon(served.stream.read()) is not None:
                pass
        assert trouble.value.kind is (Kind.PROTOCOL if sent == "too long" else Kind.CUT)
        served.leave()
        assert await soon(call.code()) is grpc.StatusCode.ABORTED


# --------------------------------------------------------------------------------------- being looked for


async def test_the_coordinator_reaches_a_node_of_its_run() -> None:
    async with node() as called:
        assert await soon(reach(str(called.address), RUN)) == ""
        assert await soon(reach(str(called.address), "other")) == (
            f"the node at {called.address} takes part in another run"
        )


async def test_why_a_node_cannot_be_reached() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        there = f"127.0.0.1:{silent.getsockname()[1]}"
        assert f"no answer from {there} within 0.3 s" in await soon(reach(there, RUN, 0.3))
    assert "nothing listens at 127.0.0.1:1" in await soon(reach("127.0.0.1:1", RUN))
    assert "has no port" in await soon(reach("somewhere", RUN))
    assert "is an address to listen on" in await soon(reach("0.0.0.0:4600", RUN))
    assert "is an address to listen on" in await soon(reach("127.0.0.1:0", RUN))
    async with site() as here:
        assert "is not an Atoll node" in await soon(reach(str(here.server.address), RUN))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token": b"another nonce"}, "did not repeat what it was sent"),
        ({"protocol": 1}, "speaks protocol 1"),
        (None, "is not an Atoll node"),
    ],
)
async def test_answers_that_prove_nothing(changes: dict[str, object] | None, problem: str) -> None:
    async def answer(request: bytes, _: object) -> bytes:
        if changes is None:
            return b"\xff\xff"
        hello = pb.PeerHello.FromString(request)
        hello.run_digest = RUN
        hello.MergeFrom(pb.PeerHello(**changes))  # type: ignore[arg-type]
        return hello.SerializeToString()

    server = grpc.aio.server()
    calls = {"Reach": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(PEER_SERVICE, calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    assert problem in await soon(reach(str(Address("127.0.0.1", port)), RUN))
    await server.stop(None)


async def test_a_nonce_has_bounds() -> None:
    async with node() as called, grpc.aio.insecure_channel(str(called.address)) as channel:
        call = channel.unary_unary(f"/{PEER_SERVICE}/Reach")
        hello = pb.PeerHello(token=b"x" * (MAX_NONCE + 1))
        with pytest.raises(grpc.aio.AioRpcError, match="the nonce has 65 bytes"):
            await soon(call(hello.SerializeToString()))
