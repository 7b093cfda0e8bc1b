"""Which nodes can be reached by others, and the topology that follows: who reduces which slice of a round.

A topology has a number. There is a new one whenever the nodes, what is known of their links, or the ways to
them have changed, and whenever a reducer fails in the middle of a round.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from coordinator.estimates import evened
from coordinator.events import TopologyMade
from coordinator.nodes import Node
from coordinator.publication import Publication
from coordinator.reachability import SWARMING, Known, is_relayed, judge, swarm_places
from coordinator.shares import Site
from coordinator.topology import Assigned, moved, renewed
from protos.address import peer
from protos.atoll_pb2 import CoordinatorMessage, Endpoint, PeerNode
from protos.buckets import BucketTable
from protos.certificate import MAX_BYTES
from protos.refusal import BAD_MESSAGE

if TYPE_CHECKING:
    from coordinator.run import Run

log = logging.getLogger(__name__)

COUNT_BITS: Final = 20  # of a topology's number, for those of one coordinator
MAX_TEXT: Final = 256  # characters of an address
MAX_ADDRESSES: Final = 16
DETOUR_ROUNDS: Final = 64  # for which a node is believed that it cannot call another one
SHUNNED_ROUNDS: Final = 8  # in which a node that failed as a reducer is none

# HOST:PORT and certificate; why nobody answers there, empty if somebody does
Dial = Callable[[str, bytes], Awaitable[str]]
Knock = Callable[[Sequence[str]], Awaitable[str]]  # likewise, addresses of the swarm


@dataclass
class Ways:
    """The ways to a node.

    Attributes:
        direct: HOST:PORT that has answered; empty: none.
        swarm: whether one of its own addresses of the swarm has answered.
        why_not: why not, in words.
        dialing: the address that is being tried, and waited for: what did not answer before is not.
        shunned: the round up to which it does not reduce, as it has failed in one.
        detours: nodes that reach it through the coordinator only, whatever it has announced; each with the
            round up to which that is taken for so.
        attempt: to reach it, one at a time.
    """

    endpoint: Endpoint
    direct: str = ""
    swarm: bool = False
    why_not: str = ""
    dialing: str = ""
    shunned: int = -1
    detours: dict[str, int] = field(default_factory=dict)
    attempt: asyncio.Task[None] | None = field(default=None, repr=False)

    def give_up(self) -> None:
        """Try the address no longer."""
        if self.attempt is not None:
            self.attempt.cancel()


class Mesh:
    """The nodes of a run as they reach each other.

    Args:
        run: whose nodes they are.
        transport: of the run file; with ``"hub"`` nothing travels between nodes.
        secret: from which the tokens follow that nodes show each other.

    Attributes:
        dial: tries an address; ``None``: addresses are believed.
        knock: tries those of the swarm; likewise.
        number: of the present topology. Nodes and reducers go by the order of the numbers, also when the
            coordinator is started again: the high bits are the second of that.
        reason: why slices travel between nodes, or why not, in words.
    """

    def __init__(self, run: Run, transport: str, secret: bytes) -> None:
        self.dial: Dial | None = None
        self.knock: Knock | None = None
        self.number = int(run.wall()) << COUNT_BITS
        self.reason = "the run file says transport = 'hub'" if transport == "hub" else "nobody is here"
        self._run = run
        self._transport = transport
        self._publication = Publication(secret)
        self._ways: dict[str, Ways] = {}
        self._assigned: dict[str, tuple[Assigned, ...]] = {}  # by the digest of the table
        self._made_of: object = None

    @property
    def settling(self) -> str:
        """Whose address is being tried: the next round waits a moment for that; empty: nobody's."""
        present = {node.node for node in self._run.registry.in_session()}
        return ", ".join(name for name, ways in self._ways.items() if ways.dialing and name in present)

    @property
    def reached(self) -> list[tuple[str, bytes]]:
        """HOST:PORT of the nodes that have been reached there, and their certificates."""
        return [(ways.direct, ways.endpoint.certificate) for ways in self._ways.values() if ways.direct]

    def assigned(self, table: BucketTable) -> Sequence[Assigned]:
        """Who reduces what of a table by the present topology; nobody: the coordinator does it all."""
        return self._assigned.get(table.digest, ())

    def endpoint(self, name: str) -> Endpoint | None:
        """What a node has announced last; ``None``: that it takes no part in what travels between nodes."""
        ways = self._ways.get(name)
        return None if ways is None else ways.endpoint

    def way(self, caller: str, other: str) -> str:
        """How a node calls another one, as far as is known: ``"direct"``, ``"swarm"``, or ``"tunnel"``
        through the coordinator."""
        ways = self._ways.get(other)
        if ways is None or ways.detours.get(caller, -1) >= self._run.round:
            return "tunnel"
        if ways.direct:
            return "direct"
        return "swarm" if ways.endpoint.swarm and self._transport in SWARMING else "tunnel"

    # --------------------------------------------------------------------------------------------- endpoints

    def announced(self, node: Node, endpoint: Endpoint) -> None:
        """A node tells how it can be reached."""
        texts = (endpoint.direct, endpoint.swarm, *endpoint.swarm_addresses)
        sound = all(len(text) <= MAX_TEXT and text.isprintable() for text in texts)
        rates = (endpoint.uplink, endpoint.downlink)
        if (
            not sound
            or len(endpoint.swarm_addresses) > MAX_ADDRESSES
            or not all(0 <= r < 1e15 for r in rates)
            or len(endpoint.certificate) > MAX_BYTES
        ):
            self._run.count(BAD_MESSAGE)
            return
        before = self._ways.get(node.node)
        ways = self._ways[node.node] = Ways(endpoint)
        if before is not None:
            ways.shunned = before.shunned
            if _places(endpoint) == _places(before.endpoint):  # else others may call it otherwise now
                ways.detours = before.detours
            before.give_up()
        address = seen_at(endpoint.direct, node.address) if self._transport in ("auto", "direct") else ""
        swarm = self._transport in SWARMING and bool(endpoint.swarm) and not is_relayed(endpoint)
        if before is not None and _places(endpoint) == _places(before.endpoint):
            ways.swarm = before.swarm
        same = before is not None and before.endpoint.certificate == endpoint.certificate
        if address and (self.dial is None or (same and before is not None and before.direct == address)):
            ways.direct = address
        if self.knock is None:
            ways.swarm = swarm
        if ways.direct or ways.swarm or not (address or swarm):
            return
        ways.why_not = "" if before is None else before.why_not
        ways.dialing = "" if ways.why_not else address or endpoint.swarm
        ways.attempt = asyncio.ensure_future(self._try(node.node, ways, address, swarm))

    async def _try(self, name: str, ways: Ways, address: str, swarm: bool) -> None:
        """Try a node's address, and those of the swarm at the same time; either may be missing."""
        calls: dict[str, Awaitable[str]] = {}
        if address and self.dial is not None:
            calls[address] = self.dial(address, ways.endpoint.certificate)
        if swarm and self.knock is not None:
            places = swarm_places(ways.endpoint.swarm_addresses)
            calls[f"{', '.join(places) or ways.endpoint.swarm} in the swarm"] = self.knock(places)
        reasons = await asyncio.gather(*(_why_not(where, call) for where, call in calls.items()))
        ways.dialing = ""
        if self._ways.get(name) is not ways:
            return
        for where, reason in zip(calls, reasons, strict=True):
            if reason:
                log.info("%s cannot be reached at %s: %s", name, where, reason)
            elif where == address:
                ways.direct = address
            else:
                ways.swarm = True
        ways.why_not = "" if ways.direct or ways.swarm else "; ".join(reasons)
        self._run.newcomer_moved()

    def detour(self, node: Node, other: str) -> None:
        """A node reaches another one through the coordinator only."""
        if other in self._ways and other != node.node:
            self._ways[other].detours[node.node] = self._run.round + DETOUR_ROUNDS

    def departed(self, node: Node) -> None:
        """A node is gone."""
        if (gone := self._ways.pop(node.node, None)) is not None:
            gone.give_up()
        for ways in self._ways.values():
            ways.detours.pop(node.node, None)

    def close(self) -> None:
        """Try no more addresses."""
        for ways in self._ways.values():
            ways.give_up()

    # ---------------------------------------------------------------------------------------------- topology

    def slices(self, table: BucketTable) -> Sequence[Assigned] | None:
        """Who reduces what in the next round, told to all nodes; ``None``: the coordinator does it."""
        run = self._run
        if self._transport == "hub":
            return None
        present, members = run.registry.in_session(), run.registry.members()
        silent = [node.node for node in members if node.node not in self._ways]
        sites = self._sites(members)
        made_of = (
            tuple(sites),
            tuple((node.node, node.secret, self._way_key(node.node)) for node in present),
            tuple(silent),
        )
        if made_of != self._made_of:
            self._made_of = made_of
            self._plan(sites, silent)
            self._publish()
        return self._assigned.get(table.digest)

    def _plan(self, sites: Sequence[Site], silent: Sequence[str]) -> None:
        before, self._assigned = self._assigned, {}
        if silent:
            self.reason = f"{', '.join(silent)}: deals with nobody but the coordinator"
            return
        for table in self._run.tables.tables:
            planned = renewed(table, before.get(table.digest, ()), sites)
            self.reason = planned.reason
            if not planned.slices:
                self._assigned = {}
                return
            self._assigned[table.digest] = planned.slices

    def move(self, table: BucketTable, failed: Mapping[str, str]) -> Sequence[Assigned]:
        """In the middle of a round others take the slices of nodes that have failed; told to all nodes.

        If nobody else is able, one that can be called through the coordinator alone; with nobody left at all
        they stay.
        """
        run, before = self._run, self._assigned[table.digest]
        for name in failed:
            if name in self._ways:
                self._ways[name].shunned = run.round + SHUNNED_ROUNDS
        sites = self._sites(run.registry.members())
        planned = moved(before, failed, sites)
        if not planned.slices:
            not_them = {*failed, *run.scrutiny.barred()}
            others = [replace(site, able=site.node not in not_them) for site in sites]
            planned = moved(before, failed, others)
        if not planned.slices:
            planned = moved(before, (), [replace(site, able=True) for site in sites])
        self._made_of = None  # the next round begins with another plan
        self.reason = planned.reason
        self._assigned[table.digest] = planned.slices or before
        self._publish()
        return self._assigned[table.digest]

    def arrived(self, node: Node) -> None:
        """A node has opened its session: all others are told how to deal with it. Also where nobody reduces
        now, if it lacks results of rounds before: they may lie at nodes."""
        behind = self._run.begun and node.claim.round < self._run.round
        if self._assigned or (behind and self._transport != "hub"):
            self._publish(tell=bool(self._assigned))

    def _sites(self, members: Sequence[Node]) -> list[Site]:
        ways = {node.node: self._ways[node.node] for node in members if node.node in self._ways}
        reach = judge({name: _known(one) for name, one in ways.items()}, self._transport)
        sites = [
            self._site(node.node, ways[node.node], able=reach[node.node].able)
            if node.node in ways
            else Site(node.node, None, None, able=False)
            for node in members
        ]
        measured_up = {name for name, one in ways.items() if one.endpoint.uplink_measured}
        measured_down = {name for name, one in ways.items() if one.endpoint.downlink_measured}
        return evened(sites, measured_up, measured_down)

    def _site(self, name: str, ways: Ways, *, able: bool) -> Site:
        return Site(
            name,
            ways.endpoint.uplink if ways.endpoint.uplink >= 1 else None,  # less is a wrong measurement
            ways.endpoint.downlink if ways.endpoint.downlink >= 1 else None,
            able=able
            and ways.shunned < self._run.round
            and name not in self._run.scrutiny.barred()
            and not self._remote(ways),
        )

    def _remote(self, ways: Ways) -> bool:
        """Whether more than half of the other members need the coordinator for calling a node."""
        names = self._run.registry.names()
        round_index = self._run.round
        return 2 * sum(ways.detours.get(name, -1) >= round_index for name in names) > len(names) - 1

    def _way_key(self, name: str) -> tuple[str, ...]:
        ways = self._ways.get(name)
        if ways is None:
            return ()
        return (ways.direct, *_places(ways.endpoint))

    # ---------------------------------------------------------------------------------------------- messages

    def _publish(self, *, tell: bool = True) -> None:
        run = self._run
        self.number += 1
        reducers = sorted({one.reducer for assigned in self._assigned.values() for one in assigned})
        present = run.registry.in_session()
        # A reducer may have left since, and its slices go to another only as a round opens or is in flight.
        named = dict.fromkeys([*(node.node for node in present), *reducers])
        self._publication.revise(self.number, map(self._peer, named), self._assigned)
        for node in present:
            topology = self._publication.message(node.node, node.topology)
            node.topology = self.number
            run.send(node, CoordinatorMessage(topology=topology))
        if tell:
            count = self.number % (1 << COUNT_BITS)
            run.tell(TopologyMade(count, run.round, tuple(reducers), self.reason))

    def _peer(self, name: str) -> PeerNode:
        """A node and the ways to it."""
        peer, ways = PeerNode(node=name), self._ways.get(name)
        if ways is not None:
            if ways.direct:
                peer.direct, peer.certificate = ways.direct, ways.endpoint.certificate
            if self._transport in SWARMING:
                peer.swarm = ways.endpoint.swarm
                peer.swarm_addresses.extend(ways.endpoint.swarm_addresses)
        return peer


async def _why_not(where: str, call: Awaitable[str]) -> str:
    """Why nobody answers there; empty if somebody does."""
    try:
        return await call
    except Exception as error:
        log.exception("trying %s", where)
        return f"trying it failed: {error!r}"


def _known(ways: Ways) -> Known:
    return Known(bool(ways.direct), bool(ways.endpoint.swarm), is_relayed(ways.endpoint), ways.swarm)


def _places(endpoint: Endpoint) -> tuple[str, ...]:
    """Where a node says that it can be called, and how it proves who it is."""
    return (endpoint.direct, endpoint.certificate.hex(), endpoint.swarm, *endpoint.swarm_addresses)


def seen_at(announced: str, address: str) -> str:
    """The address at which a node can be tried: of one that names a port alone, with the host from which it
    has called, ``address`` in gRPC's words."""
    host, _, port = announced.rpartition(":")
    if not port.isdigit():
        return ""
    if host:
        return announced
    seen = peer(address)
    return f"{seen.rpartition(':')[0]}:{port}" if seen != address else ""
