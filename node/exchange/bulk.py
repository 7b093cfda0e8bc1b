"""Bulk calls: a node's contribution against the round's result, and shared state up and down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import xxhash
from google.protobuf.message import DecodeError
from grpc import aio

from node.exchange.base import DonateOrder, LoadOrder
from node.exchange.filling import Filling
from node.exchange.link import Call, Link
from node.exchange.result import ResultAssembly
from node.exchange.retry import within
from node.exchange.tensor_bytes import (
    MAX_TENSORS,
    LayoutError,
    Row,
    Sink,
    check_layout,
    layout,
    read_chunks,
    total_bytes,
)
from node.exchange.trouble import Kind, TransferError, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import LINE_BYTES

_STATUS_SECONDS: Final = 5.0
_LEAST_BYTES: Final = 64 << 10  # of a chunk, but for the last: a payload that fills slowly costs few frames


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
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(call.code(), _STATUS_SECONDS)
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
    with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(wire.encode_frame(wire.HEADER, contribution.header.SerializeToString()))
        offset, end = 0, 0 if payload is None else len(payload)
        while payload is not None and offset < end:
            final = await _final(filling, min(offset + _LEAST_BYTES, end), end, over)
            if over.is_set():
                break
            chunk = payload[offset : min(offset + wire.CHUNK_BYTES, final)]
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


async def put_state(
    link: Link, secret: str, order: DonateOrder, tensors: Mapping[str, torch.Tensor], state_digest: str
) -> None:
    """Upload the shared state for nodes that are joining.

    Raises:
        TransferError: it did not get through; the donor itself is unharmed.
    """
    rows = layout(tensors)
    header = pb.StateHeader(
        transfer=order.transfer,
        round=order.round,
        state_digest=state_digest,
        tensors=[pb.StateTensor(name=row.name, dtype=row.dtype, shape=row.shape) for row in rows],
        nbytes=total_bytes(rows),
    )
    what = f"the upload of round {order.round}'s state"
    call = link.put_state(secret)

    async def write(frame: bytes) -> None:
        await within(link.limits.stall, f"a chunk of {what}", call.write(frame))

    try:
        with contextlib.suppress(asyncio.InvalidStateError):  # ended early: the reply tells why
            await write(wire.encode_frame(wire.HEADER, header.SerializeToString()))
            offset = 0
            hasher = xxhash.xxh3_128()
            for chunk in read_chunks(tensors, wire.CHUNK_BYTES):
                hasher.update(chunk)
                await write(wire.encode_frame(wire.CHUNK, chunk, offset=offset))
                offset += len(chunk)
            end = pb.ContributionEnd(payload_digest=hasher.hexdigest())
            await write(wire.encode_frame(wire.END, end.SerializeToString()))
            await call.done_writing()
        receipt = pb.StateReceipt.FromString(await within(link.limits.stall, f"the receipt for {what}", call))
    except aio.AioRpcError as error:
        raise TransferError(f"{what} broke off: {link.trouble(error, link.limits.transfer)}") from None
    except (Trouble, DecodeError) as error:
        raise TransferError(f"{what} broke off: {error}") from None
    finally:
        call.cancel()
    if receipt.nbytes != header.nbytes:
        raise TransferError(f"{what} is incomplete: {receipt.nbytes} of {header.nbytes} bytes were received")


async def get_state(link: Link, secret: str, order: LoadOrder, tensors: Mapping[str, torch.Tensor]) -> str:
    """Download the shared state of ``order.round`` into ``tensors``; returns the digest the donor announced.

    Every announced name, dtype, shape and length is checked before a byte is written.

    Raises:
        TransferError: it did not arrive whole; ``tensors`` may then hold a part of it.
    """
    what = f"the download of round {order.round}'s state"
    expected = layout(tensors)
    call = link.get_state(secret, pb.StateHeader(transfer=order.transfer, round=order.round))

    async def read() -> wire.Frame:
        message = await within(link.limits.stall, f"a chunk of {what}", call.read())
        if not isinstance(message, bytes):
            raise TransferError(f"{what} broke off: the stream ended before its last frame")
        return wire.decode_frame(message)

    sink = Sink(tensors)
    hasher = xxhash.xxh3_128()
    try:
        header = _state_header(await read(), order, expected)
        while (frame := await read()).kind == wire.CHUNK:
            if frame.offset != sink.nbytes:
                raise TransferError(
                    f"{what} is out of order: byte {frame.offset} came where {sink.nbytes} was due"
                )
            sink.write(frame.body)
            hasher.update(frame.body)
        if frame.kind != wire.END:
            raise TransferError(f"{what} holds a frame of kind {frame.kind}")
        if sink.nbytes != header.nbytes or not sink.complete:
            raise TransferError(f"{what} is incomplete: {sink.nbytes} of {header.nbytes} bytes came")
        announced = pb.ContributionEnd.FromString(bytes(frame.body)).payload_digest
        if announced != hasher.hexdigest():
            raise TransferError(
                f"{what} is damaged: digest {hasher.hexdigest()}, the donor announced {announced}"
            )
        # A cancellation on the heels of the last frame would look like a broken download to the coordinator.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(call.code(), _STATUS_SECONDS)
    except aio.AioRpcError as error:
        raise TransferError(f"{what} broke off: {link.trouble(error, link.limits.transfer)}") from None
    except (Trouble, LayoutError, wire.FrameError, DecodeError) as error:
        raise TransferError(f"{what} was refused: {error}") from None
    finally:
        call.cancel()
    return header.state_digest


def _state_header(frame: wire.Frame, order: LoadOrder, expected: tuple[Row, ...]) -> pb.StateHeader:
    """Parse and check the first frame of a download."""
    if frame.kind != wire.HEADER:
        raise LayoutError(f"it starts with a frame of kind {frame.kind} instead of a header")
    header = pb.StateHeader.FromString(bytes(frame.body))
    if (header.transfer, header.round) != (order.transfer, order.round):
        raise LayoutError(
            f"it is transfer {header.transfer!r} of round {header.round}, ordered was {order.transfer!r} of "
            f"round {order.round}"
        )
    if len(header.tensors) > MAX_TENSORS:
        raise LayoutError(f"it announces {len(header.tensors)} tensors, at most {MAX_TENSORS} may travel")
    rows = tuple(Row(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in header.tensors)
    check_layout(rows, expected, "the donor")
    if header.nbytes != total_bytes(expected):
        raise LayoutError(f"it announces {header.nbytes} bytes, these tensors have {total_bytes(expected)}")
    return header
