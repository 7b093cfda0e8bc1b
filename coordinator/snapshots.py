"""Snapshots: shared states that donors have uploaded and that joiners download."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

import xxhash
from google.protobuf.message import DecodeError

from coordinator.chunk_store import ChunkStore, ChunkStoreError, StoredState
from coordinator.manifest import parse_chunks_header
from coordinator.partial_snapshot import PartialSnapshot, Upload
from coordinator.pool import in_background, in_pool
from coordinator.reducing import Pool
from protos.atoll_pb2 import ChunksRequest, Donate, Manifest
from protos.refusal import BAD_TRANSFER, Refused, frame_of
from protos.snapshots import chunk_range, chunks, shares
from protos.units import format_bytes
from protos.wire import CHUNK, CHUNK_BYTES, END, HEADER, encode_frame

log = logging.getLogger(__name__)

KEPT: Final = 2  # snapshots: the newest, and the one that joiners may be about to load
PAUSES: Final = 10  # stall limits for which a donor may send other things than its chunks


class Snapshot:
    """A complete snapshot.

    Attributes:
        manifest: what it is made of.
        readers: downloads that are running.
    """

    def __init__(self, manifest: Manifest, data: StoredState) -> None:
        self.manifest = manifest
        self.data = data
        self.readers = 0

    @property
    def id(self) -> str:
        """Its name."""
        return self.manifest.snapshot

    @property
    def round(self) -> int:
        """Whose state it is: that before this round."""
        return self.manifest.round

    @property
    def nbytes(self) -> int:
        """Of the state."""
        return self.manifest.nbytes

    @property
    def state_digest(self) -> str:
        """Of the state."""
        return self.manifest.state_digest


class Snapshots:
    """The snapshots of a run: those that are kept, and the one that is being made.

    Args:
        store: where their bytes are.
        pool: for everything that reads or writes them: one worker, jobs in order, not the reducer's.
        now: seconds on the coordinator's clock.
        stall: seconds without progress after which a donor is given up.
        agreed: tells the digest of the state before a round, or an empty string while that is open.
        on_end: called when :attr:`gathering` has ended: with the snapshot, or ``None``, and why in words.
        moved_at: when any other stream of a node last moved; a donor's contribution comes first.

    Attributes:
        kept: complete ones, the oldest first: the last :data:`KEPT`, and those that are being read.
        gathering: the one that is being uploaded, or ``None``.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        pool: Pool,
        now: Callable[[], float],
        stall: float,
        agreed: Callable[[int], str],
        on_end: Callable[[Snapshot | None, str], None],
        moved_at: Callable[[str], float] = lambda node: float("-inf"),
    ) -> None:
        self.kept: list[Snapshot] = []
        self.gathering: PartialSnapshot | None = None
        self._store = store
        self._pool = pool
        self._now = now
        self._stall = stall
        self._agreed = agreed
        self._on_end = on_end
        self._moved_at = moved_at
        self._numbers = 0
        for data, manifest in store.kept():
            self._found(data, manifest)
        self.kept.sort(key=lambda snapshot: snapshot.round)
        self._trim()
        self._weed()

    def _found(self, data: StoredState, text: bytes) -> None:
        """Take up a snapshot that was kept by an earlier process."""
        try:
            manifest = Manifest.FromString(text)
        except DecodeError:
            manifest = Manifest()
        whole = (
            manifest.snapshot == data.snapshot
            and manifest.nbytes == data.nbytes
            and len(manifest.digests) == chunks(data.nbytes)
        )
        if whole:
            self.kept.append(Snapshot(manifest, data))
        else:
            log.warning("the snapshot %s is damaged: it is removed", data.snapshot)
            in_background(self._pool, data.drop)

    def _weed(self) -> None:
        """Remove what is not of this run: its journal may have been lost and rounds made anew."""
        for snapshot in list(self.kept):
            if self._agreed(snapshot.round) not in ("", snapshot.state_digest):
                log.warning("the snapshot %s is not of this run: it is removed", snapshot.id)
                self._forget(snapshot)

    # --------------------------------------------------------------------------------------------- making one

    def begin(self, round_index: int, state_bytes: int, donors: Sequence[str]) -> list[tuple[str, Donate]]:
        """Begin a snapshot of the state before ``round_index``, which ``donors`` hold; returns their orders.
        Without donors, or with nothing to donate, there is no snapshot and no order.

        Raises:
            RuntimeError: one is being made.
        """
        if self.gathering is not None:
            raise RuntimeError(f"the snapshot {self.gathering.id} is still being made")
        parts = shares(state_bytes, donors) if donors else []
        if not parts:
            return []
        names = {snapshot.id for snapshot in self.kept}
        while (name := f"round-{round_index}-{self._numbers}") in names:
            self._numbers += 1
        self._numbers += 1
        partial = PartialSnapshot(
            name,
            round_index,
            state_bytes,
            {donor: (first, count) for donor, first, count in parts},
            store=self._store,
            pool=self._pool,
            now=self._now,
            agreed=lambda: self._agreed(round_index),
            on_end=lambda problem: self._ended(partial, problem),
        )
        self.gathering = partial
        return [
            (donor, Donate(snapshot=name, round=round_index, first=first, count=count))
            for donor, first, count in parts
        ]

    def _ended(self, partial: PartialSnapshot, problem: str) -> None:
        self.gathering = None
        if problem:
            log.warning("the snapshot %s has failed: %s", partial.id, problem)
            self._on_end(None, problem)
            return
        assert partial.manifest is not None
        snapshot = Snapshot(partial.manifest, partial.data)
        self.kept.append(snapshot)
        self.kept.sort(key=lambda kept: kept.round)
        self._trim()
        size, donors = format_bytes(partial.nbytes), len(partial.shares)
        self._on_end(snapshot, f"the state after {partial.round} rounds is kept: {size} from {donors} nodes")

    def upload(self, node: str, first: bytes) -> Upload:
        """Where the chunks go whose first message is ``first``; it is still to be fed.

        Raises:
            Refused: the snapshot is not being made, or the node is no donor of it.
        """
        header = parse_chunks_header(frame_of(first, BAD_TRANSFER))
        if self.gathering is None or self.gathering.id != header.snapshot:
            raise Refused(
                BAD_TRANSFER,
                f"the snapshot {header.snapshot[:64]!r} is not being made (any more)",
                "NOT_FOUND",
            )
        return self.gathering.upload(node)

    def departed(self, node: str, reason: str) -> None:
        """A node is gone."""
        if self.gathering is not None:
            self.gathering.departed(node, reason)

    def judge(self) -> None:
        """The nodes may have agreed on another state since the last call."""
        self._weed()
        if self.gathering is not None:
            self.gathering.judge()

    def sweep(self) -> tuple[str, ...]:
        """Give the snapshot up if donors make no progress; returns them. To be called every heartbeat."""
        self.judge()
        if self.gathering is not None:
            self.gathering.expire(self._stall)
        if self.gathering is None:
            return ()
        now = self._now()
        stuck = []
        for donor, since in self.gathering.waiting.items():
            silent = now - since
            idle = min(silent, now - self._moved_at(donor))
            if idle >= self._stall or silent >= PAUSES * self._stall:
                stuck.append(donor)
        if stuck:
            self.gathering.fail(f"{', '.join(stuck)} sent no chunks for {self._stall:g} s")
        return tuple(stuck)

    # --------------------------------------------------------------------------------------------- reading

    def open(self, snapshot_id: str) -> Snapshot:
        """A kept snapshot.

        Raises:
            Refused: it is not kept (any more).
        """
        for snapshot in self.kept:
            if snapshot.id == snapshot_id:
                return snapshot
        raise Refused(BAD_TRANSFER, f"the snapshot {snapshot_id[:64]!r} is not kept (any more)", "NOT_FOUND")

    def read(self, request: ChunksRequest) -> AsyncGenerator[bytes, None]:
        """The frames that answer a request. While they are read, the snapshot is kept.

        Raises:
            Refused: the snapshot is not kept, or does not have these chunks; in the course, it is damaged.
        """
        snapshot = self.open(request.snapshot)
        total = chunks(snapshot.nbytes)
        end = request.first + (request.count or max(0, total - request.first))
        if request.first > total or end > total:
            raise Refused(
                BAD_TRANSFER,
                f"snapshot {snapshot.id} has {total} chunks, asked for were {request.first} to {end}",
            )
        return self._frames(snapshot, request.first, end)

    async def _frames(self, snapshot: Snapshot, first: int, end: int) -> AsyncGenerator[bytes, None]:
        snapshot.readers += 1
        try:
            yield encode_frame(HEADER, snapshot.manifest.SerializeToString())
            for index in range(first, end):
                start, stop = chunk_range(snapshot.nbytes, index, 1)
                hasher = xxhash.xxh3_128()
                for offset in range(start, stop, CHUNK_BYTES):
                    data = await self._read(snapshot, offset, min(CHUNK_BYTES, stop - offset))
                    hasher.update(data)
                    if offset + len(data) == stop and hasher.digest() != snapshot.manifest.digests[index]:
                        raise self._damaged(snapshot, f"chunk {index} is not as it was stored")
                    yield encode_frame(CHUNK, data, offset=offset)
            yield encode_frame(END)
        finally:
            snapshot.readers -= 1
            self._trim()

    async def _read(self, snapshot: Snapshot, offset: int, nbytes: int) -> bytes:
        try:
            return (await in_pool(self._pool, lambda: [snapshot.data.read(offset, nbytes)]))[0]
        except ChunkStoreError as error:
            raise self._damaged(snapshot, str(error)) from error

    def _damaged(self, snapshot: Snapshot, why: str) -> Refused:
        """Nobody shall load it any more."""
        log.error("the snapshot %s is damaged and removed: %s", snapshot.id, why)
        self._forget(snapshot)
        return Refused(BAD_TRANSFER, f"the snapshot {snapshot.id} is damaged: {why}", "ABORTED")

    # --------------------------------------------------------------------------------------------- end

    def discard(self, reason: str) -> None:
        """Forget all: they are of another run, or of another beginning of it."""
        if self.gathering is not None:
            self.gathering.fail(reason)
        for snapshot in list(self.kept):
            log.info("the snapshot %s is removed: %s", snapshot.id, reason)
            self._forget(snapshot)

    def stop(self) -> None:
        """No more snapshots; those that are kept stay."""
        partial, self.gathering = self.gathering, None
        if partial is not None:
            partial.stop("the run has ended")

    def _trim(self) -> None:
        """Keep the newest, and what is being read."""
        for snapshot in self.kept[:-KEPT]:
            if not snapshot.readers:
                self._forget(snapshot)

    def _forget(self, snapshot: Snapshot) -> None:
        if snapshot in self.kept:
            self.kept.remove(snapshot)
            in_background(self._pool, snapshot.data.drop)
