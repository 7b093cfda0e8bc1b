"""Streams to other nodes over the swarm's daemon: opened with a proof of the run's secret, and kept count of.

An opening is 40 bytes of the caller: magic, what for, and a proof that only holds between these two peers,
which libp2p has told each other apart. The answer is a byte, 0 for welcome, the length of a text (two bytes,
little-endian), and the text: the address that the caller is seen at, or why it is not welcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import Any, Final

from node.exchange.peers.base import CarrierName, Handler, Peer
from node.exchange.retry import Say, Timing, within
from node.exchange.swarm.daemon import Daemon, dial_words
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.multiaddress import MAX_ADDRESSES, MAX_TEXT, Multiaddress, is_peer_id, peer_bytes
from node.exchange.swarm.secret import PROOF_BYTES, RunSecret
from node.exchange.swarm.stream import Heartbeat, OnBytes, SwarmStream, no_count
from node.exchange.trouble import Kind, Trouble

_MAGIC: Final = b"atollS1"
_MESSAGES: Final = b"m"
_LOOK: Final = b"l"  # only asks at what address the caller is seen
_OPENING_BYTES: Final = len(_MAGIC) + 1 + PROOF_BYTES
_WELCOME: Final = b"\0"
_REFUSED: Final = b"\1"
_WIND_UP_SECONDS: Final = 10.0


class SwarmCarrier:
    """Implements :class:`node.exchange.peers.base.Carrier`.

    Args:
        daemon: not started yet.
        secret: of the run.
        handler: gets the other end of every stream that a peer opens.
        say: receives a sentence about a handler that failed.
        timing: clock and sleep.
        heartbeat: of the streams.
        open_seconds: that opening may take.
        max_streams: that peers may have open here at once.
        on_bytes: receives direction and number of the bytes of all streams.
    """

    name: CarrierName = "swarm"

    def __init__(
        self,
        daemon: Daemon,
        secret: RunSecret,
        handler: Handler,
        *,
        say: Say,
        timing: Timing | None = None,
        heartbeat: Heartbeat | None = None,
        open_seconds: float = 15.0,
        max_streams: int = 512,
        on_bytes: OnBytes = no_count,
    ) -> None:
        self._daemon, self._secret, self._handler, self._say = daemon, secret, handler, say
        self._timing, self._heartbeat = timing or Timing(), heartbeat or Heartbeat()
        self._open_seconds, self._max_streams, self._on_bytes = open_seconds, max_streams, on_bytes
        self._protocol = f"/atoll/{secret.label('protocol')}/1"
        self._streams: set[SwarmStream] = set()
        self._handling: set[asyncio.Task[Any]] = set()
        self._beating: asyncio.Task[None] | None = None
        self._closed = False
        daemon.on_up(self._listen)

    def reaches(self, peer: Peer) -> bool:
        """Whether ``peer`` is in the swarm, and another than this node: libp2p does not call itself."""
        return not self._closed and is_peer_id(peer.swarm) and peer.swarm != self._daemon.peer

    async def open(self, peer: Peer) -> SwarmStream:
        """See the protocol."""
        if self._closed:
            raise Trouble(Kind.BROKEN, "this node is leaving the swarm")
        reader, writer = await within(
            self._open_seconds,
            f"a stream to {peer.node}",
            self._opened(peer.swarm, peer.swarm_addresses, _MESSAGES),
        )
        return self._stream(reader, writer, peer.node)

    async def look(self, peer: str) -> None:
        """Ask the peer of this id at what address it sees this node, and tell the daemon.

        Raises:
            Trouble: it cannot be reached, or is not of this run.
        """
        _, writer = await within(self._open_seconds, f"a look from {peer}", self._opened(peer, (), _LOOK))
        writer.close()

    async def close(self) -> None:
        """See the protocol."""
        self._closed = True
        if self._beating is not None:
            self._beating.cancel()
        for stream in tuple(self._streams):
            stream.abort()
        handling = self._handling - {asyncio.current_task()}
        for task in handling:
            task.cancel()
        if handling:
            await asyncio.wait(handling, timeout=_WIND_UP_SECONDS)

    async def _listen(self, p2p: Any) -> None:
        await p2p.add_binary_stream_handler(self._protocol, self._called)
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())

    async def _opened(
        self, peer: str, addresses: tuple[str, ...], purpose: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        dial = []
        for text in addresses[:MAX_ADDRESSES]:
            with contextlib.suppress(ValueError):
                address = Multiaddress.parse(text)
                if address.peer == peer:
                    dial.append(address)
        await self._daemon.connect(peer, dial)
        info, reader, writer = await self._raw(peer)
        if purpose == _MESSAGES and "p2p-circuit" in str(info.addr) and not self._daemon.setting.relayed:
            writer.transport.abort()
            raise Trouble(
                Kind.UNREACHABLE,
                f"there is no direct way to the peer {peer}, and its relay carries no more than 128 KiB",
            )
        try:
            writer.write(_MAGIC + purpose + self._secret.proof(self._daemon.peer, peer, purpose))
            await writer.drain()
            head = await reader.readexactly(3)
            said = await reader.readexactly(min(int.from_bytes(head[1:], "little"), MAX_TEXT))
        except (OSError, EOFError) as error:
            writer.transport.abort()
            raise Trouble(
                Kind.BROKEN, f"the peer {peer} went away while a stream to it was opened"
            ) from error
        except BaseException:
            writer.transport.abort()
            raise
        words = said.decode("utf-8", "replace")
        if head[:1] != _WELCOME:
            writer.transport.abort()
            plain = "".join(letter for letter in words if letter.isprintable())
            raise Trouble(
                Kind.TOKEN if "invite" in plain else Kind.REFUSED, f"the peer {peer} refused: {plain}"
            )
        self._daemon.seen_from(words)
        return reader, writer

    async def _raw(self, peer: str) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        call = asyncio.ensure_future(
            self._daemon.p2p.call_binary_stream_handler(hivemind().PeerID(peer_bytes(peer)), self._protocol)
        )
        try:
            await asyncio.wait({call})
        finally:
            # Cut short, the call would leave the daemon with a stream that nobody closes.
            if not call.done():
                call.add_done_callback(_abort)
        try:
            info, reader, writer = call.result()
        except Exception as error:  # hivemind's, or of the socket to the daemon
            raise Trouble(
                Kind.UNREACHABLE,
                f"the peer {peer} takes no stream: {dial_words(error)}; it may be in another run, or leaving",
            ) from error
        return info, reader, writer

    async def _called(self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A peer has opened a stream."""
        task = asyncio.current_task()
        assert task is not None
        self._handling.add(task)
        try:
            await self._serve(info.peer_id.to_base58(), str(info.addr), reader, writer)
        except (OSError, EOFError, Trouble):
            writer.transport.abort()
        except Exception as error:
            writer.transport.abort()
            self._say(f"a stream of the swarm ended with {type(error).__name__}: {error}")
        except asyncio.CancelledError:
            writer.transport.abort()  # by close(): the task is asyncio's own, which logs what it raises
        finally:
            self._handling.discard(task)

    async def _serve(
        self, peer: str, seen: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        opening = await within(
            self._open_seconds, f"the opening of {peer}", reader.readexactly(_OPENING_BYTES)
        )
        purpose = opening[len(_MAGIC) : len(_MAGIC) + 1]
        proof = self._secret.proof(peer, self._daemon.peer, purpose)
        refusal = ""
        if not opening.startswith(_MAGIC) or purpose not in (_MESSAGES, _LOOK):
            refusal = "it has another version of Atoll"
        elif not hmac.compare_digest(opening[-PROOF_BYTES:], proof):
            refusal = "that peer does not have the token of this run's invite"
        elif self._closed or len(self._handling) > self._max_streams:
            refusal = "too many streams are open here: try again"
        text = (refusal or seen)[:MAX_TEXT].encode()[:MAX_TEXT]
        writer.write((_REFUSED if refusal else _WELCOME) + len(text).to_bytes(2, "little") + text)
        await writer.drain()
        if refusal or purpose == _LOOK:
            # The caller closes, or the answer might be lost.
            await within(self._open_seconds, f"the leave of {peer}", reader.read(1))
            writer.close()
            return
        stream = self._stream(reader, writer, peer)
        try:
            await self._handler(stream)
            await stream.wind_up(_WIND_UP_SECONDS)
        finally:
            stream.abort()

    def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> SwarmStream:
        stream = SwarmStream(reader, writer, peer, self._timing.now, self._heartbeat, self._on_bytes)
        self._streams.add(stream)
        return stream

    async def _beat(self) -> None:
        every = self._heartbeat.every
        while True:
            before = self._timing.now()
            await self._timing.sleep(every)
            # A loop that was held up has not read what came meanwhile.
            prompt = self._timing.now() - before < 2 * every
            for stream in tuple(self._streams):
                if stream.closed.is_set():
                    self._streams.discard(stream)
                else:
                    stream.beat(prompt)


def _abort(call: asyncio.Future[Any]) -> None:
    if not call.cancelled() and call.exception() is None:
        call.result()[2].transport.abort()
