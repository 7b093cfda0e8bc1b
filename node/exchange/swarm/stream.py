"""A stream of messages over a raw one of libp2p, on which a dead sender looks like a proper end.

Each record begins with four bytes, little-endian: the length of a message, which follows, or one of the marks
below. Both sides send marks of life, since libp2p's daemon goes on answering for a process that is frozen.
After both have sent END, each sends BYE, and nobody closes before the other's has come: a close overtakes
what is still on its way. Behind the last BYE the raw one is as it was before, and can carry another stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from node.exchange.meter import Direction
from node.exchange.retry import within
from node.exchange.swarm.records import HEAD_BYTES, Records
from node.exchange.trouble import Kind, Trouble
from protos.wire import MAX_MESSAGE_BYTES, Message

END: Final = 0xFFFFFFFF  # no more messages from this side
ALIVE: Final = 0xFFFFFFFE
GONE: Final = 0xFFFFFFFD  # nobody reads here any more
BYE: Final = 0xFFFFFFFC
_MARKS: Final = frozenset((END, ALIVE, GONE, BYE))
_AHEAD: Final = 2  # messages that are read before they are asked for

OnBytes = Callable[[Direction, int], None]


@dataclass(frozen=True)
class Heartbeat:
    """Seconds between marks of life, and after which a side that is waited for counts as gone."""

    every: float = 3.0
    silence: float = 15.0


def no_count(direction: Direction, nbytes: int) -> None:
    """Count nothing."""


class SwarmStream:
    """Implements :class:`node.exchange.peers.base.PeerStream`.

    Args:
        reader: of the raw stream, behind its opening.
        writer: likewise.
        peer: who is at the other end, for texts.
        now: clock, in seconds.
        heartbeat: how life is shown and expected.
        on_bytes: receives direction and number of all bytes of records.
        on_parted: called once both sides have taken their leave; the raw stream is left open then, for who
            gave this. ``None``: it is closed.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        peer: str,
        now: Callable[[], float],
        heartbeat: Heartbeat,
        on_bytes: OnBytes = no_count,
        on_parted: Callable[[], None] | None = None,
    ) -> None:
        self._on_parted = on_parted
        self._peer, self._now, self._heartbeat, self._on_bytes = peer, now, heartbeat, on_bytes
        self._inbox: deque[memoryview] = deque()
        self._changed = asyncio.Event()  # something to read, or nothing more
        self._failure: Trouble | None = None
        self._ended = self._peer_ended = self._peer_gone = self._said_bye = False
        self._deaf = False
        self._stalled = False
        self._heard = self._wrote = now()
        self.closed = asyncio.Event()
        self._records = Records((reader, writer), self)
        self._records.start()

    async def read(self) -> Message | None:
        """See the protocol."""
        while not self._inbox:
            if self._failure is not None:
                raise self._failure
            if self._peer_ended:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._inbox.popleft()
        self._go_on()
        return message

    async def write(self, message: bytes) -> None:
        """See the protocol."""
        if len(message) > MAX_MESSAGE_BYTES:
            text = f"a message has at most {MAX_MESSAGE_BYTES} bytes, not {len(message)}"
            self._fail(Trouble(Kind.PROTOCOL, text))
            raise Trouble(Kind.PROTOCOL, text)
        self._check_writable()
        self._put(len(message), message)
        await self._drained()
        self._check_writable()

    async def end(self) -> None:
        """See the protocol."""
        if self._ended:
            return
        if self._failure is not None:
            raise self._failure
        self._ended = True
        self._put(END)
        self._part()
        await self._drained()

    def cancel(self) -> None:
        """See the protocol."""
        if not (self._ended and self._peer_ended):  # then what is still on its way arrives
            self.abort()

    def abort(self) -> None:
        """Close the stream now, whatever is still on its way."""
        if not self.closed.is_set():
            self._fail(Trouble(Kind.BROKEN, f"the stream with {self._peer} has been given up"))

    async def wind_up(self, seconds: float) -> None:
        """The handler has returned: let its last messages arrive, and end the stream within ``seconds``."""
        if self._failure is not None:
            return
        self._deaf = True
        self._inbox.clear()
        self._go_on()
        if not self._peer_ended:
            self._put(GONE)
        with contextlib.suppress(Trouble):
            await within(seconds, "the end of a stream", self._wound_up())
        self.abort()

    async def _wound_up(self) -> None:
        await self.end()
        await self.closed.wait()

    def beat(self, listen: bool) -> bool:
        """Show life, and unless ``listen`` is false give up a peer that shows none; whether it does."""
        if self.closed.is_set():
            return True
        now = self._now()
        if listen and not self._stalled and now - self._heard > self._heartbeat.silence:
            self._fail(
                Trouble(
                    Kind.SILENT,
                    f"nothing came from {self._peer} for {now - self._heard:.3g} s: it is frozen or cut off",
                )
            )
            return False
        # What waits to be sent will show it.
        if (
            now - self._wrote >= self._heartbeat.every
            and not self._said_bye  # the last word
            and not self._records.waiting
        ):
            self._put(ALIVE)
        return True

    def _check_writable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._ended:
            raise Trouble(Kind.PROTOCOL, f"this side has ended its messages to {self._peer}")
        if self._peer_gone:
            raise Trouble(Kind.BROKEN, f"{self._peer} has ended the stream")

    def _put(self, head: int, message: bytes = b"") -> None:
        if self._records.write(head, message):
            self._wrote = self._now()
            self._on_bytes("up", HEAD_BYTES + len(message))

    async def _drained(self) -> None:
        await self._records.drained()
        if self._failure is not None:
            raise self._failure

    def _go_on(self) -> None:
        """Read on, if there is room again."""
        if self._stalled and len(self._inbox) < _AHEAD:
            self._stalled, self._heard = False, self._now()
            self._records.resume()

    # ---------------------------------------------------------------------------- node.exchange.swarm.records

    def take_bytes(self, nbytes: int) -> None:
        """See :class:`node.exchange.swarm.records.Taker`."""
        self._heard = self._now()
        self._on_bytes("down", nbytes)

    def take_head(self, head: int) -> int | None:
        """See :class:`node.exchange.swarm.records.Taker`."""
        if head in _MARKS:
            self._mark(head)
        elif head > MAX_MESSAGE_BYTES or self._peer_ended:
            what = "a message after its last" if self._peer_ended else f"a message of {head} bytes"
            self._fail(Trouble(Kind.PROTOCOL, f"{self._peer} sent {what}"))
        else:
            return head
        return None

    def take_message(self, message: memoryview) -> None:
        """See :class:`node.exchange.swarm.records.Taker`."""
        if self._deaf:
            return
        self._inbox.append(message)
        self._changed.set()
        if len(self._inbox) >= _AHEAD:
            self._stalled = True
            self._records.pause()

    def take_loss(self, error: Exception) -> None:
        """See :class:`node.exchange.swarm.records.Taker`."""
        if self._ended and self._peer_ended:
            self._close()  # without BYE, but this side has all, and can send nothing
        elif isinstance(error, EOFError):
            self._fail(Trouble(Kind.CUT, f"{self._peer} is gone: the stream ended before its last record"))
        else:
            self._fail(Trouble(Kind.BROKEN, f"{self._peer} is gone: the stream broke ({error})"))

    def _mark(self, mark: int) -> None:
        if mark == END:
            self._peer_ended = True
            self._changed.set()
            self._part()
        elif mark == GONE:
            self._peer_gone = True
        elif mark == BYE and self._ended and self._peer_ended:
            self._close(self._on_parted)
        elif mark == BYE:
            self._fail(Trouble(Kind.PROTOCOL, f"{self._peer} took its leave before the end"))

    def _part(self) -> None:
        if self._ended and self._peer_ended and not self._said_bye:
            self._said_bye = True
            self._put(BYE)

    def _fail(self, trouble: Trouble) -> None:
        if self.closed.is_set():
            return
        self._failure = trouble
        self._inbox.clear()
        self._records.close(at_once=True)
        self._settle()

    def _close(self, keep: Callable[[], None] | None = None) -> None:
        if keep is not None:
            self._records.give_back()
            keep()
        else:
            self._records.close()
        self._settle()

    def _settle(self) -> None:
        self.closed.set()
        self._changed.set()
