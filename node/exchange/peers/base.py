"""What carries streams between nodes: gRPC from node to node, libp2p, or a tunnel through the coordinator.

Whoever uses a stream sees messages (frames of :mod:`protos.wire`) and none of what carries them. Everything
here is used in the network thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from protos.wire import Message

CarrierName = Literal["direct", "swarm", "tunnel"]


@dataclass(frozen=True)
class Peer:
    """Another node, and the ways to it.

    Attributes:
        node: name within the run.
        direct: HOST:PORT; empty: it cannot be reached so.
        certificate: that it shows there, DER; empty: there is no TLS.
        swarm: libp2p peer id; empty: likewise.
        swarm_addresses: multiaddresses of that.
        call_token: what this node shows when it calls that one.
        accept_token: what that one shows when it calls this node.
    """

    node: str
    direct: str = ""
    certificate: bytes = b""
    swarm: str = ""
    swarm_addresses: tuple[str, ...] = ()
    call_token: bytes = field(default=b"", repr=False)
    accept_token: bytes = field(default=b"", repr=False)


class PeerStream(Protocol):
    """Messages in both directions, in order, each at most ``protos.wire.MAX_MESSAGE_BYTES``.

    One task reads, another one writes. Both wait as long as the other side is slow, and raise
    :class:`~node.exchange.trouble.Trouble` as soon as it is known to be gone.
    """

    async def read(self) -> Message | None:
        """The next message; ``None`` once the other side has ended its direction properly: that no message
        was lost, not that all had been said.

        Raises:
            Trouble: the stream broke, or a message is too long.
        """
        ...

    async def write(self, message: bytes) -> None:
        """Send a message; waits while the other side does not read.

        Raises:
            Trouble: the stream broke, or the other side has ended it.
        """
        ...

    async def end(self) -> None:
        """No more messages from this side; those that were written arrive."""
        ...

    def cancel(self) -> None:
        """Give the stream up at once, in both directions; a call of read or write that waits raises. Safe to
        call twice, and after the end."""
        ...


Handler = Callable[[PeerStream], Awaitable[None]]


class Carrier(Protocol):
    """One way of opening, and being asked for, streams.

    Attributes:
        name: of the way.
    """

    name: CarrierName

    def reaches(self, peer: Peer) -> bool:
        """Whether there is such a way to ``peer`` at all."""
        ...

    async def open(self, peer: Peer) -> PeerStream:
        """A stream to ``peer``, whose handler is called with its other end.

        Raises:
            Trouble: it cannot be reached so, within the carrier's own deadline.
        """
        ...

    async def close(self) -> None:
        """End all streams and stop listening."""
        ...
