"""The bytes of a vote between nodes by bare streams of the same transports: prepared chunks, nothing of ours.

Every node sends each other one a slice in chunks, and as many come back: a chunk of the answer leaves as soon
as that chunk of all others has come, as the result of a vote can. There are no frames, digests, rows,
tallies, meters or coordinator. gRPC's options and event loop are the product's, as is libp2p's daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from node.exchange.peers.upload import SEND_BYTES
from protos.grpc_options import DIAL_OPTIONS, PEER_OPTIONS

_SERVICE: Final = "bench.Mesh"
_METHOD: Final = "Stream"
_PROTOCOL: Final = "/atoll-bench/mesh/1"


class Stream(Protocol):
    """To one other node."""

    async def send(self, chunk: bytes) -> None:
        """Hand a chunk to the transport."""
        ...

    async def receive(self, nbytes: int) -> None:
        """Take a chunk of ``nbytes``."""
        ...

    async def close(self, *, caller: bool) -> None:
        """All has been sent and received; ``caller``: it has opened the stream."""
        ...


Answer = Callable[[Stream], Awaitable[None]]


class Carrier(Protocol):
    """Opens streams to the other nodes, and gives those that they open to who answers."""

    async def start(self, answer: Answer) -> str:
        """Listen; where others reach it."""
        ...

    async def meet(self, others: Sequence[str]) -> None:
        """Have a connection to each of these."""
        ...

    async def open(self, index: int) -> Stream:
        """A stream to one of them."""
        ...

    async def close(self) -> None:
        """End all."""
        ...


class _Gathering:
    """Which chunks have come from how many nodes, in one round."""

    def __init__(self, senders: int, chunks: int) -> None:
        self.streams = 0
        self._missing = [senders] * chunks
        self._whole = [asyncio.Event() for _ in range(chunks)]

    def came(self, index: int) -> None:
        self._missing[index] -= 1
        if not self._missing[index]:
            self._whole[index].set()

    async def whole(self, index: int) -> None:
        await self._whole[index].wait()


class BareMesh:
    """One node. Used in one event loop; nobody begins a round before all have ended the one before.

    Args:
        carrier: of the streams.
        nodes: of the mesh.
        nbytes: of a slice.
        chunk_bytes: of a chunk but the last.

    Attributes:
        received: bytes so far, answers and what others sent.
    """

    def __init__(self, carrier: Carrier, nodes: int, nbytes: int, chunk_bytes: int = SEND_BYTES) -> None:
        self.received = 0
        self._carrier, self._others = carrier, nodes - 1
        self._chunks = [bytes(min(chunk_bytes, nbytes - at)) for at in range(0, nbytes, chunk_bytes)]
        self._gathering = self._round()

    async def start(self) -> str:
        """See :class:`Carrier`."""
        return await self._carrier.start(self._answer)

    async def meet(self, others: Sequence[str]) -> None:
        """See :class:`Carrier`."""
        await self._carrier.meet(others)

    async def swap(self) -> None:
        """One round: a slice to each other node, and its answer."""
        await asyncio.gather(*(self._ask(index) for index in range(self._others)))

    async def close(self) -> None:
        """End all."""
        await self._carrier.close()

    def _round(self) -> _Gathering:
        return _Gathering(self._others, len(self._chunks))

    async def _ask(self, index: int) -> None:
        stream = await self._carrier.open(index)

        async def send() -> None:
            for chunk in self._chunks:
                await stream.send(chunk)

        sending = asyncio.ensure_future(send())
        for chunk in self._chunks:
            await stream.receive(len(chunk))
            self.received += len(chunk)
        await sending
        await stream.close(caller=True)

    async def _answer(self, stream: Stream) -> None:
        if self._gathering.streams == self._others:
            self._gathering = self._round()
        gathering = self._gathering
        gathering.streams += 1

        async def send() -> None:
            for index, chunk in enumerate(self._chunks):
                await gathering.whole(index)
                await stream.send(chunk)

        sending = asyncio.ensure_future(send())
        try:
            for index, chunk in enumerate(self._chunks):
                await stream.receive(len(chunk))
                self.received += len(chunk)
                gathering.came(index)
            await sending
            await stream.close(caller=False)
        finally:
            sending.cancel()


# ------------------------------------------------------------------------------------------------ gRPC


class _GrpcStream:
    """Implements :class:`Stream` over a call, at either end."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, chunk: bytes) -> None:
        await self._call.write(chunk)

    async def receive(self, nbytes: int) -> None:
        message = await self._call.read()
        if not isinstance(message, bytes) or len(message) != nbytes:
            raise ConnectionError("a bare stream ended early")

    async def close(self, *, caller: bool) -> None:
        if caller:
            await self._call.done_writing()
            await self._call.read()  # the end


class GrpcCarrier:
    """Implements :class:`Carrier`: a call for each stream, over a connection to each other node.

    Args:
        host: to listen at.
    """

    def __init__(self, host: str) -> None:
        self._host = host
        self._server = aio.server(options=PEER_OPTIONS)
        self._channels: list[aio.Channel] = []

    async def start(self, answer: Answer) -> str:
        """See the protocol."""

        async def serve(_: Any, context: Any) -> None:
            await answer(_GrpcStream(context))

        handlers = {_METHOD: grpc.stream_stream_rpc_method_handler(serve)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        port = self._server.add_insecure_port(f"{self._host}:0")
        await self._server.start()
        return f"{self._host}:{port}"

    async def meet(self, others: Sequence[str]) -> None:
        """See the protocol."""
        self._channels = [aio.insecure_channel(address, options=DIAL_OPTIONS) for address in others]
        await asyncio.gather(*(channel.channel_ready() for channel in self._channels))

    async def open(self, index: int) -> Stream:
        """See the protocol."""
        return _GrpcStream(self._channels[index].stream_stream(f"/{_SERVICE}/{_METHOD}", bytes, bytes)(None))

    async def close(self) -> None:
        """See the protocol."""
        for channel in self._channels:
            await channel.close(None)
        await self._server.stop(None)


# ------------------------------------------------------------------------------------------------ libp2p


class _RawStream:
    """Implements :class:`Stream` over one of libp2p's, by way of the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, chunk: bytes) -> None:
        self._writer.write(chunk)
        await self._writer.drain()

    async def receive(self, nbytes: int) -> None:
        while nbytes:
            part = await self._reader.read(nbytes)
            if not part:
                raise ConnectionError("a bare stream ended early")
            nbytes -= len(part)

    async def close(self, *, caller: bool) -> None:
        if not caller:
            await self._reader.read(1)  # a close overtakes what is still on its way: the caller's comes first
        self._writer.close()


class SwarmCarrier:
    """Implements :class:`Carrier`: streams of a libp2p daemon of its own.

    Args:
        host: to listen at.
    """

    def __init__(self, host: str) -> None:
        from node.exchange.swarm.daemon import Daemon
        from node.exchange.swarm.setting import SwarmSetting

        setting = SwarmSetting(listen=(host,), quic=False, reachability="public")
        self._daemon = Daemon(setting, lambda text: None)
        self._peers: list[Any] = []

    async def start(self, answer: Answer) -> str:
        """See the protocol."""

        async def called(_: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):  # of a caller that is gone
                await answer(_RawStream(reader, writer))

        self._daemon.on_up(lambda p2p: p2p.add_binary_stream_handler(_PROTOCOL, called))
        await self._daemon.start()
        return (await self._daemon.addresses())[0]

    async def meet(self, others: Sequence[str]) -> None:
        """See the protocol."""
        from node.exchange.swarm.library import hivemind
        from node.exchange.swarm.multiaddress import parse_with_peer, peer_bytes

        for text in others:
            address = parse_with_peer(text)
            await self._daemon.connect(address.peer, [address])
            self._peers.append(hivemind().PeerID(peer_bytes(address.peer)))

    async def open(self, index: int) -> Stream:
        """See the protocol."""
        _, reader, writer = await self._daemon.p2p.call_binary_stream_handler(self._peers[index], _PROTOCOL)
        return _RawStream(reader, writer)

    async def close(self) -> None:
        """See the protocol."""
        await self._daemon.close()
