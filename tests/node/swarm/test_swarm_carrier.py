"""Streams over two daemons on loopback; the last test kills one of them."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from node.exchange.peers.base import Peer, PeerStream
from node.exchange.retry import within
from node.exchange.swarm.stream import HEAD_BYTES
from node.exchange.trouble import Kind, Trouble
from protos.wire import MAX_MESSAGE_BYTES
from tests.node.swarm.swarm_rig import SECONDS, WATCHFUL, Site, children_named, echo

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("way", ["to the one it began with", "back"])
async def test_messages_go_both_ways_and_the_ends_are_proper(sites: list[Site], way: str) -> None:
    called, caller = sites if way != "back" else sites[::-1]
    stream = await caller.swarm.carrier.open(await called.peer())
    caller.counted.clear()
    messages = [b"", b"x", os.urandom(MAX_MESSAGE_BYTES), *(bytes([k]) * 70_000 for k in range(5))]

    async def send() -> None:
        for message in messages:
            await stream.write(message)
        await stream.end()

    sending = asyncio.create_task(send())
    back = []
    while (message := await within(SECONDS, "an echo", stream.read())) is not None:
        back.append(message)
    await sending
    assert back == messages
    assert await stream.read() is None
    await within(SECONDS, "the leave", stream.closed.wait())
    # Ends and leaves are counted as well as messages; marks of life may come on top.
    payload = sum(map(len, messages)) + HEAD_BYTES * (len(messages) + 2)
    assert payload <= caller.counted["up"] <= payload + 1000
    assert payload <= caller.counted["down"] <= payload + 1000


async def test_a_slow_reader_holds_the_writer_up_and_the_handlers_return_ends_it(sites: list[Site]) -> None:
    read_on = asyncio.Event()
    taken = 0

    async def slow(stream: PeerStream) -> None:
        nonlocal taken
        await read_on.wait()
        for _ in range(50):
            assert await stream.read() is not None
            taken += 1
        await stream.end()

    one, two = sites
    one.handler = slow
    stream = await two.swarm.carrier.open(await one.peer())
    written = 0

    async def write() -> None:
        nonlocal written
        while True:
            await stream.write(bytes(1 << 20))
            written += 1

    writing = asyncio.create_task(write())
    before = -1
    while before != written:  # until it makes no progress any more
        before = written
        await asyncio.wait({writing}, timeout=0.5)
    assert not writing.done() and written < 48 and not taken
    read_on.set()
    with pytest.raises(Trouble):  # the handler takes what it wants and ends the stream
        await within(SECONDS, "the refusal", writing)
    assert taken == 50
    one.handler = echo


async def test_cancel_is_seen_by_both_sides_at_once(sites: list[Site]) -> None:
    came: asyncio.Future[Trouble] = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()

    async def wait(stream: PeerStream) -> None:
        begun.set()
        try:
            await stream.read()
        except Trouble as trouble:
            came.set_result(trouble)

    one, two = sites
    one.handler = wait
    stream = await two.swarm.carrier.open(await one.peer())
    reading = asyncio.create_task(stream.read())
    await within(SECONDS, "the handler", begun.wait())
    stream.cancel()
    stream.cancel()
    with pytest.raises(Trouble):
        await within(SECONDS, "the reader here", reading)
    with pytest.raises(Trouble):
        await stream.write(b"x")
    assert (await within(SECONDS, "the reader there", came)).kind in (Kind.CUT, Kind.BROKEN)
    one.handler = echo


async def test_a_stranger_gets_no_stream_and_not_into_the_table(sites: list[Site]) -> None:
    one = sites[0]
    stranger = Site("stranger", token="another")
    try:
        await stranger.swarm.start()
        # A run's protocol has a name that follows from the token.
        with pytest.raises(Trouble, match="takes no stream"):
            await stranger.swarm.carrier.open(await one.peer())
        # Even if it is known, the proof is missing.
        stranger.swarm.carrier._protocol = one.swarm.carrier._protocol
        with pytest.raises(Trouble, match="does not have the token") as caught:
            await stranger.swarm.carrier.open(await one.peer())
        assert caught.value.kind is Kind.TOKEN
        await stranger.swarm.close()
        stranger.begin_with(await one.swarm.addresses())
        with pytest.raises(Trouble, match="phase bootstrap: the peers to begin with do not let this node in"):
            await stranger.swarm.start()
    finally:
        await stranger.swarm.close()


async def test_itself_strangers_and_the_dead_are_not_reached(sites: list[Site]) -> None:
    one = sites[0]
    carrier = one.swarm.carrier
    assert not carrier.reaches(await one.peer())
    assert not carrier.reaches(Peer("other"))
    assert not carrier.reaches(Peer("other", swarm="Qm../../etc"))
    key = "QmVvbzNhJvkVWD3uTNHUGo6JrqmfYQbGVSRTdZxpBwdvyU"
    nobody = Peer("nobody", swarm=key, swarm_addresses=(f"/ip4/127.0.0.1/tcp/9/p2p/{key}",))
    assert carrier.reaches(nobody)
    with pytest.raises(Trouble, match="cannot be reached"):
        await within(SECONDS, "the failure", carrier.open(nobody))


async def test_a_frozen_peer_is_given_up(sites: list[Site], monkeypatch: pytest.MonkeyPatch) -> None:
    """libp2p's daemon answers for a node that does nothing more. What was kept of it is let go, too."""
    one, two = sites
    two.swarm.carrier._heartbeat = WATCHFUL
    given_up: asyncio.Queue[str] = asyncio.Queue()
    monkeypatch.setattr(two.swarm.carrier, "_start_over", given_up.put_nowait)
    stream = await two.swarm.carrier.open(await one.peer())
    await stream.write(b"x")
    assert await within(SECONDS, "an echo", stream.read()) == b"x"
    waiting = asyncio.create_task(stream.read())
    beating = one.swarm.carrier._beating
    assert beating is not None
    beating.cancel()
    with pytest.raises(Trouble, match="frozen or cut off") as caught:
        await within(SECONDS, "the silence", waiting)
    assert caught.value.kind is Kind.SILENT
    assert await within(SECONDS, "the new start", given_up.get()) == one.swarm.peer


async def test_a_killed_daemon_breaks_its_streams_and_is_started_again(sites: list[Site]) -> None:
    one, two = sites
    there = await two.peer()
    stream = await two.swarm.carrier.open(await one.peer())
    back = await one.swarm.carrier.open(there)
    for each in (stream, back):
        await each.write(b"x")
        assert await within(SECONDS, "an echo", each.read()) == b"x"
    os.kill(two.swarm.daemon.pid, signal.SIGKILL)
    for each in (stream, back):
        with pytest.raises(Trouble):
            await within(SECONDS, "the break", each.read())
    while "runs again" not in await within(SECONDS, "the restart", two.said.get()):
        pass
    # The same peer at the same port, and in the table again.
    assert (await two.peer()).swarm_addresses == there.swarm_addresses
    stream = await one.swarm.carrier.open(there)
    await stream.write(b"y")
    assert await within(SECONDS, "an echo", stream.read()) == b"y"
    stream.cancel()
    assert len(children_named("p2pd")) == 2
