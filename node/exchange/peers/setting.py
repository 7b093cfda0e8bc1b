"""How a node lets other nodes reach it: its user's choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from protos.address import Address

if TYPE_CHECKING:
    from node.exchange.swarm.setting import SwarmSetting

Transport = Literal["auto", "direct", "swarm", "hub"]
ANYWHERE: Final = Address("0.0.0.0", 0)
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)


@dataclass(frozen=True)
class PeerSetting:
    """Choices of one node; what they lead to is :mod:`node.exchange.peers.setup`'s.

    Attributes:
        transport: ``direct``: other nodes connect to this one; ``swarm``: through libp2p; ``auto``: both,
            where that is installed; ``hub``: none of them, what has to travel goes through the coordinator.
        listen: where direct connections are accepted; port 0 takes a free one.
        announced: what other nodes are told to connect to instead, for instance the outside of a router.
        uplink: bytes per second; 0: not known, it is measured.
        downlink: likewise.
        swarm: how it takes part in the swarm, if it does; ``None``: by that package's defaults.
    """

    transport: Transport = "auto"
    listen: Address = ANYWHERE
    announced: Address | None = None
    uplink: float = 0.0
    downlink: float = 0.0
    swarm: SwarmSetting | None = None
