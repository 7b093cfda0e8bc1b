"""Probing: a machine asks the coordinator about the way between both, without joining the run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from google.protobuf.message import DecodeError
from grpc import aio

from node.exchange.link import Call, Limits, Link, seen_out
from node.exchange.meter import Meter
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.invite import Invite
from protos.measuring import MEASURE_SECONDS, chunks
from protos.tls import PINNED, ClientTls

WHOLE_SECONDS: Final = 5.0  # of a measurement, after which what has arrived until then has to do
TELLING_BYTES: Final = 64 << 10  # chunks that wait in one buffer look as if they had come at once
TELLING_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Rate:
    """Bytes that arrived behind the first chunk, and the seconds between that and the last one.

    Attributes:
        held: a round was being exchanged and came first: the link carries more.
    """

    nbytes: int = 0
    seconds: float = 0.0
    held: bool = False

    @property
    def per_second(self) -> float:
        """Bytes; 0: too few have come, or all at once, to tell."""
        telling = self.nbytes >= TELLING_BYTES or self.seconds >= TELLING_SECONDS
        return self.nbytes / self.seconds if telling and self.seconds > 0 else 0.0


class Probe(Link):
    """The channels to a coordinator, and the calls that need no session. Opened and used on one event loop.

    Args:
        invite: of the run.
        seconds: for an ordinary call.
        tls: what this machine brings beside the invite.
    """

    def __init__(
        self,
        invite: Invite,
        seconds: float,
        now: Callable[[], float] = time.monotonic,
        tls: ClientTls = PINNED,
    ) -> None:
        super().__init__(invite, Meter(), Limits(call=seconds), tls)
        self._now = now

    async def ask(self, port: int = 0, certificate: bytes = b"") -> pb.ProbeReply:
        """How this machine looks from the coordinator; with ``port`` it is tried there, which takes some
        seconds if nobody answers. With a ``certificate`` (DER) this machine shows that there.

        Raises:
            Trouble: unreachable or refused.
        """
        request = pb.ProbeRequest(protocol=wire.PROTOCOL, port=port, certificate=certificate)
        return await self._unary("Probe", request, pb.ProbeReply)

    async def measure(self, seconds: float = WHOLE_SECONDS) -> tuple[Rate, Rate]:
        """What the link carries: up, and down. On a link so thin that the measurement does not end within
        ``seconds``, what came until then.

        Raises:
            Trouble: unreachable, refused, or nothing came.
        """
        call = self._frames("Measure", "", ("state", "state"), 2 * seconds)
        measurement = _Measurement(call, self._now)
        try:
            await within(seconds, f"measuring the link to {self.address}", measurement.run())
        except aio.AioRpcError as error:
            raise self.trouble(error, seconds) from None
        except Trouble:
            if measurement.up is None:
                raise
        finally:
            call.cancel()
        return measurement.up or Rate(), measurement.down


class _Measurement:
    def __init__(self, call: Call, now: Callable[[], float]) -> None:
        self.up: Rate | None = None
        self.down = Rate()
        self._call = call
        self._now = now
        self._answered = False

    async def run(self) -> None:
        """Send for a moment, then receive."""
        # A refusal that comes while this side is sending could get lost.
        if not isinstance(await self._call.read(), bytes):
            raise Trouble(Kind.CUT, "the measurement ended before it began")
        uploading = asyncio.ensure_future(self._upload())
        try:
            await self._download()
            # A write must have ended before its call does, or the call looks broken.
            await uploading
            await seen_out(self._call)
        finally:
            uploading.cancel()
            with contextlib.suppress(asyncio.CancelledError, aio.AioRpcError, asyncio.InvalidStateError):
                await uploading

    async def _upload(self) -> None:
        end = self._now() + MEASURE_SECONDS
        for frame in chunks():
            if self._answered or self._now() >= end:
                break
            await self._call.write(frame)
        await self._call.write(wire.encode_frame(wire.END))
        await self._call.done_writing()

    async def _download(self) -> None:
        first = 0.0
        while isinstance(message := await self._call.read(), bytes):
            try:
                frame = wire.decode_frame(message)
                if frame.kind == wire.HEADER:
                    self._answered = True
                    told = pb.MeasureReply.FromString(bytes(frame.body))
                    self.up = Rate(told.nbytes, told.seconds, told.held)
                elif frame.kind == wire.CHUNK and not first:
                    first = self._now()
                elif frame.kind == wire.CHUNK:
                    nbytes = self.down.nbytes + len(frame.body)
                    self.down = Rate(nbytes, self._now() - first)
                else:
                    held = pb.MeasureReply.FromString(bytes(frame.body)).held
                    self.down = Rate(self.down.nbytes, self.down.seconds, held)
                    return
            except (wire.FrameError, DecodeError) as error:
                raise Trouble(Kind.PROTOCOL, f"the measurement cannot be read: {error}") from error
        raise Trouble(Kind.CUT, "the measurement ended before its last frame")
