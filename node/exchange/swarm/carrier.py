"""Streams to other nodes over the swarm's daemon: opened with a proof of the run's secret, and kept count of.

An opening is 40 bytes of the caller: magic, what for, and a proof that only holds between these two peers,
which libp2p has told each other apart. The answer is a byte, 0 for welcome, the length of a text (two bytes,
little-endian), and the text: the address that the caller is seen at, or why it is not welcome.

A peer that is not reached otherwise is called through its relay, a third node (see
:mod:`node.exchange.swarm.relaying`): the caller's opening to that one is followed by the callee's peer id (a
byte of length, and text), the relay's to the callee by the caller's. After both welcomes the caller opens the
stream to the callee as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Iterable
from typing import Any, Final

from node.exchange.peers.base import CarrierName, Handler, Peer
from node.exchange.retry import Say, Timing, within
from node.exchange.swarm.daemon import Daemon, dial_words
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.multiaddress import (
    MAX_ADDRESSES,
    MAX_TEXT,
    Multiaddress,
    is_peer_id,
    parse_with_peer,
    peer_bytes,
)
from node.exchange.swarm.relaying import RawStream, join, relays_of
from node.exchange.swarm.secret import PROOF_BYTES, RunSecret
from node.exchange.swarm.stream import Heartbeat, OnBytes, SwarmStream, no_count
from node.exchange.trouble import Kind, Trouble

_MAGIC: Final = b"atollS1"
_MESSAGES: Final = b"m"
_LOOK: Final = b"l"  # only asks at what address the caller is seen
_ONWARD: Final = b"o"  # asks a relay to carry a stream to a third peer
_CARRIED: Final = b"c"  # a relay says for whom it calls
_OPENING_BYTES: Final = len(_MAGIC) + 1 + PROOF_BYTES
_WELCOME: Final = b"\0"
_REFUSED: Final = b"\1"
_WIND_UP_SECONDS: Final = 10.0
_HIDDEN_SECONDS: Final = 60.0  # for which a peer that only its relay reached is not tried without it


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

    Attributes:
        carried: bytes that this node has carried as the relay of others.
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
        self._hidden: dict[str, float] = {}  # peers that only their relays reach, and until when
        self._relays: dict[str, str] = {}  # by which relay a peer was reached last; empty: by none
        self._carrying: set[tuple[str, str]] = set()  # pairs for which that has been said
        self.carried = 0
        daemon.on_up(self._listen)

    def reaches(self, peer: Peer) -> bool:
        """Whether ``peer`` is in the swarm, and another than this node: libp2p does not call itself."""
        return not self._closed and is_peer_id(peer.swarm) and peer.swarm != self._daemon.peer

    async def open(self, peer: Peer) -> SwarmStream:
        """See the protocol."""
        if self._closed:
            raise Trouble(Kind.BROKEN, "this node is leaving the swarm")
        relays = relays_of(peer.swarm_addresses)
        relays.pop(self._daemon.peer, None)
        if relays and self._hidden.get(peer.swarm, 0.0) > self._timing.now():
            return await self._through(relays, peer, "")
        try:
            reader, writer = await within(
                self._open_seconds,
                f"a stream to {peer.node}",
                self._opened(peer.swarm, peer.swarm_addresses, _MESSAGES),
            )
        except Trouble as trouble:
            if not relays or trouble.kind not in (Kind.UNREACHABLE, Kind.SILENT):
                raise
            stream = await self._through(relays, peer, f"{trouble}; ")
            self._hidden[peer.swarm] = self._timing.now() + _HIDDEN_SECONDS
            return stream
        self._tell(peer, "")
        return self._stream(reader, writer, peer.node)

    async def _through(self, relays: dict[str, tuple[str, ...]], peer: Peer, before: str) -> SwarmStream:
        reasons = []
        for relay, addresses in relays.items():
            try:
                reader, writer = await within(
                    self._open_seconds,
                    f"a stream to {peer.node} through the relay {relay}",
                    self._opened(relay, addresses, _ONWARD, peer.swarm),
                )
            except Trouble as trouble:
                reasons.append(str(trouble))
            else:
                self._tell(peer, relay)
                return self._stream(reader, writer, peer.node)
        self._hidden.pop(peer.swarm, None)
        raise Trouble(Kind.UNREACHABLE, before + "; ".join(reasons))

    def _tell(self, peer: Peer, relay: str) -> None:
        if self._relays.get(peer.node, "") != relay:
            how = f"through the relay {relay}" if relay else "without a relay"
            self._say(f"{peer.node} is reached by the swarm {how} now")
        self._relays[peer.node] = relay

    async def look(self, peer: str) -> None:
        """Ask the peer of this id at what address it sees this node, and tell the daemon.

        Raises:
            Trouble: it cannot be reached, or is not of this run.
        """
        _, writer = await within(self._open_seconds, f"a look from {peer}", self._opened(peer, (), _LOOK))
        writer.close()

    async def close(self) -> None:
        """See the protocol."""
        if self.carried and not self._closed:
            self._say(f"this node has carried {self.carried:,} bytes for other nodes")
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
        self, peer: str, addresses: Iterable[str], purpose: bytes, other: str = ""
    ) -> RawStream:
        """A stream to ``peer``, which has welcomed it; with ``_ONWARD`` one to ``other``, by way of it."""
        dial = []
        for text in tuple(addresses)[:MAX_ADDRESSES]:
            with contextlib.suppress(ValueError):
                address = Multiaddress.parse(text)
                if address.peer == peer:
                    dial.append(address)
        await self._daemon.connect(peer, dial)
        info, reader, writer = await self._raw(peer)
        try:
            if purpose != _LOOK and "p2p-circuit" in str(info.addr):
                raise Trouble(Kind.UNREACHABLE, f"there is no way to the peer {peer} but through its relay")
            await self._introduce(reader, writer, peer, purpose, other)
            if purpose == _ONWARD:
                await self._introduce(reader, writer, other, _MESSAGES)
        except (OSError, EOFError) as error:
            writer.transport.abort()
            raise Trouble(
                Kind.BROKEN, f"the peer {peer} went away while a stream to it was opened"
            ) from error
        except BaseException:
            writer.transport.abort()
            raise
        return reader, writer

    async def _introduce(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        purpose: bytes,
        other: str = "",
    ) -> None:
        opening = _MAGIC + purpose + self._secret.proof(self._daemon.peer, peer, purpose)
        if other:
            opening += bytes((len(other),)) + other.encode()
        writer.write(opening)
        await writer.drain()
        head = await reader.readexactly(3)
        said = await reader.readexactly(min(int.from_bytes(head[1:], "little"), MAX_TEXT))
        words = said.decode("utf-8", "replace")
        if head[:1] != _WELCOME:
            plain = "".join(letter for letter in words if letter.isprintable())
            raise Trouble(
                Kind.TOKEN if "invite" in plain else Kind.REFUSED, f"the peer {peer} refused: {plain}"
            )
        self._daemon.seen_from(words)

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
        self,
        peer: str,
        seen: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        carried: bool = False,
    ) -> None:
        purpose, other, refusal = await within(
            self._open_seconds, f"the opening of {peer}", self._opening(peer, reader, carried)
        )
        onward: RawStream | None = None
        if purpose == _ONWARD and not refusal:
            onward, refusal = await self._onward(peer, other)
        try:
            text = (refusal or seen)[:MAX_TEXT].encode()[:MAX_TEXT]
            writer.write((_REFUSED if refusal else _WELCOME) + len(text).to_bytes(2, "little") + text)
            await writer.drain()
            if refusal or purpose == _LOOK:
                # The caller closes, or the answer might be lost.
                await within(self._open_seconds, f"the leave of {peer}", reader.read(1))
                writer.close()
            elif onward is not None:
                await join((reader, writer), onward, self._count_carried)
            elif purpose == _CARRIED:
                await self._serve(other, "", reader, writer, carried=True)
            else:
                await self._handle(self._stream(reader, writer, peer))
        finally:
            if onward is not None:
                onward[1].close()

    async def _handle(self, stream: SwarmStream) -> None:
        try:
            await self._handler(stream)
            await stream.wind_up(_WIND_UP_SECONDS)
        finally:
            stream.abort()

    async def _opening(
        self, peer: str, reader: asyncio.StreamReader, carried: bool
    ) -> tuple[bytes, str, str]:
        """What a caller wants, the third peer that it names, and why it does not get it."""
        opening = await reader.readexactly(_OPENING_BYTES)
        purpose, other = opening[len(_MAGIC) : len(_MAGIC) + 1], ""
        proof = self._secret.proof(peer, self._daemon.peer, purpose)
        known = (_MESSAGES,) if carried else (_MESSAGES, _LOOK, _ONWARD, _CARRIED)
        if not opening.startswith(_MAGIC) or purpose not in known:
            return purpose, other, "it has another version of Atoll"
        if not hmac.compare_digest(opening[-PROOF_BYTES:], proof):
            return purpose, other, "that peer does not have the token of this run's invite"
        if purpose in (_ONWARD, _CARRIED):
            other = (await reader.readexactly((await reader.readexactly(1))[0])).decode("ascii", "replace")
            if not is_peer_id(other):
                return purpose, other, "a third peer without a peer id"
        if self._closed or len(self._handling) > self._max_streams:
            return purpose, other, "too many streams are open here: try again"
        chosen = map(parse_with_peer, self._daemon.setting.relays)
        if purpose == _CARRIED and peer not in {relay.peer for relay in chosen}:
            return purpose, other, "this node has not chosen that peer for its relay"
        return purpose, other, ""

    async def _onward(self, caller: str, peer: str) -> tuple[RawStream | None, str]:
        """The stream on which ``caller`` is carried to ``peer``, or why there is none."""
        try:
            stream = await within(
                self._open_seconds, f"a stream to {peer}", self._opened(peer, (), _CARRIED, caller)
            )
        except Trouble as trouble:
            return None, str(trouble)
        pair = (min(caller, peer), max(caller, peer))
        if pair not in self._carrying:
            self._carrying.add(pair)
            self._say(f"this node carries what the peers {pair[0]} and {pair[1]} send each other")
        return stream, ""

    def _count_carried(self, nbytes: int) -> None:
        self.carried += nbytes

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
