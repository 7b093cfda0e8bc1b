"""Finding out what :mod:`deploy.doctor_network` judges: every step has a deadline, and failing is a fact."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, TypeVar

from coordinator.dialing import meet, reach
from deploy.doctor_facts import Answer, Connect, Family, Lookup, NetworkFacts, Seen, Trial
from deploy.doctor_outlet import Outlet
from node.exchange.peers.base import PeerStream
from node.exchange.peers.direct import DirectCarrier
from node.exchange.peers.setting import ANYWHERE
from node.exchange.probing import WHOLE_SECONDS, Probe
from node.exchange.retry import within
from node.exchange.trouble import Trouble
from protos import atoll_pb2 as pb
from protos.address import Address, AddressError
from protos.certificate import made
from protos.invite import Invite
from protos.listening import ListenError
from protos.tls import PINNED, ClientTls

BUDGET: Final = 12.0  # seconds for everything here
LOOKUP_SECONDS: Final = 3.0
CONNECT_SECONDS: Final = 2.0
CALL_SECONDS: Final = 4.0
TRIAL_SECONDS: Final = 6.0  # the coordinator itself tries for 5
PEER_SECONDS: Final = 3.0
CALLS: Final = 3  # of which the fastest counts
DESTINATIONS: Final = 3  # of connections from one local port
PEERS: Final = 16  # that are tried
ADDRESSES: Final = 2  # of each family that are tried
FAMILIES: Final[tuple[tuple[socket.AddressFamily, Family], ...]] = (
    (socket.AF_INET, "IPv4"),
    (socket.AF_INET6, "IPv6"),
)
_PROXIES: Final = ("grpc_proxy", "https_proxy", "http_proxy")  # in gRPC's order

T = TypeVar("T")
Say = Callable[[str], None]


class Steps:
    """The deadlines of steps that share a budget; ``say`` is told what begins."""

    def __init__(self, budget: float, say: Say, now: Callable[[], float] = time.monotonic) -> None:
        self.say = say
        self._now = now
        self._end = now() + budget

    def left(self, most: float) -> float:
        """Seconds for a step that may take ``most``; a moment at least, for its own words."""
        return max(0.1, min(most, self._end - self._now()))

    async def do(self, most: float, what: str, work: Awaitable[T]) -> T:
        """Do it, or raise Trouble that it took too long."""
        self.say(what)
        return await within(self.left(most), what, work)


async def look(
    invite: Invite,
    say: Say,
    *,
    listen: Address = ANYWHERE,
    budget: float = BUDGET,
    tls: ClientTls = PINNED,
) -> NetworkFacts:
    """Find out about the way to a coordinator. Never raises for what it finds.

    Args:
        invite: of the run.
        say: is told what is being tried.
        listen: where this machine listens while the coordinator tries to connect to it.
        budget: seconds for all of it.
        tls: what this machine brings beside the invite.
    """
    steps = Steps(budget, say)
    facts = NetworkFacts(invite.address, proxy=_proxy(), insecure=invite.insecure)
    lookups = await steps.do(LOOKUP_SECONDS + 1, f"resolving {invite.host}", _lookups(invite.host, steps))
    facts = replace(facts, lookups=lookups)
    found = [address for one in lookups for address in one.addresses[:ADDRESSES]]
    if not found:
        return facts
    connecting = asyncio.gather(*(_connect(address, invite.port, steps) for address in found))
    connects = await steps.do(CONNECT_SECONDS + 1, f"connecting to {invite.address}", connecting)
    facts = replace(facts, connects=tuple(connects))
    probe = Probe(invite, steps.left(CALL_SECONDS), tls=tls)
    probe.open()
    try:
        say(f"asking the coordinator at {invite.address}")
        try:
            answer, reply = await _ask(probe)
        except Trouble as trouble:
            return replace(facts, trouble=(trouble.kind, str(trouble)))
        facts = replace(facts, answer=answer)
        say("measuring the link")
        facts = await _measured(facts, probe, steps)
        say("trying whether this machine and the others can be connected to")
        tried = _peers(reply)[:PEERS]
        (listening, seen), peers = await asyncio.gather(
            asyncio.gather(
                _listening(invite, tls, listen, reply, steps), _seen(invite, tls, facts, reply, steps)
            ),
            asyncio.gather(*(_peer(*peer, reply.run_digest, steps) for peer in tried)),
        )
        more = len(reply.peers) - len(tried)
        return replace(facts, listening=listening, seen=seen, peers=tuple(peers), more_peers=more)
    finally:
        await probe.close()


async def _lookups(host: str, steps: Steps) -> tuple[Lookup, ...]:
    asked = await asyncio.gather(*(_lookup(host, family, name, steps) for family, name in FAMILIES))
    return tuple(asked)


async def _lookup(host: str, family: socket.AddressFamily, name: Family, steps: Steps) -> Lookup:
    began = time.monotonic()
    loop = asyncio.get_running_loop()
    try:
        found = await within(
            steps.left(LOOKUP_SECONDS),
            f"resolving {host}",
            loop.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM),
        )
    except OSError as error:
        return Lookup(name, problem=error.strerror or str(error))
    except Trouble as trouble:
        return Lookup(name, problem=str(trouble))
    addresses = tuple(dict.fromkeys(str(one[4][0]) for one in found))
    return Lookup(name, addresses, time.monotonic() - began)


async def _connect(host: str, port: int, steps: Steps) -> Connect:
    where, began = str(Address(host, port)), time.monotonic()
    try:
        _, writer = await within(
            steps.left(CONNECT_SECONDS), f"connecting to {where}", asyncio.open_connection(host, port)
        )
    except OSError as error:
        return Connect(where, problem=os.strerror(error.errno) if error.errno else str(error))
    except Trouble:
        return Connect(where, problem=f"no answer within {CONNECT_SECONDS:g} s")
    seconds = time.monotonic() - began
    local = str(writer.get_extra_info("sockname")[0])
    writer.transport.abort()
    return Connect(where, seconds, local)


async def _ask(probe: Probe) -> tuple[Answer, pb.ProbeReply]:
    """The fastest of a few answers: the first call makes the connection, and any may meet a pause."""
    best: tuple[Answer, pb.ProbeReply] | None = None
    for _ in range(CALLS):
        sent, began = time.time(), time.monotonic()
        try:
            reply = await probe.ask()
        except Trouble:
            if best is not None:
                break
            raise
        took = time.monotonic() - began
        if best is None or took < best[0].round_trip:
            skew = sent + took / 2 - reply.time
            said = Answer(reply.version, reply.protocol, reply.transport, reply.host, took, skew)
            best = said, reply
    assert best is not None
    return best


async def _measured(facts: NetworkFacts, probe: Probe, steps: Steps) -> NetworkFacts:
    try:
        up, down = await probe.measure(steps.left(WHOLE_SECONDS))
    except Trouble as trouble:
        return replace(facts, unmeasured=str(trouble))
    return replace(facts, up=up, down=down)


async def _listening(
    invite: Invite, tls: ClientTls, listen: Address, reply: pb.ProbeReply, steps: Steps
) -> Trial:
    """Listen as a node does, for as long as the coordinator tries to connect."""
    credential = None if invite.insecure else made()
    carrier = DirectCarrier(_nobody, reply.run_digest, credential=credential)
    probe = Probe(invite, steps.left(TRIAL_SECONDS), tls=tls)
    probe.open()
    try:
        real = await carrier.listen(listen, "--peer-listen")
        address = str(Address(reply.host, real.port)) if reply.host else str(real)
        return Trial(address, (await probe.ask(real.port, credential.der if credential else b"")).why_not)
    except (ListenError, Trouble) as error:
        return Trial(str(listen), str(error))
    finally:
        await probe.close()
        await carrier.close()


async def _seen(
    invite: Invite, tls: ClientTls, facts: NetworkFacts, reply: pb.ProbeReply, steps: Steps
) -> tuple[Seen, ...]:
    """Connections from one local port to the coordinator, and to nodes, as they see them."""
    stood = next((one for one in facts.connects if not one.problem), None)
    if stood is None or facts.proxy:
        return ()
    where = Address.parse(stood.address)
    outlet = Outlet(socket.AF_INET6 if ":" in where.host else socket.AF_INET)
    try:
        through = await outlet.towards(where.host, where.port)
        to = replace(invite, host=through.host, port=through.port)
        probe = Probe(to, steps.left(CALL_SECONDS), tls=tls)
        probe.open()
        try:
            told = await probe.ask()
        finally:
            await probe.close()
        found = [Seen(str(where), outlet.port, str(Address(told.host, told.from_port)))]
        for address, certificate in _peers(reply)[:PEERS]:
            if len(found) == DESTINATIONS:
                break
            node = await _resolved(address, outlet.family)
            if node is not None and node != where:
                through = await outlet.towards(node.host, node.port)
                left = steps.left(PEER_SECONDS)
                met = await meet(str(through), reply.run_digest, left, certificate=certificate)
                if not met.why_not and met.seen:
                    found.append(Seen(address, outlet.port, met.seen))
        return tuple(found)
    except (OSError, Trouble):
        return ()
    finally:
        await outlet.close()


async def _resolved(address: str, family: socket.AddressFamily) -> Address | None:
    """With an IP address of a family."""
    try:
        where = Address.parse(address)
        found = await asyncio.get_running_loop().getaddrinfo(
            where.host, where.port, family=family, type=socket.SOCK_STREAM
        )
    except (AddressError, OSError):
        return None
    return Address(str(found[0][4][0]), where.port)


def _peers(reply: pb.ProbeReply) -> list[tuple[str, bytes]]:
    """Nodes of the run, and the certificates that they show."""
    if len(reply.certificates) != len(reply.peers):
        return []
    return list(zip(reply.peers, reply.certificates, strict=True))


async def _peer(address: str, certificate: bytes, run_digest: str, steps: Steps) -> Trial:
    left = steps.left(PEER_SECONDS)
    return Trial(address, await reach(address, run_digest, left, certificate=certificate))


async def _nobody(stream: PeerStream) -> None:
    """This machine takes part in no run."""


def _proxy() -> str:
    """The setting by which gRPC calls a proxy, if there is one."""
    for name in _PROXIES:
        if os.environ.get(name):
            return f"the proxy of the environment variable {name}"
    return ""
