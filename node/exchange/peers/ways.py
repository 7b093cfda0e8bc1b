"""Ways: by which carrier another node is reached, and which one has to stand in when it is not."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from node.exchange.meter import Kind as Counted
from node.exchange.meter import Meter
from node.exchange.peers.base import Carrier, Handler, Peer, PeerStream
from node.exchange.peers.loopback import pair
from node.exchange.peers.metered import Metered
from node.exchange.retry import Say
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire

OWN: Final = "own"  # the way of a node to itself

_ORDER: Final = ("direct", "swarm", "tunnel")  # from the cheapest to the dearest
_SHUN_SECONDS: Final = 120.0  # a way that failed is the last choice for so long
_WORDS: Final = {
    "direct": "directly",
    "swarm": "by the swarm",
    "tunnel": "through the coordinator",
}


class Ways:
    """Opens streams to other nodes, and to this one.

    Args:
        carriers: that this node has.
        serve: takes streams of this node to itself.
        meter: counts what goes to other nodes.
        now: seconds.
        say: receives a sentence when the way to a node is not the best one there is, or is another than
            before.
        run_digest: of the run, for the first message of a stream.
        detour: is told the name of a node that can be reached through the coordinator only, though it has
            better ways, and why.
    """

    def __init__(
        self,
        carriers: Sequence[Carrier],
        serve: Handler,
        *,
        meter: Meter,
        now: Callable[[], float],
        say: Say,
        run_digest: str,
        detour: Callable[[str, str], None] = lambda node, reason: None,
    ) -> None:
        self._run_digest = run_digest
        self._detour = detour
        self._carriers = sorted(carriers, key=lambda carrier: _ORDER.index(carrier.name))
        self._serve, self._meter, self._now, self._say = serve, meter, now, say
        self._shunned: dict[tuple[str, ...], float] = {}  # until when
        self._told: dict[str, str] = {}
        self._detours: dict[str, float] = {}  # when that was told last
        self._serving: set[asyncio.Future[Any]] = set()

    async def open(
        self, peer: Peer, me: str, up: Counted, down: Counted, avoid: Collection[str] = ()
    ) -> tuple[str, PeerStream]:
        """A stream to ``peer`` by the best way that works, and that way's name.

        Args:
            peer: whom to reach.
            me: name of this node.
            up: what is sent counts as.
            down: what comes counts as.
            avoid: ways that are no choice.

        Raises:
            Trouble: there is none, with what became of each; passing.
        """
        if peer.node == me:
            return OWN, self._to_oneself()
        reasons: list[str] = []
        for carrier in self._choices(peer):
            if carrier.name in avoid:
                continue
            try:
                stream = await carrier.open(peer)
            except Trouble as trouble:
                self.failed(peer, carrier.name)
                reasons.append(f"{_WORDS[carrier.name]}: {trouble}")
            else:
                self._tell(peer, carrier.name, reasons)
                return carrier.name, Metered(stream, self._meter, up, down, peer.node)
        because = "; ".join(reasons) or "no way is left that both nodes have"
        raise Trouble(Kind.UNREACHABLE, f"{peer.node} cannot be reached ({because})")

    def hello(self, peer: Peer, me: str) -> pb.PeerHello:
        """The first message to ``peer``, but for what it is about."""
        return pb.PeerHello(
            protocol=wire.PROTOCOL, run_digest=self._run_digest, sender=me, token=peer.call_token
        )

    def failed(self, peer: Peer, way: str) -> None:
        """A stream to ``peer`` has failed: other ways come first for a while."""
        now = self._now()
        self._shunned = {key: until for key, until in self._shunned.items() if until > now}
        self._shunned[_key(peer, way)] = now + _SHUN_SECONDS

    def in_use(self, nodes: Collection[str]) -> Counter[str]:
        """How many of these nodes were last called by each way; any thread may ask."""
        return Counter(way for node, way in list(self._told.items()) if node in nodes)

    def close(self) -> None:
        """End the streams of this node to itself."""
        for task in self._serving:
            task.cancel()

    def _choices(self, peer: Peer) -> list[Carrier]:
        now = self._now()
        choices = [carrier for carrier in self._carriers if carrier.reaches(peer)]
        return sorted(choices, key=lambda carrier: self._shunned.get(_key(peer, carrier.name), now) > now)

    def _to_oneself(self) -> PeerStream:
        mine, theirs = pair()
        task = asyncio.ensure_future(self._serve(theirs))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        return mine

    def _tell(self, peer: Peer, way: str, reasons: list[str]) -> None:
        best = next(carrier.name for carrier in self._carriers if carrier.reaches(peer))
        if self._told.get(peer.node, best) != way:
            because = f" ({'; '.join(reasons)})" if reasons else ""
            self._say(f"{peer.node} is reached {_WORDS[way]} now{because}")
        self._told[peer.node] = way
        if way == "tunnel" != best and self._now() - self._detours.get(peer.node, -math.inf) > _SHUN_SECONDS:
            self._detours[peer.node] = self._now()
            self._detour(peer.node, "; ".join(reasons))


def _key(peer: Peer, way: str) -> tuple[str, ...]:
    return peer.node, peer.direct, peer.swarm, way
