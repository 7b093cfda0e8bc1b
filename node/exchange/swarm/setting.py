"""How a node takes part in the swarm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from node.exchange.swarm.multiaddress import Multiaddress, ip_part, parse_with_peer


@dataclass(frozen=True)
class SwarmSetting:
    """What the user decides.

    Attributes:
        listen: addresses or host names to listen at; empty: nothing comes in but through relays.
        port: of TCP and of QUIC (UDP); 0: one that is free.
        quic: whether to listen with QUIC too.
        announce: multiaddresses at which others reach this node, beside those it finds out by itself.
        bootstrap: multiaddresses of peers to begin with, each with its peer id; empty: this is the first.
        relays: likewise, of nodes of the run through which others reach this one.
        reachability: ``public``: others reach it, and it serves as their relay; ``private``: they do not;
            ``auto``: libp2p finds out, which takes minutes.
        map_port: ask the router to forward the port (UPnP).
        identity: key file; ``None``: a new identity that ends with the process.
        daemon_seconds: that libp2p's process may take to start.
        bootstrap_seconds: until one of ``bootstrap`` must have answered.
        relay_seconds: until one of ``relays`` must have taken this node on, each in turn.

    Raises:
        ValueError: an address that cannot be used.
    """

    listen: tuple[str, ...] = ("0.0.0.0",)
    port: int = 0
    quic: bool = True
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    reachability: Literal["auto", "public", "private"] = "auto"
    map_port: bool = False
    identity: Path | None = None
    daemon_seconds: float = 60.0
    bootstrap_seconds: float = 60.0
    relay_seconds: float = 30.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port {self.port} is not within 0 to 65535")
        for text in self.announce:
            address = Multiaddress.parse(text)
            if "0" in (address.value("tcp"), address.value("udp")):
                raise ValueError(f"{text}: others cannot dial port 0; name the port that is published")
        for text in (*self.bootstrap, *self.relays):
            parse_with_peer(text)
        for text in self.listening(self.port):
            Multiaddress.parse(text)

    def relay_peers(self) -> tuple[str, ...]:
        """One of the addresses of each relay."""
        return tuple({parse_with_peer(text).peer: text for text in reversed(self.relays)}.values())[::-1]

    def listening(self, port: int) -> tuple[str, ...]:
        """The multiaddresses to listen at."""
        ends = (f"/tcp/{port}", f"/udp/{port}/quic-v1") if self.quic else (f"/tcp/{port}",)
        return tuple(ip_part(host) + end for host in self.listen for end in ends)
