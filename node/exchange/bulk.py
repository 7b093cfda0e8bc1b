"""The bulk call of a round: a node's contribution against the result."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash
from grpc import aio

from node.exchange.filling import Filling
from node.exchange.link import Call, Link, seen_out
from node.exchange.result import ResultAssembly
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import LINE_BYTES
from protos.upload import LEAST_BYTES, chunk_bytes, chunk_stop


@dataclass(frozen=True)
class Contribution:
    """What a rank brings to a round: the header, the payload's memory (``None``: it abstains), and, if it is
    still being written, how far."""

    header: pb.ContributionHeader
    payload: memoryview | None
    filling: Filling | None = None


async def contribute(
    link: Link,
    secret: str,
    contribution: Contribution,
    into: memoryview,
    on_sent: Callable[[], None] = lambda: None,
) -> pb.Commit:
    """Send a contribution, receive the result into ``into``, and return the commit.

    Both directions run at once: the coordinator sends result chunks while it still receives. ``on_sent`` is
    called once the whole payload has been handed to the transport.

    Raises:
        Trouble: the call failed or was refused, the stream ended early, or the result is damaged.
        Withdrawn: the payload's filling has ended without one.
    """
    call = link.exchange(secret)
    over = asyncio.Event()
    upload = asyncio.ensure_future(_upload(call, contribution, over, on_sent))
    download = asyncio.ensure_future(_download(link, call, ResultAssembly(into, contribution.header.round)))
    committed = False
    try:
        await asyncio.wait({upload, download}, return_when=asyncio.FIRST_COMPLETED)
        if not download.done():
            upload.result()
        commit = await download
        committed = True
        over.set()
        return commit
    finally:
        _retire(call, (upload, download), committed)


async def _download(link: Link, call: Call, assembly: ResultAssembly) -> pb.Commit:
    try:
        while isinstance(message := await call.read(), bytes):
            if (commit := assembly.add(message)) is not None:
                return commit
    except aio.AioRpcError as error:
        raise link.trouble(error, link.limits.round) from None
    raise Trouble(
        Kind.CUT, f"the coordinator at {link.address} ended round {assembly.round + 1} without a commit"
    )


_RETIRING: set[asyncio.Future[Any]] = set()  # asyncio itself holds tasks weakly


def _retire(call: Call, tasks: tuple[asyncio.Future[Any], ...], committed: bool) -> None:
    """Let the status that follows a commit arrive, without keeping the next round waiting for it."""

    async def drain() -> None:
        if committed:
            await seen_out(call)
        for task in tasks:
            task.cancel()
        call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    task = asyncio.ensure_future(drain())
    _RETIRING.add(task)
    task.add_done_callback(_RETIRING.discard)


async def _upload(
    call: Call, contribution: Contribution, over: asyncio.Event, on_sent: Callable[[], None]
) -> None:
    """Write the frames. If the call ends meanwhile, its reader learns why; here that is no error.

    Once the round is ``over``, the rest of a late payload is of no use and is left out.

    Raises:
        Withdrawn: see :meth:`Filling.until`.
    """
    payload, filling = contribution.payload, contribution.filling
    hasher = xxhash.xxh3_128()
    with contextlib.suppress(aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError):
        await call.write(wire.encode_frame(wire.HEADER, contribution.header.SerializeToString()))
        offset, end = 0, 0 if payload is None else len(payload)
        size = chunk_bytes(end)
        while payload is not None and offset < end:
            due = offset + LEAST_BYTES
            final = await _final(filling, due if due < end else end + 1, end, over)  # its end: with the last
            if over.is_set():
                break
            chunk = payload[offset : chunk_stop(offset, size, final)]
            hasher.update(chunk)
            await call.write(wire.encode_frame(wire.CHUNK, chunk, offset=offset))
            offset += len(chunk)
        if payload is not None:
            await _final(filling, end + 1, end, over)
        if not over.is_set():
            on_sent()
        trailer = pb.ContributionEnd(payload_digest=hasher.hexdigest())
        await call.write(wire.encode_frame(wire.END, trailer.SerializeToString()))
        await call.done_writing()


async def _final(filling: Filling | None, nbytes: int, end: int, over: asyncio.Event) -> int:
    """Wait until ``nbytes`` of a payload of ``end`` bytes are final, or the round is over; how many may be
    sent, in whole lines."""
    if filling is None or over.is_set():
        return end
    if filling.finished or filling.final >= nbytes:
        final = await filling.until(nbytes)
    else:
        tasks = [asyncio.ensure_future(filling.until(nbytes)), asyncio.ensure_future(over.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            final = tasks[0].result() if tasks[0].done() else 0
        finally:
            for task in tasks:
                task.cancel()
    return final if final == end else final - final % LINE_BYTES
