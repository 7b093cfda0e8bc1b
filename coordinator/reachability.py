"""Whether others can call a node, from what has been measured of the ways to it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from protos.atoll_pb2 import Endpoint

SWARMING: Final = ("swarm", "auto")  # transports by which nodes call each other in the swarm


@dataclass(frozen=True)
class Known:
    """What is known of the ways to a node.

    Attributes:
        direct: its HOST:PORT has answered.
        swarm: it is in the swarm.
        relayed: a relay has taken it on there.
        answered: one of its own addresses of the swarm has answered.
    """

    direct: bool = False
    swarm: bool = False
    relayed: bool = False
    answered: bool = False


@dataclass(frozen=True)
class Verdict:
    """Whether others can call a node, and why or why not, in words."""

    able: bool
    reason: str


def judge(known: Mapping[str, Known], transport: str) -> dict[str, Verdict]:
    """Which nodes others can call, who may therefore reduce.

    One that has only a name in the swarm cannot, as far as anybody knows: to find that out in a round costs
    that round seconds. Where nothing else is there, ``"swarm"`` lets all of these try: nodes of one network
    may reach each other though the coordinator, elsewhere, does not reach them.

    Args:
        known: of every member.
        transport: of the run file.
    """
    found = {name: _judged(one, transport in SWARMING) for name, one in known.items()}
    if transport != "swarm" or any(verdict.able for verdict in found.values()):
        return found
    untried = Verdict(True, "the swarm may know a way: no node has one that has been tried")
    return {name: untried if known[name].swarm else verdict for name, verdict in found.items()}


def _judged(known: Known, swarming: bool) -> Verdict:
    if known.direct:
        return Verdict(True, "its address has answered")
    if not (swarming and known.swarm):
        return Verdict(False, "no address of it has answered")
    if known.relayed:
        return Verdict(True, "a relay of the swarm has taken it on")
    if known.answered:
        return Verdict(True, "its address in the swarm has answered")
    return Verdict(False, "no address of it has answered, and it has no relay in the swarm")


def is_relayed(endpoint: Endpoint) -> bool:
    """Whether a node says that a relay of the swarm has taken it on."""
    return any("/p2p-circuit" in text for text in endpoint.swarm_addresses)


def swarm_places(addresses: Iterable[str]) -> list[str]:
    """HOST:PORT of those multiaddresses that TCP can be tried at, each once; QUIC is not tried."""
    found = []
    for text in addresses:
        words = text.split("/")
        if len(words) < 5 or words[0] or words[3] != "tcp" or "p2p-circuit" in words:
            continue
        _, kind, host, _, port = words[:5]
        if kind in ("ip4", "ip6", "dns", "dns4", "dns6") and port.isdigit() and host:
            found.append(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    return list(dict.fromkeys(found))
