"""Records of a raw stream, each read straight into the memory where it stays.

An ``asyncio.StreamReader`` copies what comes three times before somebody has a message of it, and stops the
transport at 128 KiB. So a stream takes its raw one over from the reader and the writer that libp2p's client
has made, and gives it back to them at its end.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast

import numpy as np

from node.exchange.swarm.relaying import RawStream

HEAD_BYTES: Final = 4
_READ_BYTES: Final = 1 << 18


class Taker(Protocol):
    """Gets what comes. All calls are made in the event loop, and none of them may wait."""

    def take_bytes(self, nbytes: int) -> None:
        """So many bytes have come."""
        ...

    def take_head(self, head: int) -> int | None:
        """The next record begins with this, as a little-endian number; how many bytes of a message follow, or
        ``None`` if it is a record by itself."""
        ...

    def take_message(self, message: memoryview) -> None:
        """They are here."""
        ...

    def take_loss(self, error: Exception) -> None:
        """Nothing more comes: OSError, it broke; EOFError, it has ended."""
        ...


class Records(asyncio.BufferedProtocol):
    """Nothing happens before :meth:`start`.

    Args:
        raw: nobody else may use it before :meth:`give_back`.
        taker: see :class:`Taker`.
    """

    def __init__(self, raw: RawStream, taker: Taker) -> None:
        self._raw, self._taker = raw, taker
        self._transport = cast(asyncio.Transport, raw[1].transport)  # of a socket: it reads as well
        self._before = self._transport.get_protocol()
        self._taking = False
        self._head = bytearray(HEAD_BYTES)
        self._message: memoryview | None = None  # that is coming; else a head is
        self._filled = 0  # bytes of what is coming
        self._room = asyncio.Event()
        self._room.set()

    def start(self) -> None:
        """Take the raw stream over; what its reader holds already is taken within this call."""
        reader, _ = self._raw
        self._taking = True
        self._use(self)
        try:
            held, ended = _taken_out(reader)
        except OSError as error:
            self._lose(error)
            return
        rest = self._take(memoryview(held))
        if ended:
            self._lose(EOFError())
        elif len(rest):
            reader.feed_data(bytes(rest))

    @property
    def waiting(self) -> int:
        """Bytes that have been written and not yet been taken by the system."""
        return self._transport.get_write_buffer_size()

    def write(self, head: int, message: bytes = b"") -> bool:
        """Send a record; whether there is still somebody who takes it."""
        if self._transport.is_closing():
            return False
        self._transport.write(head.to_bytes(HEAD_BYTES, "little"))
        if message:
            self._transport.write(message)
        return True

    async def drained(self) -> None:
        """Until what was written has mostly gone, or the stream is lost."""
        await self._room.wait()

    def pause(self) -> None:
        """Read no further than the record that has just been taken."""
        if self._taking and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Go on reading."""
        if self._taking and not self._transport.is_closing():
            self._transport.resume_reading()

    def give_back(self) -> None:
        """Let reader and writer have the raw stream again, as it is behind the last record that was taken."""
        self._taking = False
        if not self._room.is_set():
            self._before.pause_writing()
        self._use(self._before)

    def close(self, *, at_once: bool = False) -> None:
        """Close the raw stream: behind what has been written, or ``at_once``. Nothing more is taken."""
        self._taking = False
        self._room.set()
        if at_once:
            self._transport.abort()
        else:
            self._transport.close()

    # --------------------------------------------------------------------------- called by the transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """Room for the rest of what is coming, and for nothing behind it."""
        return (memoryview(self._head) if self._message is None else self._message)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So much of it has come."""
        if not self._taking:
            self._filled = 0  # of something that nobody wants
            return
        self._filled += nbytes
        self._taker.take_bytes(nbytes)
        self._take_whole()

    def eof_received(self) -> bool:
        """The other side writes no more."""
        self._lose(EOFError())
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed."""
        self._room.set()
        self._before.connection_lost(error)
        self._lose(EOFError() if error is None else error)

    def pause_writing(self) -> None:
        """Too much waits to be sent."""
        self._room.clear()

    def resume_writing(self) -> None:
        """It has mostly gone."""
        self._room.set()

    # ---------------------------------------------------------------------------------------------------

    def _use(self, protocol: asyncio.BaseProtocol) -> None:
        """Have the transport call ``protocol``. How that wants its bytes is looked up when reading begins."""
        reads = not self._transport.is_closing()
        if reads:
            self._transport.pause_reading()
        self._transport.set_protocol(protocol)
        if reads:
            self._transport.resume_reading()

    def _take(self, data: memoryview) -> memoryview:
        """What was read before; what is left of it if it goes beyond the last record that is wanted."""
        while len(data) and self._taking:
            room = self.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            data = data[size:]
            self.buffer_updated(size)
        return data

    def _take_whole(self) -> None:
        """If what is coming has come, hand it over; an empty message follows its head at once."""
        if self._message is None and self._filled == HEAD_BYTES:
            self._filled = 0
            nbytes = self._taker.take_head(int.from_bytes(self._head, "little"))
            if nbytes is not None:
                # Not touched, and so no memory yet: it is taken as bytes come, not as they are announced.
                self._message = np.empty(nbytes, np.uint8).data
        if self._message is not None and self._filled == len(self._message):
            message, self._message, self._filled = self._message, None, 0
            self._taker.take_message(message)

    def _lose(self, error: Exception) -> None:
        if self._taking:
            self._taking = False
            self._taker.take_loss(error)


def _taken_out(reader: asyncio.StreamReader) -> tuple[bytes, bool]:
    """What ``reader`` holds, and whether that is all that will ever come.

    Raises:
        OSError: the stream broke.
    """
    parts: list[bytes] = []
    while True:
        reading = reader.read(_READ_BYTES)
        try:
            reading.send(None)
        except StopIteration as done:
            if not done.value:
                return b"".join(parts), True
            parts.append(done.value)
        else:  # it would wait for more
            reading.close()
            return b"".join(parts), False
