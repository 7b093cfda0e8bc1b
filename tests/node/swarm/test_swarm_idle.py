"""Raw streams of the swarm that carry one stream after the other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from node.exchange.peers.base import PeerStream
from node.exchange.retry import within
from node.exchange.swarm import idle
from node.exchange.swarm.idle import IdleStreams, asked_again
from node.exchange.swarm.relaying import RawStream
from node.exchange.trouble import Kind, Trouble
from tests.node.swarm.swarm_rig import SECONDS, Site, echo

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Clock:
    """Seconds, set by the test."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds


@contextlib.asynccontextmanager
async def raw_pair() -> AsyncIterator[tuple[RawStream, RawStream]]:
    """Both ends of a raw stream, within this process."""
    ends = [await asyncio.open_connection(sock=one) for one in socket.socketpair()]
    try:
        yield ends[0], ends[1]
    finally:
        for _, writer in ends:
            writer.close()


async def test_one_is_taken_at_once_and_announced() -> None:
    kept = IdleStreams(Clock().now)
    async with raw_pair() as (here, there):
        kept.put("peer", here)
        assert kept.take("another") is None
        assert kept.take("peer") == here
        here[1].write(b"records")
        assert await within(SECONDS, "the announcement", asked_again(there[0]))
        assert await within(SECONDS, "what is behind it", there[0].readexactly(7)) == b"records"
        assert len(kept) == 0 and kept.take("peer") is None


async def test_what_the_other_side_has_closed_is_passed_over() -> None:
    kept = IdleStreams(Clock().now)
    async with raw_pair() as (good, its_end), raw_pair() as (bad, gone):
        kept.put("peer", good)
        kept.put("peer", bad)
        gone[1].close()
        assert await within(SECONDS, "the close", bad[0].read()) == b""
        assert kept.take("peer") == good
        assert await within(SECONDS, "the announcement", asked_again(its_end[0]))


@pytest.mark.parametrize("sent", [b"", b"mor", b"less"])
async def test_whoever_announces_nothing_gets_no_other(sent: bytes) -> None:
    async with raw_pair() as (here, there):
        there[1].write(sent)
        there[1].close()
        assert not await within(SECONDS, "the answer", asked_again(here[0]))


async def test_they_are_few_and_not_kept_for_ever() -> None:
    clock = Clock()
    kept = IdleStreams(clock.now)
    async with contextlib.AsyncExitStack() as stack:
        pairs = [await stack.enter_async_context(raw_pair()) for _ in range(idle._A_PEER + 1)]
        for here, _ in pairs:
            kept.put("peer", here)
        assert len(kept) == idle._A_PEER
        assert await within(SECONDS, "a close", pairs[-1][1][0].read()) == b""
        clock.seconds = idle._IDLE_SECONDS / 2
        kept.prune()
        assert len(kept) == idle._A_PEER
        clock.seconds = idle._IDLE_SECONDS + 1
        kept.prune()
        assert len(kept) == 0
        assert await within(SECONDS, "a close", pairs[0][1][0].read()) == b""
    assert idle._IDLE_SECONDS < idle._LISTEN_SECONDS


async def talk(stream: PeerStream) -> None:
    """Send, hear it back, and come to a proper end."""
    await stream.write(b"x" * 1000)
    await stream.end()
    assert await within(SECONDS, "an echo", stream.read()) == b"x" * 1000
    assert await within(SECONDS, "the end", stream.read()) is None
    await within(SECONDS, "the leave", stream.closed.wait())  # type: ignore[attr-defined]


async def test_streams_one_after_the_other_are_opened_once(sites: list[Site]) -> None:
    """Four times as many as a connection over QUIC has room for, if the closed ones go on counting."""
    one, two = sites
    peer, carrier = await one.peer(), two.swarm.carrier
    before = carrier.opened
    for _ in range(1000):
        await talk(await carrier.open(peer))
    assert carrier.opened == before + 1
    together = [await carrier.open(peer) for _ in range(3)]
    for stream in together:
        await talk(stream)
    assert carrier.opened == before + 3
    assert not one.swarm.carrier._full()


async def test_one_that_was_given_up_carries_no_other(sites: list[Site]) -> None:
    one, two = sites
    peer, carrier = await one.peer(), two.swarm.carrier
    carrier._idle.close()
    before = carrier.opened
    for given_up in (1, 2):
        stream = await carrier.open(peer)
        await stream.write(b"x")
        assert await within(SECONDS, "an echo", stream.read()) == b"x"
        stream.cancel()
        assert carrier.opened == before + given_up

    async def failing(stream: PeerStream) -> None:
        await stream.read()
        raise Trouble(Kind.BROKEN, "this handler fails")

    one.handler = failing
    stream = await carrier.open(peer)
    await stream.write(b"x")
    with pytest.raises(Trouble):
        await within(SECONDS, "the break", stream.read())
    one.handler = echo
    await talk(await carrier.open(peer))
    assert carrier.opened == before + 4


async def test_a_connection_that_opens_no_stream_is_made_anew(
    sites: list[Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sites
    peer, carrier = await one.peer(), two.swarm.carrier
    await talk(await carrier.open(peer))
    carrier._idle.close()
    called, ended = asyncio.Event(), asyncio.Event()

    async def stuck(*_: Any) -> Any:
        called.set()
        await ended.wait()
        raise OSError("its connection was ended")

    disconnect = two.swarm.daemon.disconnect

    async def disconnected(other: str) -> None:
        await disconnect(other)
        assert other == peer.swarm
        ended.set()

    with monkeypatch.context() as patched:
        patched.setattr(two.swarm.daemon.p2p, "call_binary_stream_handler", stuck)
        patched.setattr(two.swarm.daemon, "disconnect", disconnected)
        patched.setattr(carrier, "_open_seconds", 0.5)
        with pytest.raises(Trouble) as caught:
            await carrier.open(peer)
        assert caught.value.kind is Kind.SILENT and called.is_set()
        await within(SECONDS, "the end of the connection", ended.wait())
    await talk(await carrier.open(peer))


async def test_a_connection_that_carries_a_stream_is_left_alone(sites: list[Site]) -> None:
    one, two = sites
    peer, carrier = await one.peer(), two.swarm.carrier
    stream = await carrier.open(peer)
    carrier._start_over(peer.swarm)
    assert not carrier._late
    await talk(stream)
