"""The tunnel: streams between nodes that cannot reach each other, through the coordinator."""

from __future__ import annotations

import logging
from typing import Final

from grpc import aio

from node.exchange.link import Link
from node.exchange.peers.base import CarrierName, Handler, Peer, PeerStream
from node.exchange.peers.call_stream import CallStream
from node.exchange.peers.calls import Calls
from node.exchange.peers.serving import TaskSet, serve
from node.exchange.standing import Standing
from node.exchange.trouble import Trouble
from protos.wire import TUNNEL_KEY, TUNNEL_TO_KEY

log = logging.getLogger(__name__)

OPEN_SECONDS: Final = 15.0  # more than the coordinator gives the other node to come


class TunnelCarrier:
    """Implements :class:`node.exchange.peers.base.Carrier`. Used in the network thread.

    Args:
        link: to the coordinator, opened.
        session: in whose name tunnels are asked for.
        handler: of streams that other nodes open.
        seconds: for a stream to be opened.
    """

    name: CarrierName = "tunnel"

    def __init__(
        self, link: Link, session: Standing, handler: Handler, *, seconds: float = OPEN_SECONDS
    ) -> None:
        self._link = link
        self._session = session
        self._handler = handler
        self._seconds = seconds
        self._tasks = TaskSet()
        self._calls = Calls(self._tasks)

    def reaches(self, peer: Peer) -> bool:
        """Whoever has a session."""
        return True

    async def open(self, peer: Peer) -> PeerStream:
        """See the protocol."""
        return await self._open(TUNNEL_TO_KEY, peer.node, peer.node)

    def accept(self, key: str, caller: str) -> None:
        """The coordinator says that node ``caller`` calls: go to the tunnel and let the handler see to it."""
        self._tasks.start(self._answer(key, caller), f"tunnel from {caller}")

    async def close(self) -> None:
        """See the protocol."""
        await self._tasks.close()

    async def _answer(self, key: str, caller: str) -> None:
        try:
            stream = await self._open(TUNNEL_KEY, key, caller)
        except Trouble as trouble:  # the caller hears of it from the coordinator
            log.info("%s called through the coordinator in vain: %s", caller, trouble)
            return
        await serve(stream, self._handler)

    async def _open(self, key: str, value: str, peer: str) -> CallStream:
        def diagnosis(error: aio.AioRpcError) -> Trouble:
            return self._link.trouble(error, self._seconds).of_a_bulk_call()

        self._calls.check()
        call = self._link.tunnel(self._session.secret, key, value)
        return await self._calls.open(
            call, f"{peer} through the coordinator", diagnosis, seconds=self._seconds
        )
