"""A node of the swarm's tests."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import psutil

from node.exchange.peers.base import Handler, Peer, PeerStream
from node.exchange.swarm.setting import SwarmSetting
from node.exchange.swarm.stream import Heartbeat
from node.exchange.swarm.swarm import Swarm

SECONDS = 120.0  # a deadline for a busy machine
WATCHFUL = Heartbeat(every=0.2, silence=1.5)
_PATIENT = Heartbeat(every=0.2, silence=1000.0)


async def echo(stream: PeerStream) -> None:
    """Send back what comes, then end."""
    while (message := await stream.read()) is not None:
        await stream.write(message)
    await stream.end()


class Site:
    """A node, what it says, and what it does with streams that come: at first :func:`echo`."""

    def __init__(self, node: str, *, token: str = "token", **setting: Any) -> None:
        self.node, self.token = node, token
        self.setting: dict[str, Any] = {"listen": ("127.0.0.1",), **setting}
        self.handler: Handler = echo
        self.said: asyncio.Queue[str] = asyncio.Queue()
        self.counted: Counter[str] = Counter()
        self.begin_with(())

    def begin_with(self, addresses: tuple[str, ...]) -> None:
        """Make the node anew, to begin with these; before its start."""
        setting = {"bootstrap": addresses, **self.setting}
        self.swarm = Swarm(
            SwarmSetting(**setting),
            self.token,
            self.node,
            lambda stream: self.handler(stream),
            say=self.said.put_nowait,
            heartbeat=_PATIENT,
            on_bytes=lambda direction, nbytes: self.counted.update({direction: nbytes}),
        )

    async def peer(self) -> Peer:
        """What another node knows of it."""
        return Peer(self.node, swarm=self.swarm.peer, swarm_addresses=await self.swarm.addresses())


def children_named(name: str) -> list[int]:
    """Processes of that name that this one has started."""
    return [child.pid for child in psutil.Process().children() if child.name() == name]
