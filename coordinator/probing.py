"""Probing: what a machine asks of the coordinator about the way between both, before it joins or in trouble.

Whoever asks shows the invite's token and needs no session. It is tried at the address from which it calls
and at no other one, so nobody can have the coordinator call third parties. Measuring takes little, one caller
at a time, and gives way to the rounds like every background stream.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from coordinator.mesh import seen_at
from coordinator.pacing import Flow, Pacer
from protos.address import port_of
from protos.atoll_pb2 import MeasureReply, ProbeReply, ProbeRequest
from protos.certificate import MAX_BYTES
from protos.measuring import MEASURE_BYTES, MEASURE_SECONDS, chunks
from protos.refusal import BAD_FRAME, BAD_MESSAGE, OVERLOADED, OVERSIZED, STALLED, Refused, frame_of
from protos.version import version_of
from protos.wire import CHUNK, END, HEADER, PROTOCOL, encode_frame

if TYPE_CHECKING:
    from coordinator.run import Run

MAX_DIALS: Final = 4  # addresses that are tried at a time
MAX_PEERS: Final = 64  # that a caller is told of

Read = Callable[[], Awaitable[bytes | None]]
Write = Callable[[bytes], Awaitable[None]]


@dataclass(frozen=True)
class MeasureLimits:
    """What a measurement may take.

    Attributes:
        seconds: of each direction.
        nbytes: of the bodies of each direction.
        whole: seconds for all of it, after which a caller that does not read is cut off.
    """

    seconds: float = MEASURE_SECONDS
    nbytes: int = MEASURE_BYTES
    whole: float = 10.0


class Probing:
    """Answers such questions.

    Args:
        run: whose coordinator is asked.
        pacer: of the coordinator's background streams.
    """

    def __init__(self, run: Run, pacer: Pacer, limits: MeasureLimits | None = None) -> None:
        self._run = run
        self._pacer = pacer
        self._limits = limits or MeasureLimits()
        self._dials = 0
        self._measuring = False

    async def probe(self, request: ProbeRequest, caller: str) -> ProbeReply:
        """Tell how ``caller``, in gRPC's words, looks from here; if it listens, try to reach it there.

        Raises:
            Refused: the port is none.
        """
        if request.port > 65535:
            raise Refused(BAD_MESSAGE, f"there is no port {request.port}")
        if len(request.certificate) > MAX_BYTES:
            raise Refused(BAD_MESSAGE, f"a certificate has {MAX_BYTES} bytes at most")
        run = self._run
        reply = ProbeReply(
            protocol=PROTOCOL,
            version=version_of("atoll"),
            run_digest=run.plan.run_digest,
            transport=run.plan.transport,
            host=seen_at(":0", caller).rpartition(":")[0].strip("[]"),
            from_port=port_of(caller),
            time=run.wall(),
        )
        for address, certificate in run.mesh.reached[:MAX_PEERS]:
            reply.peers.append(address)
            reply.certificates.append(certificate)
        if request.port:
            reply.why_not = await self._try(seen_at(f":{request.port}", caller), request.certificate)
        return reply

    async def _try(self, address: str, certificate: bytes) -> str:
        dial = self._run.mesh.dial
        if dial is None or not address:
            return "this coordinator tries no addresses"
        if self._dials >= MAX_DIALS:
            return "the coordinator tries the addresses of others just now: ask again in some seconds"
        self._dials += 1
        try:
            return await dial(address, certificate)
        finally:
            self._dials -= 1

    async def measure(self, read: Read, write: Write) -> None:
        """Take bytes from a caller and give it some, each for a moment.

        Args:
            read: the caller's next message, ``None`` at its end.
            write: sends a message.

        Raises:
            Refused: somebody else measures, the caller breaks the rules, or it does not read.
        """
        if self._measuring:
            text = "the coordinator measures the link of another machine: try again in some seconds"
            raise Refused(OVERLOADED, text, "RESOURCE_EXHAUSTED")
        self._measuring = True
        try:
            with self._pacer.flow() as flow:
                await asyncio.wait_for(self._measure(read, write, flow), self._limits.whole)
        except asyncio.TimeoutError:
            text = f"the measurement did not end within {self._limits.whole:g} s"
            raise Refused(STALLED, text, "DEADLINE_EXCEEDED") from None
        finally:
            self._measuring = False

    async def _measure(self, read: Read, write: Write, flow: Flow) -> None:
        await write(encode_frame(HEADER))
        upload = _Upload(read, flow, self._limits.nbytes, self._pacer.now)
        reading = asyncio.ensure_future(upload.run())
        try:
            # Whatever is under way after that is read all the same: a client that ends a call which it is
            # still writing to may lose what it has not read (gRPC issue 36066).
            await asyncio.wait({reading}, timeout=self._limits.seconds)
            if reading.done():
                reading.result()
            await write(encode_frame(HEADER, upload.reply().SerializeToString()))
            await self._download(write, flow)
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Refused):
                await reading

    async def _download(self, write: Write, flow: Flow) -> None:
        limits, now = self._limits, self._pacer.now
        end, held = now() + limits.seconds, False
        for frame in chunks(limits.nbytes):
            held |= await _gave_way(flow, len(frame), lambda: now() < end)
            if now() >= end:
                break
            await write(frame)
        await write(encode_frame(END, MeasureReply(held=held).SerializeToString()))


class _Upload:
    """The caller's bytes, and when they came."""

    def __init__(self, read: Read, flow: Flow, limit: int, now: Callable[[], float]) -> None:
        self._read = read
        self._flow = flow
        self._limit = limit
        self._now = now
        self._first = self._last = 0.0
        self._first_bytes = self._nbytes = 0
        self._held = False

    async def run(self) -> None:
        """Read until the caller has ended its upload.

        Raises:
            Refused: too many bytes, or a frame that does not belong there.
        """
        while (message := await self._read()) is not None:
            frame = frame_of(message)
            if frame.kind == END:
                return
            if frame.kind != CHUNK or not frame.body:
                raise Refused(BAD_FRAME, f"a frame of kind {frame.kind} in a measurement")
            self._last = self._now()
            if not self._nbytes:
                self._first, self._first_bytes = self._last, len(frame.body)
            self._nbytes += len(frame.body)
            if self._nbytes > self._limit:
                raise Refused(OVERSIZED, f"a measurement takes {self._limit} bytes at most")
            self._held |= await _gave_way(self._flow, len(message))

    def reply(self) -> MeasureReply:
        """What has come until now."""
        return MeasureReply(
            nbytes=self._nbytes - self._first_bytes, seconds=self._last - self._first, held=self._held
        )


async def _gave_way(flow: Flow, nbytes: int, going_on: Callable[[], bool] = lambda: True) -> bool:
    """Wait until the rounds leave room for ``nbytes``; whether that was necessary."""
    held = False
    while going_on() and (pause := flow.pause(nbytes)):
        held = True
        await asyncio.sleep(pause)
    return held
