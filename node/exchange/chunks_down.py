"""Joining: a snapshot comes down chunk by chunk, and what has come is never fetched again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import xxhash
from google.protobuf.message import DecodeError
from grpc import aio

from node.exchange.base import LoadOrder
from node.exchange.link import Link, seen_out
from node.exchange.retry import Patience, Say, Timing, within
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import LayoutError, Row, check_layout, total_bytes
from node.exchange.trouble import Kind, TransferError, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.snapshots import chunk_range, chunks

_SAY_SECONDS: Final = 5.0  # between two sentences about the progress
_DIGEST_BYTES: Final = 16  # xxh3_128


class SnapshotAssembly:
    """Checks the frames of a snapshot and keeps its chunks, over any number of streams.

    A chunk counts once all of it has come and has the digest that the manifest names; all chunks before one
    that counts do, too.

    Args:
        order: which snapshot.
        spool: for all of it; its ``state_digest`` becomes the manifest's.

    Attributes:
        done: chunks that count: the next stream has to start there.
    """

    def __init__(self, order: LoadOrder, spool: Spool) -> None:
        self.done = 0
        self._order, self._spool = order, spool
        self._nbytes = total_bytes(spool.rows)
        self._total = chunks(self._nbytes)
        self._manifest: pb.Manifest | None = None
        self.begin()

    @property
    def complete(self) -> bool:
        """Whether every chunk counts."""
        return self._manifest is not None and self.done == self._total

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks that count."""
        return chunk_range(self._nbytes, 0, self.done)[1]

    def begin(self) -> None:
        """A new stream begins: what has come of a chunk that does not count is forgotten."""
        self._headed = False
        self._begin_chunk()

    def add(self, message: bytes) -> bool:
        """Take the next frame; whether it was the last.

        Raises:
            Trouble: it is damaged or out of order, in a way that another stream may mend.
            TransferError: it is another snapshot, or one of other tensors; or the disk is full.
        """
        try:
            frame = wire.decode_frame(message)
            if not self._headed:
                self._head(frame)
            elif frame.kind == wire.CHUNK:
                self._chunk(frame.offset, frame.body)
            elif frame.kind == wire.END:
                if not self.complete:
                    raise _cut(f"it ended after {self.done} of {self._total} chunks")
                return True
            else:
                raise _cut(f"it holds a frame of kind {frame.kind}")
        except (wire.FrameError, DecodeError) as error:
            raise _cut(str(error)) from None
        return False

    def _begin_chunk(self) -> None:
        self._next, self._end = chunk_range(self._nbytes, self.done, 1)
        self._hasher = xxhash.xxh3_128()

    def _head(self, frame: wire.Frame) -> None:
        if frame.kind != wire.HEADER:
            raise _cut(f"it starts with a frame of kind {frame.kind} instead of a header")
        manifest = pb.Manifest.FromString(bytes(frame.body))
        if self._manifest is None:
            self._check(manifest)
            self._manifest, self._spool.state_digest = manifest, manifest.state_digest
        elif manifest != self._manifest:
            raise TransferError(f"snapshot {self._order.snapshot!r} has changed under its download")
        self._headed = True

    def _check(self, manifest: pb.Manifest) -> None:
        order = self._order
        if (manifest.snapshot, manifest.round) != (order.snapshot, order.round):
            raise TransferError(
                f"it is snapshot {manifest.snapshot!r} of round {manifest.round}, ordered was "
                f"{order.snapshot!r} of round {order.round}"
            )
        rows = [Row(tensor.name, tensor.dtype, tuple(tensor.shape)) for tensor in manifest.tensors]
        try:
            check_layout(rows, self._spool.rows, "the snapshot")
        except LayoutError as error:
            raise TransferError(str(error)) from None
        if manifest.nbytes != self._nbytes:
            raise TransferError(
                f"it announces {manifest.nbytes} bytes, the tensors of this model have {self._nbytes}"
            )
        sizes = {len(digest) for digest in manifest.digests}
        if len(manifest.digests) != self._total or sizes - {_DIGEST_BYTES}:
            raise TransferError(
                f"its manifest has {len(manifest.digests)} digests of {sorted(sizes)} bytes, due were "
                f"{self._total} of {_DIGEST_BYTES}"
            )

    def _chunk(self, offset: int, data: memoryview) -> None:
        assert self._manifest is not None
        if offset != self._next or offset + len(data) > self._nbytes or not len(data):
            raise _cut(f"{len(data)} bytes from {offset} on came where byte {self._next} was due")
        while len(data):
            part = data[: self._end - self._next]
            data = data[len(part) :]
            self._hasher.update(part)
            self._spool.write(self._next, part)
            self._next += len(part)
            if self._next < self._end:
                continue
            if self._hasher.digest() != self._manifest.digests[self.done]:
                raise _cut(f"chunk {self.done} is damaged: it does not have the digest that was announced")
            self.done += 1
            self._begin_chunk()


def _cut(text: str) -> Trouble:
    return Trouble(Kind.CUT, f"the snapshot's stream broke off: {text}")


async def get_chunks(
    link: Link,
    secret: Callable[[], str],
    order: LoadOrder,
    rows: Sequence[Row],
    timing: Timing,
    say: Say,
) -> Spool:
    """Download a snapshot whose tensors are ``rows``; the caller closes the spool.

    A stream that breaks off or is damaged is followed by another one from the first missing chunk on, as long
    as ``link.limits.reconnect`` has not passed without progress.

    Args:
        link: opened.
        secret: of the present session.
        order: which snapshot.
        rows: of this node's state, in order.
        timing: clock, sleep and randomness.
        say: receives the progress, and what is waited for.

    Raises:
        TransferError: it did not arrive, or is not what was ordered.
    """
    what = f"the download of round {order.round}'s state"
    spool = Spool(rows, 0, chunks(total_bytes(rows)))
    try:
        assembly = SnapshotAssembly(order, spool)
        patience = Patience(f"the end of {what}", link.limits.reconnect, timing, say)
        progress = Progress(what, spool.nbytes, patience, timing, say)
        while not assembly.complete:
            try:
                await _stream(link, secret(), order, assembly, progress)
            except Trouble as trouble:
                await patience.endure(trouble.of_a_bulk_call())
    except Trouble as trouble:
        spool.close()
        raise TransferError(f"{what} failed: {trouble}") from None
    except BaseException:
        spool.close()
        raise
    return spool


class Progress:
    """Tells how far a download is, and keeps its patience from ending while it goes on."""

    def __init__(self, what: str, nbytes: int, patience: Patience, timing: Timing, say: Say) -> None:
        self._what, self._nbytes, self._patience, self._say = what, nbytes, patience, say
        self._timing = timing
        self._told = timing.now()
        self._done = 0

    def now(self, done: int) -> None:
        """So many bytes count by now."""
        if done > self._done:
            self._done = done
            self._patience.reset()
        if self._timing.now() - self._told >= _SAY_SECONDS:
            self._told = self._timing.now()
            self._say(f"{self._what}: {done / 1e6:.0f} of {self._nbytes / 1e6:.0f} MB")


async def _stream(
    link: Link, secret: str, order: LoadOrder, assembly: SnapshotAssembly, progress: Progress
) -> None:
    """Fetch what is missing, once.

    Raises:
        Trouble: it broke off, was refused, or is damaged.
        TransferError: see :meth:`SnapshotAssembly.add`.
    """
    assembly.begin()
    call = link.get_chunks(secret, pb.ChunksRequest(snapshot=order.snapshot, first=assembly.done))
    try:
        over = False
        while not over:
            message = await within(link.limits.stall, "a frame of a snapshot", call.read())
            if not isinstance(message, bytes):
                raise _cut("the stream ended before its last frame")
            try:
                over = await asyncio.to_thread(assembly.add, message)
            finally:
                progress.now(assembly.nbytes)
        await seen_out(call)
    except aio.AioRpcError as error:
        raise link.trouble(error, link.limits.transfer) from None
    finally:
        call.cancel()
