"""Two nodes and a way between them, for every carrier: what the contract of streams is tested on.

A carrier joins the suite with an entry in :data:`RIGS`; that of the swarm needs :class:`Daemons`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.peers.base import Carrier, CarrierName, Handler, Peer, PeerStream
from node.exchange.peers.direct import DirectCarrier
from node.exchange.peers.loopback import pair
from node.exchange.peers.serving import TaskSet, serve
from node.exchange.peers.tunnel import TunnelCarrier
from node.exchange.swarm import ports
from node.exchange.swarm.carrier import SwarmCarrier
from node.exchange.swarm.daemon import Daemon
from node.exchange.swarm.secret import RunSecret
from node.exchange.swarm.setting import SwarmSetting
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos.address import Address
from protos.invite import Invite
from tests.coordinator.coordinator_rig import join_request
from tests.coordinator.server_rig import TOKEN, Site, site
from tests.node.relay import Relay

DEADLINE = 100.0  # seconds of every wait, which a loaded machine may need
RUN = "run-digest"
LOOPBACK = Address("127.0.0.1", 0)
T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    """Wait, but not for ever."""
    return await asyncio.wait_for(awaitable, DEADLINE)


@dataclass
class Served:
    """A stream at the node that was called; its handler returns with :meth:`leave`, or fails."""

    stream: PeerStream
    over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def leave(self, failure: Exception | None = None) -> None:
        if failure is not None:
            self.over.set_exception(failure)
        elif not self.over.done():
            self.over.set_result(None)


@dataclass
class Rig:
    """
    Attributes:
        calling: the carrier of the node that calls.
        called: that of the other one, whose handler is the rig's.
        peer: the other one.
        nobody: a peer that cannot be reached.
        cut: break the way between both, without a word to either.
    """

    calling: Carrier
    called: Carrier
    peer: Peer
    nobody: Peer
    cut: Callable[[], None]
    arrivals: asyncio.Queue[Served]

    async def stream(self) -> tuple[PeerStream, Served]:
        """Both ends of a new one."""
        mine = await soon(self.calling.open(self.peer))
        return mine, await soon(self.arrivals.get())

    async def close(self) -> None:
        await soon(self.calling.close())
        await soon(self.called.close())


def hall() -> tuple[Handler, asyncio.Queue[Served]]:
    """A handler that hands its streams to the test."""
    arrivals: asyncio.Queue[Served] = asyncio.Queue()

    async def handler(stream: PeerStream) -> None:
        served = Served(stream)
        arrivals.put_nowait(served)
        await served.over

    return handler, arrivals


class MemoryCarrier:
    """Streams within the process: what all carriers have to be like."""

    name: CarrierName = "direct"

    def __init__(self, handler: Handler, peer: str) -> None:
        self._handler, self._peer = handler, peer
        self._tasks = TaskSet()
        self._streams: list[PeerStream] = []

    def reaches(self, peer: Peer) -> bool:
        return True

    async def open(self, peer: Peer) -> PeerStream:
        if peer.node != self._peer or self._tasks.closed:
            raise Trouble(Kind.NOBODY_LISTENS, f"there is no {peer.node}")
        mine, theirs = pair()
        self._streams.append(mine)
        self._tasks.start(serve(theirs, self._handler), "stream")
        return mine

    def cut(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def close(self) -> None:
        self.cut()
        await self._tasks.close()


@contextlib.asynccontextmanager
async def memory_rig() -> AsyncIterator[Rig]:
    handler, arrivals = hall()
    carrier = MemoryCarrier(handler, "node-1")
    rig = Rig(carrier, MemoryCarrier(handler, ""), Peer("node-1"), Peer("node-9"), carrier.cut, arrivals)
    yield rig
    await rig.close()


@contextlib.asynccontextmanager
async def direct_rig() -> AsyncIterator[Rig]:
    handler, arrivals = hall()
    unused, _ = hall()
    called, calling = DirectCarrier(handler, RUN), DirectCarrier(unused, RUN)
    relay = Relay((await called.listen(LOOPBACK)).port)
    peer, nobody = Peer("node-1", direct=f"127.0.0.1:{relay.port}"), Peer("node-9", direct="127.0.0.1:1")
    rig = Rig(calling, called, peer, nobody, relay.cut, arrivals)
    try:
        yield rig
    finally:
        await rig.close()
        relay.close()


@dataclass
class Standing:
    """A session, as far as a tunnel needs one."""

    secret: str
    node: str
    generation: int = 0
    connected: bool = True
    halted: asyncio.Event = field(default_factory=asyncio.Event)

    async def confirmed(self, order: Any) -> Any:
        return order

    async def offered_again(self, order: Any) -> Any:
        return order

    async def superseded(self, order: Any) -> None:
        await asyncio.Event().wait()


class TunnelNode:
    """A node with a session at a real coordinator that takes no part in the run, but is called."""

    def __init__(self, here: Site, handler: Handler, port: int | None = None) -> None:
        invite = Invite(TOKEN, "127.0.0.1", port or here.server.address.port)
        self._here = here
        self.link = Link(invite, Meter(), Limits())
        self._handler = handler
        self._tasks = TaskSet()

    async def join(self) -> TunnelNode:
        self.link.open()
        request = join_request(self._here.table, state_bytes=self._here.state.nbytes)
        reply = await soon(self.link.join(request))
        self.standing = Standing(reply.session, reply.node)
        self.carrier = TunnelCarrier(self.link, self.standing, self._handler)
        self.session = self.link.session(reply.session)
        await soon(self.session.write(pb.NodeMessage(heartbeat=pb.Heartbeat())))
        while not self._here.hub.run.registry.nodes[reply.node].in_session:
            await asyncio.sleep(0.002)
        self._tasks.start(self._listen(), "session")
        return self

    async def _listen(self) -> None:
        with contextlib.suppress(Exception):  # the test breaks it
            while isinstance(message := await self.session.read(), pb.CoordinatorMessage):
                if message.WhichOneof("kind") == "tunnel":
                    self.carrier.accept(message.tunnel.key, message.tunnel.caller)

    async def close(self) -> None:
        await self.carrier.close()
        await self._tasks.close()
        self.session.cancel()
        await self.link.close()


@contextlib.asynccontextmanager
async def tunnel_rig() -> AsyncIterator[Rig]:
    async with site(nodes=3) as here, AsyncExitStack() as stack:
        relay = Relay(here.server.address.port)
        stack.callback(relay.close)
        handler, arrivals = hall()
        unused, _ = hall()
        called = await TunnelNode(here, handler, relay.port).join()
        stack.push_async_callback(called.close)
        calling = await TunnelNode(here, unused).join()
        stack.push_async_callback(calling.close)
        peer, nobody = Peer(called.standing.node), Peer("node-9")
        yield Rig(calling.carrier, called.carrier, peer, nobody, relay.cut, arrivals)


class Daemons:
    """libp2p for two nodes, one of which calls the other by a way that can be cut; for many rigs, as
    starting it takes seconds. In the event loop of :meth:`start`."""

    def __init__(self) -> None:
        port = ports.choose(["127.0.0.1"], 0, quic=False)
        self.relay = Relay(port)
        # Told its own address, libp2p would come back by that.
        announced = (f"/ip4/127.0.0.1/tcp/{self.relay.port}",)
        self.called = self._daemon(SwarmSetting(("127.0.0.1",), port, quic=False, announce=announced))
        self.calling = self._daemon(SwarmSetting(()))
        self._numbers = itertools.count()

    def _daemon(self, setting: SwarmSetting) -> Daemon:
        return Daemon(setting, lambda text: None)

    async def start(self) -> None:
        await soon(asyncio.gather(self.called.start(), self.calling.start()))

    async def close(self) -> None:
        await soon(asyncio.gather(self.called.close(), self.calling.close()))
        self.relay.close()

    async def carrier(self, daemon: Daemon, secret: RunSecret, handler: Handler) -> SwarmCarrier:
        """Another one of a daemon that runs."""
        carrier = SwarmCarrier(daemon, secret, handler, say=lambda text: None)
        await carrier._listen(daemon.p2p)
        return carrier

    @contextlib.asynccontextmanager
    async def rig(self) -> AsyncIterator[Rig]:
        self.relay.restore()
        handler, arrivals = hall()
        unused, _ = hall()
        secret = RunSecret(f"token of rig {next(self._numbers)}")
        called = await self.carrier(self.called, secret, handler)
        calling = await self.carrier(self.calling, secret, unused)
        peer = Peer("node-1", swarm=self.called.peer, swarm_addresses=await self.called.addresses())
        dead = "QmVvbzNhJvkVWD3uTNHUGo6JrqmfYQbGVSRTdZxpBwdvyU"
        nobody = Peer("node-9", swarm=dead, swarm_addresses=(f"/ip4/127.0.0.1/tcp/9/p2p/{dead}",))
        rig = Rig(calling, called, peer, nobody, self.relay.cut, arrivals)
        try:
            yield rig
        finally:
            await rig.close()


MakeRig = Callable[[], AbstractAsyncContextManager[Rig]]

RIGS: dict[str, MakeRig] = {"memory": memory_rig, "direct": direct_rig, "tunnel": tunnel_rig}
SWARM = "swarm"  # made by daemons that have been started
NEEDS_SWARM = pytest.mark.skipif(
    importlib.util.find_spec("hivemind") is None, reason="hivemind is missing: pip install '.[swarm]'"
)
