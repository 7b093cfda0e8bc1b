"""Streams to other nodes over the swarm's daemon: opened with a proof of the run's secret, and kept count of.

A peer that is not reached otherwise is called through its relay, a third node (see
:mod:`node.exchange.swarm.relaying`): the caller's opening to that one names the callee, the relay's to the
callee names the caller. After both welcomes the caller opens the stream to the callee as ever.

A raw stream that was opened without a relay carries one stream after the other, see
:mod:`node.exchange.swarm.idle`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Final

from node.exchange.peers.base import CarrierName, Handler, Peer
from node.exchange.retry import Say, Timing, within
from node.exchange.swarm.daemon import Daemon, dial_words
from node.exchange.swarm.idle import IdleStreams, asked_again
from node.exchange.swarm.library import hivemind
from node.exchange.swarm.multiaddress import (
    MAX_ADDRESSES,
    Multiaddress,
    is_peer_id,
    parse_with_peer,
    peer_bytes,
)
from node.exchange.swarm.opening import (
    CARRIED,
    LOOK,
    MESSAGES,
    ONWARD,
    Opening,
    answer,
    opening,
    read_answer,
    read_opening,
)
from node.exchange.swarm.relaying import RawStream, join, relays_of
from node.exchange.swarm.secret import RunSecret
from node.exchange.swarm.stream import Heartbeat, OnBytes, SwarmStream, no_count
from node.exchange.trouble import Kind, Trouble

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
        opened: raw streams that it has opened.
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
        self._protocol = f"/atoll/{secret.label('protocol')}/3"
        self._streams: dict[SwarmStream, str] = {}  # with the peer id of the other end
        self._idle = IdleStreams(self._timing.now)
        self._late: set[asyncio.Future[Any]] = set()  # calls of the daemon, and nobody waits for them
        self._handling: set[asyncio.Task[Any]] = set()
        self._waiting = 0  # of those, for the next stream on a raw one
        self._beating: asyncio.Task[None] | None = None
        self._closed = False
        self._hidden: dict[str, float] = {}  # peers that only their relays reach, and until when
        self._relays: dict[str, str] = {}  # by which relay a peer was reached last; empty: by none
        self._carrying: set[tuple[str, str]] = set()  # pairs for which that has been said
        self.carried = self.opened = 0
        daemon.on_up(self._listen)

    def reaches(self, peer: Peer) -> bool:
        """Whether ``peer`` is in the swarm, and another than this node: libp2p does not call itself."""
        return not self._closed and is_peer_id(peer.swarm) and peer.swarm != self._daemon.peer

    async def open(self, peer: Peer) -> SwarmStream:
        """See the protocol."""
        if self._closed:
            raise Trouble(Kind.BROKEN, "this node is leaving the swarm")
        if (raw := self._idle.take(peer.swarm)) is not None:
            return self._own(raw, peer)
        relays = relays_of(peer.swarm_addresses)
        relays.pop(self._daemon.peer, None)
        if relays and self._hidden.get(peer.swarm, 0.0) > self._timing.now():
            return await self._through(relays, peer, "")
        try:
            raw = await within(
                self._open_seconds,
                f"a stream to {peer.node}",
                self._opened(peer.swarm, peer.swarm_addresses, MESSAGES),
            )
        except Trouble as trouble:
            if trouble.kind is Kind.SILENT:
                self._start_over(peer.swarm)
            if not relays or trouble.kind not in (Kind.UNREACHABLE, Kind.SILENT):
                raise
            stream = await self._through(relays, peer, f"{trouble}; ")
            self._hidden[peer.swarm] = self._timing.now() + _HIDDEN_SECONDS
            return stream
        self._tell(peer, "")
        return self._own(raw, peer)

    def _own(self, raw: RawStream, peer: Peer) -> SwarmStream:
        """A stream of this side, whose raw one is kept for the next."""
        return self._stream(raw, peer.node, peer.swarm, lambda: self._idle.put(peer.swarm, raw))

    def _start_over(self, peer: str) -> None:
        """A connection on which no stream opens, and none lives, is ended: the next call makes a new one."""
        self._idle.drop(peer)
        if not any(other == peer and not stream.closed.is_set() for stream, other in self._streams.items()):
            self._outlive(asyncio.ensure_future(self._daemon.disconnect(peer)))

    def _outlive(self, call: asyncio.Future[Any]) -> None:
        """Nobody waits for a call, which has to come to its end all the same."""
        self._late.add(call)
        call.add_done_callback(self._late.discard)

    async def _through(self, relays: dict[str, tuple[str, ...]], peer: Peer, before: str) -> SwarmStream:
        reasons = []
        for relay, addresses in relays.items():
            try:
                raw = await within(
                    self._open_seconds,
                    f"a stream to {peer.node} through the relay {relay}",
                    self._opened(relay, addresses, ONWARD, peer.swarm),
                )
            except Trouble as trouble:
                reasons.append(str(trouble))
            else:
                self._tell(peer, relay)
                return self._stream(raw, peer.node, peer.swarm)
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
        _, writer = await within(self._open_seconds, f"a look from {peer}", self._opened(peer, (), LOOK))
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
        self._idle.close()
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
        """A stream to ``peer``, which has welcomed it; with ``ONWARD`` one to ``other``, by way of it."""
        dial = []
        for text in tuple(addresses)[:MAX_ADDRESSES]:
            with contextlib.suppress(ValueError):
                address = Multiaddress.parse(text)
                if address.peer == peer:
                    dial.append(address)
        await self._daemon.connect(peer, dial)
        info, reader, writer = await self._raw(peer)
        try:
            if purpose != LOOK and "p2p-circuit" in str(info.addr):
                raise Trouble(Kind.UNREACHABLE, f"there is no way to the peer {peer} but through its relay")
            await self._introduce(reader, writer, peer, purpose, other)
            if purpose == ONWARD:
                await self._introduce(reader, writer, other, MESSAGES)
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
        writer.write(opening(self._secret, self._daemon.peer, peer, purpose, other))
        await writer.drain()
        self._daemon.seen_from(await read_answer(reader, peer))

    async def _raw(self, peer: str) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
        call = asyncio.ensure_future(
            self._daemon.p2p.call_binary_stream_handler(hivemind().PeerID(peer_bytes(peer)), self._protocol)
        )
        try:
            await asyncio.wait({call})
        finally:
            # Cut short, the call would leave the daemon with a stream that nobody closes.
            if not call.done():
                self._outlive(call)
                call.add_done_callback(_abort)
        self.opened += 1
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
        asked = await within(
            self._open_seconds,
            f"the opening of {peer}",
            read_opening(reader, self._secret, peer, self._daemon.peer, carried=carried),
        )
        refusal = asked.problem or self._refusal(peer, asked)
        onward: RawStream | None = None
        if asked.purpose == ONWARD and not refusal:
            onward, refusal = await self._onward(peer, asked.other)
        try:
            writer.write(answer(refusal or seen, welcome=not refusal))
            await writer.drain()
            if refusal or asked.purpose == LOOK:
                # The caller closes, or the answer might be lost.
                await within(self._open_seconds, f"the leave of {peer}", reader.read(1))
                writer.close()
            elif onward is not None:
                await join((reader, writer), onward, self._count_carried)
            elif asked.purpose == CARRIED:
                await self._serve(asked.other, "", reader, writer, carried=True)
            elif carried:
                await self._handle(self._stream((reader, writer), peer, peer))
            else:
                await self._handle_all((reader, writer), peer)
        finally:
            if onward is not None:
                onward[1].close()

    async def _handle_all(self, raw: RawStream, peer: str) -> None:
        """One stream after the other, as long as each comes to a proper end and the caller wants the next."""
        reader, writer = raw
        while True:
            parted = asyncio.Event()
            await self._handle(self._stream(raw, peer, peer, parted.set))
            if not parted.is_set():
                return
            self._waiting += 1
            try:
                again = await asked_again(reader)
            finally:
                self._waiting -= 1
            if not again or self._full():
                writer.close()
                return

    def _full(self) -> bool:
        return self._closed or len(self._handling) - self._waiting > self._max_streams

    async def _handle(self, stream: SwarmStream) -> None:
        try:
            await self._handler(stream)
            await stream.wind_up(_WIND_UP_SECONDS)
        finally:
            stream.abort()

    def _refusal(self, peer: str, asked: Opening) -> str:
        """Why a caller does not get what it wants; empty: it does."""
        if self._full():
            return "too many streams are open here: try again"
        chosen = map(parse_with_peer, self._daemon.setting.relays)
        if asked.purpose == CARRIED and peer not in {relay.peer for relay in chosen}:
            return "this node has not chosen that peer for its relay"
        return ""

    async def _onward(self, caller: str, peer: str) -> tuple[RawStream | None, str]:
        """The stream on which ``caller`` is carried to ``peer``, or why there is none."""
        try:
            stream = await within(
                self._open_seconds, f"a stream to {peer}", self._opened(peer, (), CARRIED, caller)
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

    def _stream(
        self, raw: RawStream, name: str, peer: str, on_parted: Callable[[], None] | None = None
    ) -> SwarmStream:
        """A stream with ``peer``, which is called ``name`` in texts."""
        now = self._timing.now
        stream = SwarmStream(*raw, name, now, self._heartbeat, self._on_bytes, on_parted)
        self._streams[stream] = peer
        return stream

    async def _beat(self) -> None:
        every = self._heartbeat.every
        while True:
            before = self._timing.now()
            await self._timing.sleep(every)
            # A loop that was held up has not read what came meanwhile.
            prompt = self._timing.now() - before < 2 * every
            for stream, peer in tuple(self._streams.items()):
                if stream.closed.is_set():
                    del self._streams[stream]
                elif not stream.beat(prompt):
                    self._start_over(peer)
            self._idle.prune()


def _abort(call: asyncio.Future[Any]) -> None:
    if not call.cancelled() and call.exception() is None:
        call.result()[2].transport.abort()
