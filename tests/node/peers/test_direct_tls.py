"""The direct carrier with TLS: each node has a certificate of its own, and is called by it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from coordinator.dialing import meet, reach
from node.exchange.peers.base import Peer
from node.exchange.peers.direct import DirectCarrier
from node.exchange.trouble import Kind, Trouble
from protos.address import Address
from protos.certificate import MAX_BYTES, Credential, made
from tests.node.peers.carriers_rig import LOOPBACK, RUN, hall, soon

OURS = made()


@contextlib.asynccontextmanager
async def carrier(credential: Credential | None) -> AsyncIterator[tuple[DirectCarrier, Address]]:
    handler, _ = hall()
    opened = DirectCarrier(handler, RUN, credential=credential)
    try:
        yield opened, await opened.listen(LOOPBACK)
    finally:
        await soon(opened.close())


async def test_a_node_is_called_by_its_certificate() -> None:
    handler, arrivals = hall()
    called = DirectCarrier(handler, RUN, credential=OURS)
    where = str(await called.listen(LOOPBACK))
    try:
        async with carrier(made()) as (calling, _):
            peer = Peer("node-1", where, OURS.der)
            assert calling.reaches(peer)
            stream = await soon(calling.open(peer))
            await soon(stream.write(b"hello"))
            assert await soon((await soon(arrivals.get())).stream.read()) == b"hello"
            stream.cancel()
    finally:
        await soon(called.close())


async def test_whoever_else_is_there_is_not_taken_for_it() -> None:
    async with carrier(made()) as (calling, _), carrier(OURS) as (_, ours), carrier(None) as (_, open_):
        for where, certificate, kind in (
            (ours, made().der, Kind.CERTIFICATE),
            (open_, OURS.der, Kind.PLAINTEXT),
            (ours, b"junk", Kind.PROTOCOL),
        ):
            peer = Peer("node-1", str(where), certificate)
            assert calling.reaches(peer)
            with pytest.raises(Trouble) as caught:
                await soon(calling.open(peer))
            assert caught.value.kind is kind, caught.value
        assert not calling.reaches(Peer("node-1", str(open_))), "nothing goes out unencrypted"


async def test_the_coordinator_tries_it_by_its_certificate() -> None:
    async with carrier(OURS) as (_, where), carrier(None) as (_, open_):
        assert await soon(reach(str(where), RUN, certificate=OURS.der)) == ""
        met = await soon(meet(str(where), RUN, certificate=OURS.der))
        assert met.seen.startswith("127.0.0.1:")
        assert "another certificate" in await soon(reach(str(where), RUN, certificate=made().der))
        assert "does not speak TLS" in await soon(reach(str(open_), RUN, certificate=OURS.der))
        assert "broke" in await soon(reach(str(where), RUN))
        assert "names no host" in await soon(reach(str(where), RUN, certificate=b"\0" * MAX_BYTES))
