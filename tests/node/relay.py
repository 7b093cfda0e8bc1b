"""A TCP relay on loopback that a test can cut: the link between a node and its coordinator."""

from __future__ import annotations

import asyncio

from node.exchange.network import NetworkThread

DEADLINE = 100.0  # seconds


class Relay:
    """Passes bytes on to ``port`` until it is :meth:`cut`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._down = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._network = NetworkThread("relay").open()
        self._server = self._network.call(self._listen(), DEADLINE, "starting the relay")
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._accept, "127.0.0.1", 0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        try:
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, onward_writer}
        await asyncio.gather(self._pass(reader, onward_writer), self._pass(onward_reader, writer))
        self._writers -= {writer, onward_writer}

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()

    def cut(self) -> None:
        """Break all connections, and new ones at once, until :meth:`restore`."""

        async def abort() -> None:
            self._down = True
            for writer in self._writers:
                writer.transport.abort()

        self._network.call(abort(), DEADLINE, "cutting the relay")

    def restore(self) -> None:
        """Take connections again."""
        self._down = False

    def close(self) -> None:
        """Cut, and stop listening."""
        self.cut()
        self._network.soon(self._server.close)
        self._network.close()
