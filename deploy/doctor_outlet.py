"""Connections to several places from one local port: how a NAT maps that is how it treats nodes that call.

Whoever wants to use such a connection without choosing its port itself, as gRPC does, calls a listener on
loopback that passes everything on.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from protos.address import Address

_READ_BYTES: Final = 64 << 10


class Outlet:
    """Opened and used on one event loop.

    Attributes:
        family: of the addresses outside.
        port: the local one, of all connections to the outside.
    """

    def __init__(self, family: socket.AddressFamily) -> None:
        self.family = family
        self._held = self._bound(0)  # so that nobody else gets the port
        self.port: int = self._held.getsockname()[1]
        self._servers: list[asyncio.AbstractServer] = []
        self._passing: set[asyncio.Task[None]] = set()

    async def towards(self, host: str, port: int) -> Address:
        """Where to connect on loopback in order to be connected with ``host``, an IP address."""
        server = await asyncio.start_server(self._accept(host, port), "127.0.0.1", 0)
        self._servers.append(server)
        return Address("127.0.0.1", server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """End all connections."""
        for server in self._servers:
            server.close()
        while self._passing:
            for task in self._passing:
                task.cancel()
            await asyncio.wait(self._passing)
        self._held.close()

    def _bound(self, port: int) -> socket.socket:
        made = socket.socket(self.family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setblocking(False)
        made.bind(("", port))
        return made

    def _accept(self, host: str, port: int) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]:
        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._pass_on(host, port, reader, writer))
            self._passing.add(task)
            task.add_done_callback(self._passing.discard)

        return accept

    async def _pass_on(
        self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        outside: asyncio.StreamWriter | None = None
        pumps: list[asyncio.Future[None]] = []
        made = self._bound(self.port)
        try:
            await asyncio.get_running_loop().sock_connect(made, (host, port))
            back, outside = await asyncio.open_connection(sock=made)
            pumps = [
                asyncio.ensure_future(_pump(reader, outside)),
                asyncio.ensure_future(_pump(back, writer)),
            ]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass  # whoever called sees the connection end
        finally:
            for pump in pumps:
                pump.cancel()
            for one in (outside, writer):
                if one is not None:
                    one.transport.abort()
            if outside is None:
                made.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while some := await reader.read(_READ_BYTES):
            writer.write(some)
            await writer.drain()
