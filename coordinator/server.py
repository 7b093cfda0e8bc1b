"""The transport of the hub: the coordinator's port, and what it looks after while it is open."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

import grpc

from coordinator.access import LOOK_SECONDS, Access
from coordinator.calls import DRAIN_SECONDS, Calls
from coordinator.gate import Gate
from coordinator.hub import Hub
from coordinator.inbound import Connections
from coordinator.stream import cancelled
from protos.address import Address
from protos.certificate import Credential
from protos.grpc_options import limited
from protos.listening import bound
from protos.tls import bind

STOP_GRACE: Final = 2.0  # seconds for open calls to end by themselves
MAX_CALLS: Final = 65_536  # at a time, of all nodes


class Server:
    """A listening coordinator.

    Attributes:
        address: where it listens, with the real port.
    """

    def __init__(
        self, server: grpc.aio.Server, address: Address, *watching: Coroutine[Any, Any, None]
    ) -> None:
        self.address = address
        self._server = server
        self._watching = [asyncio.create_task(watch) for watch in watching]

    async def stop(self, grace: float = STOP_GRACE) -> None:
        """Close the port at once, give open calls ``grace`` seconds, then cut them."""
        await self._server.stop(grace)
        for watching in self._watching:
            await cancelled(watching)


async def serve(
    hub: Hub,
    listen: Address | str,
    token: str | Access,
    *,
    drain: float = DRAIN_SECONDS,
    credential: Credential | None = None,
) -> Server:
    """Listen on ``listen`` (port 0: a free one) and serve ``hub`` to those who hold a ``token`` of it.

    ``credential`` is shown to callers; without one there is no TLS. ``drain`` is how many seconds an upload
    is still read, and dropped, after its commit or refusal.

    Raises:
        ListenError: the port is taken, or the address cannot be used.
    """
    address = Address.parse(listen) if isinstance(listen, str) else listen
    limits = hub.plan.limits
    server = grpc.aio.server(options=limited(limits), maximum_concurrent_rpcs=MAX_CALLS)
    gate = Gate(hub.run.now, hub.count, limits)
    access = token if isinstance(token, Access) else Access(token)
    access.count, access.tell, hub.run.token_name = hub.count, hub.run.tell, access.name
    calls = Calls(hub, access, drain, gate)
    server.add_generic_rpc_handlers(calls.handlers())
    real = await bound(bind(server, credential), address, "[coordinator] listen", others="coordinator")
    await server.start()
    return Server(server, real, gate.watch(Connections(real.port)), _look(access, hub))


async def _look(access: Access, hub: Hub) -> None:
    """Have the sessions of tokens end that are valid no more."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if access.look():
            hub.revoked(access.standing)
