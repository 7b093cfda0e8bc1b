"""What is known of the way from a machine to a coordinator and its nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from node.exchange.probing import Rate
from node.exchange.trouble import Kind

Family = Literal["IPv4", "IPv6"]


@dataclass(frozen=True)
class Lookup:
    """A host name, asked for one family of addresses; with none, ``problem`` says why."""

    family: Family
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class Connect:
    """A TCP connection that was tried.

    Attributes:
        address: HOST:PORT.
        seconds: until it stood.
        local: this machine's own address on it.
        problem: why there is none; empty: there was.
    """

    address: str
    seconds: float = 0.0
    local: str = ""
    problem: str = ""


@dataclass(frozen=True)
class Answer:
    """What the coordinator said.

    Attributes:
        version, protocol: its own.
        transport: of the run file.
        host: address from which it sees this machine.
        round_trip: seconds, of the fastest of a few calls.
        skew: seconds by which this machine's clock is ahead of its, plus or minus half a round trip.
    """

    version: str
    protocol: int
    transport: str
    host: str
    round_trip: float
    skew: float


@dataclass(frozen=True)
class Trial:
    """Whether somebody answers at an address; ``why_not`` says why not, and is empty if somebody does."""

    address: str
    why_not: str = ""


@dataclass(frozen=True)
class Seen:
    """How a connection from a local port looks at its other end.

    Attributes:
        by: who sees it, HOST:PORT.
        local: the port here; the same for all of them.
        address: HOST:PORT from which it comes.
    """

    by: str
    local: int
    address: str


@dataclass(frozen=True)
class NetworkFacts:
    """What was found out; empty or ``None`` where it did not come to that.

    Attributes:
        address: HOST:PORT of the invite.
        own: addresses of this machine, on the connections that stood.
        answer: of the coordinator; without one, ``trouble`` says of which kind and in words why.
        insecure: whether the invite is for a coordinator without TLS.
        proxy: the setting that names a proxy for such calls.
        listening: where this machine was tried, HOST:PORT as the coordinator sees it.
        seen: connections from one local port to different places.
        up, down: what the link to the coordinator carries; ``unmeasured`` says why they are not known.
        peers: where nodes listen for others.
        more_peers: nodes that were not tried.
    """

    address: str
    lookups: tuple[Lookup, ...] = ()
    connects: tuple[Connect, ...] = ()
    answer: Answer | None = None
    trouble: tuple[Kind, str] | None = None
    insecure: bool = False
    proxy: str = ""
    listening: Trial | None = None
    seen: tuple[Seen, ...] = ()
    up: Rate | None = None
    down: Rate | None = None
    unmeasured: str = ""
    peers: tuple[Trial, ...] = ()
    more_peers: int = 0

    @property
    def own(self) -> set[str]:
        """This machine's addresses on the connections that stood."""
        return {connect.local for connect in self.connects if connect.local}
