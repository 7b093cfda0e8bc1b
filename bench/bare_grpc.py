"""What gRPC costs by itself: the bytes of a round in bare streams of chunks, without protocol or reducer.

The hub reads the chunks of all nodes and throws them away, then sends prepared chunks back to each. Channel
options, chunk size and event loops are the product's.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc

from node.exchange.network import new_event_loop
from protos.allocator import keep_freed_memory
from protos.grpc_options import CHANNEL_OPTIONS, SERVER_OPTIONS
from protos.wire import CHUNK_BYTES

_METHOD: Final = "/bench.Bare/Swap"


def grpc_hub(nodes: int, nbytes: int, ready: Any) -> None:
    """Serve until the process is ended; puts the port into the queue ``ready``."""
    keep_freed_memory()
    chunks = [bytes(min(CHUNK_BYTES, nbytes - start)) for start in range(0, nbytes, CHUNK_BYTES)]

    async def serve() -> None:
        arrived, everybody = 0, asyncio.Event()

        async def swap(request: Any, context: Any) -> None:
            nonlocal arrived, everybody
            for _ in chunks:
                await context.read()
            gate, arrived = everybody, arrived + 1
            if arrived == nodes:
                arrived, everybody = 0, asyncio.Event()
                gate.set()
            await gate.wait()
            for chunk in chunks:
                await context.write(chunk)

        server = grpc.aio.server(options=SERVER_OPTIONS)
        handler = grpc.stream_stream_rpc_method_handler(swap)
        service, name = _METHOD[1:].split("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.put(port)
        await server.wait_for_termination()

    new_event_loop().run_until_complete(serve())


class GrpcLane:
    """A node's connection to :func:`grpc_hub`."""

    def __init__(self, port: int, nbytes: int) -> None:
        self._loop = new_event_loop()
        self._received = bytearray(nbytes)
        self._channel = self._loop.run_until_complete(self._open(port))
        self._call = self._channel.stream_stream(_METHOD, None, None)

    @staticmethod
    async def _open(port: int) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS)

    def swap(self, payload: memoryview) -> None:
        """Send the payload and receive as much."""
        self._loop.run_until_complete(self._swap(payload))

    async def _swap(self, payload: memoryview) -> None:
        call = self._call(None)

        async def send() -> None:
            for start in range(0, len(payload), CHUNK_BYTES):
                await call.write(bytes(payload[start : start + CHUNK_BYTES]))
            await call.done_writing()

        sending = asyncio.ensure_future(send())
        start = 0
        while start < len(payload):
            message = await call.read()
            if not isinstance(message, bytes):
                raise ConnectionError("the bare stream ended early")
            self._received[start : start + len(message)] = message
            start += len(message)
        await sending

    def close(self) -> None:
        """End the connection."""
        self._loop.run_until_complete(self._channel.close(None))
        self._loop.close()
