"""Bulk calls: a node's contribution against the round's result, and shared state up and down."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
import xxhash
from google.protobuf.message import DecodeError
from grpc import aio

from node.exchange.base import DonateOrder, LoadOrder
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

_STATUS_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Contribution:
    """What a node brings to a round: the header, and the payload's memory (``None``: it abstains)."""

    header: pb.ContributionHeader
    payload: memoryview | None


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
    """
    assembly = ResultAssembly(into, contribution.header.round)
    call = link.exchange(secret)
    over = asyncio.Event()
    upload = asyncio.ensure_future(_upload(call, contribution, over, on_sent))
    committed = False
    try:
        while True:
            message = await call.read()
            if not isinstance(message, bytes):
                raise Trouble(
                    Kind.CUT,
                    f"the coordinator at {link.address} ended round {assembly.round + 1} without a commit",
                )
            commit = assembly.add(message)
            if commit is not None:
                committed = True
                over.set()
                return commit
    except aio.AioRpcError as error:
        raise link.trouble(error, link.limits.round) from None
    finally:
        _retire(call, upload, committed)


_RETIRING: set[asyncio.Future[None]] = set()  # asyncio itself holds tasks weakly


def _retire(call: Call, upload: asyncio.Future[None], committed: bool) -> None:
    """Let the status that follows a commit arrive, without keeping the next round waiting for it."""

    async def drain() -> None:
        if committed:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(call.code(), _STATUS_SECONDS)
        upload.cancel()
        call.cancel()
        await asyncio.gather(upload, return_exceptions=True)

    task = asyncio.ensure_future(drain())
    _RETIRING.add(task)
    task.add_done_callback(_RETIRING.discard)


async def _upload(
    call: Call, contribution: Contribution, over: asyncio.Event, on_sent: Callable[[], None]
) -> None:
    """Write the frames. If the call ends meanwhile, its reader learns why; here that is no error.

    Once the round is ``over``, the rest of a late payload is of no use and is left out.
    """
    payload = contribution.payload
    hasher = xxhash.xxh3_128()
    with contextlib.suppress(aio.AioRpcError, asyncio.InvalidStateError):
        await call.write(wire.encode_frame(wire.HEADER, contribution.header.SerializeToString()))
        if payload is not None:
            for offset in range(0, len(payload), wire.CHUNK_BYTES):
                if over.is_set():
                    break
                chunk = payload[offset : offset + wire.CHUNK_BYTES]
                hasher.update(chunk)
                await call.write(wire.encode_frame(wire.CHUNK, chunk, offset=offset))
        if not over.is_set():
            on_sent()
        end = pb.ContributionEnd(payload_digest=hasher.hexdigest())
        await call.write(wire.encode_frame(wire.END, end.SerializeToString()))
        await call.done_writing()


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
