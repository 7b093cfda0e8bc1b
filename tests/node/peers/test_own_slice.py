"""A node's own slice waits until something of all others is on its way, but for none that does not move."""

from __future__ import annotations

import asyncio

import pytest

from node.exchange.peers import ways
from node.exchange.peers.base import Peer, PeerStream
from node.exchange.peers.loopback import Loopback, pair
from protos.wire import CHUNK, decode_frame
from tests.coordinator.contribution_rig import random_payload, voted_table
from tests.node.peers.peer_rig import DEADLINE, Coordinator, MemoryCarrier

TABLE = voted_table(300_000)
NAMES = [f"node-{index}" for index in range(3)]


class Watched:
    """A stream that tells of the chunks that are written to it."""

    def __init__(self, stream: PeerStream, where: str, went: asyncio.Queue[str]) -> None:
        self._stream, self._where, self._went = stream, where, went
        self.read, self.end, self.cancel = stream.read, stream.end, stream.cancel

    async def write(self, message: bytes) -> None:
        if decode_frame(message).kind == CHUNK:
            self._went.put_nowait(self._where)
        await self._stream.write(message)


class WatchedCarrier(MemoryCarrier):
    """Opens streams that are watched; to ``waits_for`` only once it is let."""

    def __init__(self, coordinator: Coordinator, went: asyncio.Queue[str]) -> None:
        super().__init__("direct", coordinator, NAMES[0])
        self.went, self.waits_for, self.let = went, "", asyncio.Event()

    async def open(self, peer: Peer) -> PeerStream:
        if peer.node == self.waits_for:
            await self.let.wait()
        return Watched(await super().open(peer), peer.node, self.went)


def watched(monkeypatch: pytest.MonkeyPatch, run: Coordinator) -> WatchedCarrier:
    """The first node's carrier; of what it sends to itself it tells as well."""
    carrier = WatchedCarrier(run, asyncio.Queue())
    first = run.nodes[NAMES[0]]

    def watched_pair() -> tuple[PeerStream, Loopback]:
        mine, theirs = pair()
        return Watched(mine, NAMES[0], carrier.went), theirs

    def to_oneself() -> PeerStream:
        with monkeypatch.context() as patch:
            patch.setattr(ways, "pair", watched_pair)
            return plain()

    plain = first.rounds._ways._to_oneself
    monkeypatch.setattr(first.rounds._ways, "_to_oneself", to_oneself)
    first.rounds._ways._carriers[:] = [carrier]
    return carrier


@pytest.mark.parametrize("held", ["", NAMES[1]])
def test_what_travels_begins_first(monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    async def test() -> None:
        run = Coordinator(TABLE, NAMES)
        run.plan(NAMES)
        carrier = watched(monkeypatch, run)
        carrier.waits_for = held
        order = run.open(NAMES)
        votes = [
            asyncio.ensure_future(run.nodes[name].reduce(order, random_payload(index, TABLE)))
            for index, name in enumerate(NAMES)
        ]
        order_seen: list[str] = []
        while NAMES[0] not in order_seen:
            order_seen.append(await carrier.went.get())
        assert set(order_seen[:-1]) == set(NAMES[1:]) - {held}
        carrier.let.set()
        await asyncio.gather(*votes)
        assert len({bytes(run.nodes[name].into) for name in NAMES}) == 1
        await run.close()

    asyncio.run(asyncio.wait_for(test(), DEADLINE))
