"""Two nodes that only reach a third, which carries their stream."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from pathlib import Path

import pytest

from node.exchange.peers.base import PeerStream
from node.exchange.retry import within
from node.exchange.swarm.relaying import relays_of
from node.exchange.trouble import Trouble
from tests.node.swarm.swarm_rig import SECONDS, Site


async def _hello(caller: Site, called: Site, nbytes: int = 50_000) -> None:
    stream = await caller.swarm.carrier.open(await called.peer())
    data = os.urandom(nbytes)
    await stream.write(data)
    assert await within(SECONDS, "an echo", stream.read()) == data
    await stream.end()
    assert await within(SECONDS, "the end", stream.read()) is None
    await within(SECONDS, "the leave", stream.closed.wait())


async def test_who_does_not_listen_is_reached_through_a_relay(sockets: Path) -> None:
    relay = Site("relay", reachability="public")
    await relay.swarm.start()
    through = await relay.swarm.addresses()
    hidden = [
        Site(name, listen=(), relays=through, reachability="private", bootstrap=through)
        for name in ("one", "two")
    ]
    try:
        await asyncio.gather(*(site.swarm.start() for site in hidden))
        one, two = hidden
        for site in hidden:
            addresses = await site.swarm.addresses()
            assert addresses and all("/p2p-circuit/p2p/" in address for address in addresses)
        for nbytes in (50_000, 1 << 20):  # more than libp2p's relays carry
            await _hello(one, two, nbytes)
            await _hello(two, one, nbytes)
        assert relay.swarm.carrier.carried > 4 * (1 << 20)
        assert one.said.get_nowait() == (
            f"two is reached by the swarm through the relay {relay.swarm.peer} now"
        )
        assert "this node carries what" in relay.said.get_nowait()
    finally:
        await asyncio.gather(*(site.swarm.close() for site in (relay, *hidden)))


@pytest.mark.asyncio(loop_scope="module")
async def test_a_relay_that_was_not_chosen_calls_for_nobody(sites: list[Site]) -> None:
    carrier = sites[0].swarm.carrier
    called = sites[1].swarm.peer
    with pytest.raises(Trouble, match="has not chosen that peer for its relay"):
        await carrier._opened(called, (), b"c", called)
    with pytest.raises(Trouble, match="a third peer without a peer id"):
        await carrier._opened(called, (), b"o", "somebody")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_a_stream_through_a_relay_breaks_at_is_told(sites: list[Site]) -> None:
    """The callee breaks off in the middle: the caller learns of it."""
    one, two = sites
    two.swarm.daemon._setting = dataclasses.replace(
        two.swarm.daemon.setting, relays=await one.swarm.addresses()
    )
    begun = asyncio.Event()

    async def leave(stream: PeerStream) -> None:
        await stream.read()
        begun.set()
        stream.cancel()

    two.handler = leave
    caller = Site("three")
    try:
        caller.begin_with(await one.swarm.addresses())
        await caller.swarm.start()
        way = {one.swarm.peer: await one.swarm.addresses()}
        stream = await caller.swarm.carrier._through(way, await two.peer(), "")
        await stream.write(b"x")
        await within(SECONDS, "the callee", begun.wait())
        with pytest.raises(Trouble):
            await within(SECONDS, "the end", stream.read())
    finally:
        await caller.swarm.close()


def test_relays_are_read_from_the_addresses_of_a_peer() -> None:
    relay, other, peer = (f"Qm{letter * 44}" for letter in "abc")
    near, far = f"/ip4/192.0.2.1/tcp/1/p2p/{relay}", f"/ip4/192.0.2.2/udp/1/quic-v1/p2p/{relay}"
    addresses = [
        f"/ip4/192.0.2.3/tcp/1/p2p/{peer}",
        f"{near}/p2p-circuit/p2p/{peer}",
        f"{far}/p2p-circuit/p2p/{peer}",
        f"/dns/example.org/tcp/1/p2p/{other}/p2p-circuit/p2p/{peer}",
        f"/ip4/192.0.2.3/tcp/1/p2p-circuit/p2p/{peer}",  # a relay without a name
        "nonsense",
    ]
    assert relays_of(addresses) == {
        relay: (near, far),
        other: (f"/dns/example.org/tcp/1/p2p/{other}",),
    }
