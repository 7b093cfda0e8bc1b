"""The swarm as a node uses it: daemon, presence and carrier, opened and closed together."""

from __future__ import annotations

from node.exchange.peers.base import Handler
from node.exchange.retry import Say, Timing
from node.exchange.swarm.carrier import SwarmCarrier
from node.exchange.swarm.daemon import Daemon
from node.exchange.swarm.presence import Presence
from node.exchange.swarm.secret import RunSecret
from node.exchange.swarm.setting import SwarmSetting
from node.exchange.swarm.stream import Heartbeat, OnBytes, no_count


class Swarm:
    """A node in the swarm of a run, from :meth:`start` until :meth:`close`; used in the network thread only.

    Args:
        setting: how the node takes part.
        token: of the run's invite.
        node: name that it is known by.
        handler: gets the other end of every stream that a peer opens.
        say: receives sentences for people.
        timing: clock, sleep, randomness.
        heartbeat: of the streams.
        on_bytes: receives direction and number of the bytes of all streams.

    Attributes:
        daemon: libp2p's.
        presence: who is there, and where the coordinator is.
        carrier: opens streams.
    """

    def __init__(
        self,
        setting: SwarmSetting,
        token: str,
        node: str,
        handler: Handler,
        *,
        say: Say,
        timing: Timing | None = None,
        heartbeat: Heartbeat | None = None,
        on_bytes: OnBytes = no_count,
    ) -> None:
        secret = RunSecret(token)
        self.daemon = Daemon(setting, say, timing)
        self.carrier = SwarmCarrier(
            self.daemon, secret, handler, say=say, timing=timing, heartbeat=heartbeat, on_bytes=on_bytes
        )
        self.presence = Presence(self.daemon, secret, node, self.carrier.look, timing=timing)

    @property
    def peer(self) -> str:
        """This node's peer id."""
        return self.daemon.peer

    async def start(self) -> None:
        """Get into the swarm; takes seconds.

        Raises:
            SwarmTrouble: not possible; nothing is left behind.
        """
        try:
            await self.daemon.start()
        except BaseException:
            await self.close()
            raise

    async def addresses(self) -> tuple[str, ...]:
        """Multiaddresses at which others may reach this node, for its Endpoint and for a bootstrap list.

        Raises:
            Trouble: the daemon does not answer.
        """
        return await self.daemon.addresses()

    async def close(self) -> None:
        """Leave, and leave nothing behind. Safe to call twice."""
        await self.carrier.close()
        await self.presence.close()
        await self.daemon.close()
