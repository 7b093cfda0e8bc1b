"""One stream of a contribution: the bytes of a slice go to its reducer, and the slice's result comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from typing import Final, TypeVar

import xxhash
from google.protobuf.message import DecodeError, Message

from node.exchange.filling import Filling
from node.exchange.link import STATUS_SECONDS
from node.exchange.peers.base import PeerStream
from node.exchange.peers.uplink import Uplink
from node.exchange.result import ChunkAssembly
from node.exchange.retry import Steps, within
from node.exchange.trouble import Kind, Trouble
from optim.slices import Slice
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import LINE_BYTES
from protos.refusal import Refused
from protos.upload import LEAST_BYTES, chunk_stop, end_frame

M = TypeVar("M", bound=Message)

SEND_BYTES: Final = 512 << 10  # of a chunk: the streams to all reducers share a link, none waits long for it
_TAIL_BYTES: Final = 128 << 10  # the last chunks of a slice are no smaller: a message costs CPU time as well
_WORDS_SECONDS: Final = 1.0  # for the reason of a stream that takes nothing more


@dataclass(frozen=True)
class Contribution:
    """What goes out: the whole payload, and, if it is still being written, how far. ``lease``: the first
    sample that it is made of, and how many."""

    payload: memoryview
    filling: Filling | None = None
    lease: tuple[int, int] = (0, 0)

    @property
    def written(self) -> bool:
        """Whether the whole payload is there."""
        return self.filling is None or self.filling.finished

    async def final(self, nbytes: int) -> int:
        """Wait until ``nbytes`` are final (one more than there are: until it is known to be usable); how many
        are, in whole lines beyond those.

        Raises:
            Withdrawn: it is not usable.
        """
        if self.filling is None:
            return len(self.payload)
        final = await self.filling.until(nbytes)
        return max(nbytes, final - final % LINE_BYTES)


def slice_chunk_bytes(left: int) -> int:
    """How large the next chunk may be where ``left`` bytes are left. The last ones are small: nothing is made
    of a chunk before it has come whole."""
    half = left // 2
    return min(SEND_BYTES, max(half - half % LINE_BYTES, _TAIL_BYTES))


class SliceAssembly(ChunkAssembly):
    """Puts the frames of a slice's result together.

    Args:
        buffer: the slice's part of the result.
        what: is put together, for texts.
        base: offset of its first byte in the chunks.

    Attributes:
        whole: whether all of the present attempt is here and as it was made.
    """

    def __init__(self, buffer: memoryview, what: str, base: int = 0) -> None:
        super().__init__(buffer, what, base)
        self.whole = False

    def add(self, message: wire.Message) -> None:
        """Take the next frame.

        Raises:
            Trouble: kind PROTOCOL: it is damaged, or in the wrong place.
            Refused: the other node will not go on; these are its words.
        """
        frame = self._decoded(message)
        if frame.kind == wire.CHUNK:
            self.whole = False
            self._chunk(frame)
        elif frame.kind == wire.RESTART:
            self.whole = False
            self._restart(frame.attempt)
        elif frame.kind == wire.END:
            self._end(frame.body)
        elif frame.kind == wire.REFUSAL:
            refusal = self._parsed(pb.Refusal(), frame.body)
            raise Refused(refusal.kind, refusal.text)
        else:
            raise self._broken(f"a frame of kind {frame.kind} has no place in it")

    @property
    def digest(self) -> bytes:
        """xxh3_128 of what has come of the present attempt."""
        return self._hasher.digest()

    def _end(self, body: memoryview) -> None:
        if self.received != len(self._buffer):
            raise self._broken(f"it ended after {self.received} of {len(self._buffer)} bytes")
        announced = self._parsed(pb.ContributionEnd(), body).payload_digest
        if announced and announced != (digest := self._hasher.hexdigest()):
            raise self._broken(f"its digest is {digest}, its sender announced {announced}")
        self.whole = True

    def _parsed(self, message: M, body: memoryview) -> M:
        try:
            message.ParseFromString(bytes(body))
        except DecodeError as error:
            raise self._broken(f"a message in it cannot be read: {error}") from error
        return message


class SliceUpload:
    """Used once.

    Args:
        stream: to the reducer.
        hello: the first message.
        contribution: what goes out.
        part: the bytes of it that go this way.
        into: the slice's part of the result; written until :meth:`deafen`.
        stall: seconds that a chunk may take to be taken.
        on_change: called whenever there is something new.
        moving: entered while there is something to send that waits for nothing but the link.
        uplink: that the contribution leaves by; ``None``: none, the reducer is this node.

    Attributes:
        begun: whether a part of the slice has been handed over.
        sent: whether the slice has been handed over whole.
    """

    def __init__(
        self,
        stream: PeerStream,
        hello: pb.PeerHello,
        contribution: Contribution,
        part: Slice,
        into: memoryview,
        stall: float,
        on_change: Callable[[], None],
        moving: Callable[[], AbstractContextManager[None]] = nullcontext,
        uplink: Uplink | None = None,
    ) -> None:
        self._uplink = uplink or Uplink()
        self.begun = self.sent = False
        self._stream, self._hello, self._contribution, self._part = stream, hello, contribution, part
        self._on_change, self._moving = on_change, moving
        self._steps = Steps(stall, "a part of a contribution")
        self._deaf = False
        asked = hello.fetch if hello.HasField("fetch") else hello.slice
        what = f"bytes {part.out_start} to {part.out_end} of the result of round {asked.round + 1}"
        self._what, self._assembly = what, SliceAssembly(into, what)

    @property
    def whole(self) -> bool:
        """Whether a result is here whole; another attempt may still void it."""
        return self._assembly.whole

    @property
    def digest(self) -> bytes | None:
        """xxh3_128 of the whole result; ``None`` while it is not."""
        return self._assembly.digest if self.whole else None

    @property
    def received(self) -> int:
        """Bytes of the present attempt's result."""
        return self._assembly.received

    async def run(self) -> None:
        """Send and receive until the reducer ends the stream behind a whole result.

        Raises:
            Trouble: the stream broke, the reducer takes nothing, or what it sent is damaged.
            Refused: the reducer's words.
            Withdrawn: there will be no contribution.
        """
        tasks = [asyncio.ensure_future(self._write()), asyncio.ensure_future(self._read())]
        either = (*tasks, self._steps.over)
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[1].done():
                await self._refused_or(tasks[0] if tasks[0].done() else self._steps.over, tasks[1])
            await tasks[1]
            if self.sent:  # and whole on both sides: so is its end, or a stream may leave something behind
                with suppress(Trouble):
                    await within(STATUS_SECONDS, "the end of a stream", self._stream.end())
        finally:
            self._steps.close()
            for task in tasks:
                task.cancel()
            self._stream.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _refused_or(self, writing: asyncio.Future[None], reading: asyncio.Future[None]) -> None:
        """A write that fails because the reducer has refused: its words are on the way."""
        error = writing.exception()
        if isinstance(error, Trouble):
            await asyncio.wait({reading}, timeout=_WORDS_SECONDS)
            if reading.done():
                reading.result()
        writing.result()

    def deafen(self) -> None:
        """What comes from now on is of no use, and is written nowhere."""
        self._deaf = True

    async def _write(self) -> None:
        with ExitStack() as moving:
            await self._send(moving)
        self.sent = True
        self._on_change()

    async def _send(self, moving: ExitStack) -> None:
        part, hasher = self._part, xxhash.xxh3_128()
        await self._put(wire.encode_frame(wire.HEADER, self._hello.SerializeToString()))
        start, waits = part.start, True
        while start < part.end:
            if waits and self._contribution.written:
                moving.enter_context(self._moving())
                moving.enter_context(self._uplink.sending())
                waits = False
            final = await self._contribution.final(min(start + LEAST_BYTES, part.end))
            stop = chunk_stop(start, slice_chunk_bytes(part.end - start), min(final, part.end))
            chunk = self._contribution.payload[start:stop]
            hasher.update(chunk)
            await self._put(wire.encode_frame(wire.CHUNK, chunk, offset=start - part.start))
            start += len(chunk)
            if not self.begun:
                self.begun = True
                self._on_change()
        await self._contribution.final(len(self._contribution.payload) + 1)
        await self._put(end_frame(hasher.hexdigest()))

    async def _put(self, message: bytes) -> None:
        self._steps.begin()
        await self._stream.write(message)
        self._steps.end()
        self._uplink.moved()

    async def _read(self) -> None:
        while (message := await self._stream.read()) is not None:
            if not self._deaf:
                self._assembly.add(message)
                self._on_change()
        if not self._deaf and not self.whole:
            raise Trouble(Kind.CUT, f"its reducer ended the stream before {self._what} had come whole")
