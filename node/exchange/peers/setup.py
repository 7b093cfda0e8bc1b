"""The set-up of a node for rounds whose slices travel between nodes: its desk, its ways, and what is told of
them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.exchange.base import ExchangeError
from node.exchange.connections import Connections
from node.exchange.link import Link
from node.exchange.meter import Direction, Kind, Meter
from node.exchange.peers.announcement import Announcement
from node.exchange.peers.base import Carrier, Handler
from node.exchange.peers.desk import Desk
from node.exchange.peers.direct import DirectCarrier
from node.exchange.peers.rates import Rates
from node.exchange.peers.rounds import PeerRounds
from node.exchange.peers.setting import PeerSetting
from node.exchange.peers.tunnel import TunnelCarrier
from node.exchange.retry import Say, Timing
from node.exchange.session import Session
from node.exchange.trouble import Trouble
from node.exchange.whereabouts import Follower
from protos import atoll_pb2 as pb
from protos.buckets import TableSchedule
from protos.certificate import Credential, made
from protos.listening import ListenError

if TYPE_CHECKING:
    from node.exchange.swarm.swarm import Swarm

LISTEN_OPTION = "--peer-listen"


@dataclass(frozen=True)
class Peers:
    """A node that is ready for such rounds.

    Attributes:
        rounds: takes part in them; it is the session's listener.
        endpoint: for the claim with which the node joins.
        rates: what its link carries.
        swarm: that this node is in, if it is in one.
    """

    rounds: PeerRounds
    endpoint: pb.Endpoint
    rates: Rates
    swarm: Swarm | None = None

    def connections(self, node: str) -> Connections:
        """Of this node, as they are now; any thread may ask."""
        return Connections(
            node,
            self.rounds.ways,
            self.endpoint.uplink or self.rates.uplink,
            self.endpoint.downlink or self.rates.downlink,
        )

    async def close(self) -> None:
        """End all streams, and whatever listens."""
        await self.rounds.close()
        if self.swarm is not None:
            await self.swarm.close()


async def open_peers(
    setting: PeerSetting,
    link: Link,
    session: Session,
    *,
    tables: TableSchedule,
    run_digest: str,
    secret: str,
    name: str,
    meter: Meter,
    timing: Timing,
    say: Say,
) -> Peers:
    """Listen as the user wants it, and be the listener of ``session``, which has not been joined.

    Args:
        setting: the user's choices.
        link: to the coordinator, opened.
        session: in whose name tunnels are asked for.
        tables: of the run.
        run_digest: of the run.
        secret: that the nodes of the run share, for the swarm.
        name: of this node, for people.
        meter: counts the bytes.
        timing: clock, sleep and randomness.
        say: receives the ways that there are, and what goes wrong.

    Raises:
        ExchangeError: this node cannot listen as it is wanted; the text says what to do.
    """
    rates = Rates(timing.now)

    def moved(direction: Direction, kind: Kind, nbytes: int) -> None:
        rates.add(direction, nbytes)

    meter.listen(moved)
    desk = Desk(tables, run_digest, tell=session.send, now=timing.now, meter=meter, say=say)
    endpoint = pb.Endpoint(uplink=setting.uplink, downlink=setting.downlink)
    tunnel = TunnelCarrier(link, session, desk.serve)
    carriers: list[Carrier] = [tunnel]
    swarm: Swarm | None = None
    try:
        if setting.transport in ("auto", "direct"):
            credential = made() if link.secure else None
            carriers.append(await _direct(setting, desk.serve, run_digest, endpoint, credential))
        if setting.transport == "swarm" or (setting.transport == "auto" and _has_swarm()):
            swarm = await _swarm(
                setting, desk.serve, endpoint, secret=secret, name=name, timing=timing, say=say
            )
            if swarm is not None:
                carriers.append(swarm.carrier)
                session.follow(Follower(link, swarm.presence, run_digest, timing, say))
    except BaseException:
        for carrier in carriers:
            await carrier.close()
        raise
    if setting.transport != "hub":
        say(_words(endpoint))
    announcement = Announcement(endpoint)

    def after_round() -> None:
        said = announcement.after_round(rates.uplink, rates.downlink)
        if said is not None:
            session.announce(said)

    rounds = PeerRounds(
        desk,
        carriers,
        session,
        tables=tables,
        run_digest=run_digest,
        limits=link.limits,
        timing=timing,
        say=say,
        meter=meter,
        answer=tunnel.accept,
        rates=rates,
        on_round=after_round,
    )
    session.listen(rounds.take)
    return Peers(rounds, endpoint, rates, swarm)


async def _direct(
    setting: PeerSetting,
    serve: Handler,
    run_digest: str,
    endpoint: pb.Endpoint,
    credential: Credential | None,
) -> Carrier:
    carrier = DirectCarrier(serve, run_digest, credential=credential)
    try:
        address = await carrier.listen(setting.listen, LISTEN_OPTION)
    except ListenError as error:
        raise ExchangeError(str(error)) from error
    if credential is not None:
        endpoint.certificate = credential.der
    if setting.announced is not None:
        endpoint.direct = str(setting.announced)
    else:  # nobody connects to 0.0.0.0: the coordinator knows where this node's calls come from
        endpoint.direct = f":{address.port}" if address.is_unspecified else str(address)
    return carrier


async def _swarm(
    setting: PeerSetting,
    serve: Handler,
    endpoint: pb.Endpoint,
    *,
    secret: str,
    name: str,
    timing: Timing,
    say: Say,
) -> Swarm | None:
    from node.exchange.swarm.setting import SwarmSetting
    from node.exchange.swarm.swarm import Swarm

    swarm = Swarm(setting.swarm or SwarmSetting(), secret, name, serve, say=say, timing=timing)
    try:
        await swarm.start()
        addresses = await swarm.addresses()
    except Trouble as trouble:
        await swarm.close()
        if setting.transport == "swarm":
            raise
        say(f"this node goes on without the swarm: {trouble}")
        return None
    endpoint.swarm = swarm.peer
    endpoint.swarm_addresses.extend(addresses)
    return swarm


def _has_swarm() -> bool:
    return importlib.util.find_spec("hivemind") is not None


def _words(endpoint: pb.Endpoint) -> str:
    ways = []
    if endpoint.direct:
        port = endpoint.direct.rpartition(":")[2]
        ways.append(f"at port {port}" if endpoint.direct.startswith(":") else f"at {endpoint.direct}")
    if endpoint.swarm:
        relayed = [text for text in endpoint.swarm_addresses if "/p2p-circuit/" in text]
        ways.append(f"in the swarm at {[*relayed, *endpoint.swarm_addresses, endpoint.swarm][0]}")
    return f"other nodes reach this one {' and '.join((*ways, 'through the coordinator'))}"
