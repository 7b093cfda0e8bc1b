"""Donating: chunks of a snapshot go up in the background, and leave the uplink to contributions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import xxhash
from google.protobuf.message import DecodeError
from grpc import aio

from node.exchange.base import DonateOrder, ExchangeError
from node.exchange.link import Link
from node.exchange.retry import Patience, Say, Timing, persist, within
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import spans, total_bytes
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.snapshots import chunk_bytes

FRAME_BYTES: Final = 256 << 10  # a contribution that comes meanwhile waits for so many at most
DUTY: Final = 0.05  # share of the time in which frames are sent while the uplink is wanted
_MAX_PAUSE: Final = 15.0  # seconds between frames: less than a coordinator's patience
_POLL_SECONDS: Final = 0.02
_LEAST_SECONDS: Final = 0.005  # that a frame counts for: writing to a buffer takes no time at all


class Pace:
    """When the next frame may go.

    Args:
        busy: whether something else wants the uplink.
        timing: clock and sleep.
    """

    def __init__(self, busy: Callable[[], bool], timing: Timing) -> None:
        self._busy, self._timing = busy, timing
        self._frames, self._seconds = 0, 0.0

    def sent(self, seconds: float) -> None:
        """A frame took so long."""
        self._frames += 1
        self._seconds += seconds

    async def wait(self) -> None:
        """Until the uplink is free, or so long that frames take :data:`DUTY` of it."""
        frame = max(_LEAST_SECONDS, self._seconds / max(1, self._frames))
        end = self._timing.now() + min(_MAX_PAUSE, frame * (1 / DUTY - 1))
        while self._busy() and (left := end - self._timing.now()) > 0:
            await self._timing.sleep(min(_POLL_SECONDS, left))


class Uploads:
    """One upload at a time. Used in the network thread.

    Args:
        link: opened.
        secret: of the present session.
        busy: whether a contribution of this node is being sent.
        timing: clock, sleep and randomness.
        say: receives what is waited for.
    """

    def __init__(
        self,
        link: Link,
        secret: Callable[[], str],
        busy: Callable[[], bool],
        timing: Timing,
        say: Say,
    ) -> None:
        self._link, self._secret, self._busy, self._timing, self._say = link, secret, busy, timing, say
        self._task: asyncio.Task[None] | None = None

    def start(self, order: DonateOrder, spool: Spool, done: Callable[[str], None]) -> None:
        """Upload the chunks in ``spool`` and close it; an older upload is broken off.

        ``done`` is told why they did not get through; an empty text if they did.
        """
        self.cancel()
        what = f"the upload of a part of round {order.round}'s state"

        def ended(task: asyncio.Task[None]) -> None:
            spool.close()
            if task.cancelled():
                done(f"{what} was broken off: another one was ordered, or this node leaves")
            else:
                error = task.exception()
                done("" if error is None else f"{what} failed: {error}")

        self._task = asyncio.ensure_future(self._upload(order, spool, what))
        self._task.add_done_callback(ended)

    def cancel(self) -> None:
        """Break off what goes up."""
        if self._task is not None:
            self._task.cancel()

    async def _upload(self, order: DonateOrder, spool: Spool, what: str) -> None:
        """Repeat it, as a whole, until it gets through.

        Raises:
            ExchangeError: refused, or the coordinator is gone for too long.
        """
        limits = self._link.limits
        pace = Pace(self._busy, self._timing)
        patience = Patience(f"the end of {what}", limits.reconnect, self._timing, self._say)
        hidden = False

        async def attempt() -> None:
            nonlocal hidden
            try:
                await put_chunks(self._link, self._secret(), order, spool, pace, self._timing)
            except Trouble as trouble:
                if trouble.kind is Kind.HIDDEN and hidden:
                    raise ExchangeError(f"{trouble}, twice: it does not want it") from trouble
                hidden = trouble.kind is Kind.HIDDEN
                raise

        await within(limits.transfer, what, persist(attempt, patience))


async def put_chunks(
    link: Link, secret: str, order: DonateOrder, spool: Spool, pace: Pace, timing: Timing
) -> None:
    """Upload the chunks in ``spool``, once.

    Raises:
        Trouble: the call failed or was refused, or not all chunks were kept.
        TransferError: the spool cannot be read.
    """
    call = link.put_chunks(secret)
    stall = link.limits.stall

    async def write(kind: int, body: bytes | memoryview, offset: int = 0) -> None:
        frame = wire.encode_frame(kind, body, offset=offset)
        await within(stall, "a frame of a donated chunk", call.write(frame))

    try:
        with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):  # the reply tells why
            await write(wire.HEADER, _header(order, spool).SerializeToString())
            digests = []
            for first, last in spans(spool.start, spool.stop, chunk_bytes(total_bytes(spool.rows))):
                hasher = xxhash.xxh3_128()
                for offset, end in spans(first, last, FRAME_BYTES):
                    body = memoryview(bytearray(end - offset))
                    await asyncio.to_thread(_load, spool, offset, body, hasher)
                    await pace.wait()
                    began = timing.now()
                    await write(wire.CHUNK, body, offset)
                    pace.sent(timing.now() - began)
                digests.append(hasher.digest())
            await write(wire.END, pb.ChunksEnd(digests=digests).SerializeToString())
            await call.done_writing()
        reply = await within(stall, "the receipt for donated chunks", call)
        kept = pb.ChunksReceipt.FromString(reply).count
    except aio.AioRpcError as error:
        raise link.trouble(error, link.limits.transfer) from None
    except DecodeError as error:
        raise Trouble(Kind.PROTOCOL, f"the receipt for donated chunks is damaged: {error}") from None
    finally:
        call.cancel()
    if kept != spool.count:
        raise Trouble(Kind.CUT, f"{kept} of {spool.count} donated chunks were kept")


def _load(spool: Spool, offset: int, body: memoryview, hasher: xxhash.xxh3_128) -> None:
    spool.read(offset, body)
    hasher.update(body)


def _header(order: DonateOrder, spool: Spool) -> pb.ChunksHeader:
    return pb.ChunksHeader(
        snapshot=order.snapshot,
        round=order.round,
        state_digest=spool.state_digest,
        nbytes=total_bytes(spool.rows),
        tensors=[pb.StateTensor(name=row.name, dtype=row.dtype, shape=row.shape) for row in spool.rows],
        first=spool.first,
        count=spool.count,
    )
