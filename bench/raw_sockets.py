"""The floor of a round: the bytes that nodes and hub exchange, moved over plain TCP sockets and nothing else.

Every node sends its payload, the hub waits for all of them and sends as much back to each. Twice: with one
event loop on each side, as node and coordinator are built, and with blocking sockets in a thread for each
connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import Any, Final

from node.exchange.network import new_event_loop

WAIT: Final = 120.0  # seconds for the slowest node


def loop_hub(nodes: int, nbytes: int, ready: Any) -> None:
    """Serve ``nodes`` connections in one event loop until they end; puts the port into ``ready``."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        ready.put(listener.getsockname()[1])
        connections = [(await loop.sock_accept(listener))[0] for _ in range(nodes)]
        lanes = [(connection, bytearray(nbytes)) for connection in connections]
        with contextlib.suppress(ConnectionError):
            while True:
                await asyncio.gather(*(_receive_on_loop(*lane) for lane in lanes))
                await asyncio.gather(*(loop.sock_sendall(*lane) for lane in lanes))

    new_event_loop().run_until_complete(serve())


def blocking_hub(nodes: int, nbytes: int, ready: Any) -> None:
    """The same with a thread for each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready.put(listener.getsockname()[1])
    gate = threading.Barrier(nodes)

    def serve(connection: socket.socket) -> None:
        buffer = bytearray(nbytes)
        with contextlib.suppress(ConnectionError, threading.BrokenBarrierError), connection:
            while True:
                _receive(connection, buffer)
                gate.wait(WAIT)
                connection.sendall(buffer)

    threads = [threading.Thread(target=serve, args=(listener.accept()[0],)) for _ in range(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class LoopLane:
    """A node's connection to :func:`loop_hub`."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._loop = new_event_loop()
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._received = bytearray(nbytes)

    def swap(self, payload: memoryview) -> None:
        """Send the payload and receive as much."""

        async def both() -> None:
            await asyncio.get_running_loop().sock_sendall(self._socket, payload)
            await _receive_on_loop(self._socket, self._received)

        self._loop.run_until_complete(both())

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
        self._loop.close()


class BlockingLane:
    """A node's connection to :func:`blocking_hub`."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._received = bytearray(nbytes)

    def swap(self, payload: memoryview) -> None:
        """Send the payload and receive as much."""
        self._socket.sendall(payload)
        _receive(self._socket, self._received)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


def _receive(connection: socket.socket, into: bytearray) -> None:
    view = memoryview(into)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the raw connection ended early")
        view = view[count:]


async def _receive_on_loop(connection: socket.socket, into: bytearray) -> None:
    loop, view = asyncio.get_running_loop(), memoryview(into)
    while view:
        count = await loop.sock_recv_into(connection, view)
        if not count:
            raise ConnectionError("the raw connection ended early")
        view = view[count:]
