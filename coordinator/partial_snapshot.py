"""A snapshot on its way up: several donors upload its chunks, which are stored, checked and put together.

Nothing is written before its place, length and digest have been announced and found right, and nothing counts
before the digest of the whole state, made anew from the stored bytes, is the one that all donors announced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import xxhash
from google.protobuf.message import DecodeError

from coordinator.chunk_store import ChunkStore, ChunkStoreError, StoredState
from coordinator.manifest import check_manifest, digesting, manifest_of, parse_chunks_header
from coordinator.pool import in_background, in_pool
from coordinator.reducing import Pool
from protos.atoll_pb2 import ChunksEnd, ChunksHeader, Manifest
from protos.refusal import BAD_TRANSFER, Refused, check_length, frame_of
from protos.snapshots import chunk_bytes, chunk_range, chunks
from protos.wire import CHUNK, END, Frame

COPIED: Final = 20e6  # bytes a second at which even a busy disk takes the copy that a donor uploads from


class PartialSnapshot:
    """What has come of one snapshot.

    Args:
        snapshot: its name.
        round_index: whose state it is.
        nbytes: of the state.
        shares: first chunk and number of chunks of each donor; together they are the state.
        store: for the chunks.
        pool: one worker that does its jobs in order; all reading, writing and digesting is done there.
        now: seconds on the coordinator's clock.
        agreed: digest of the state that the nodes agree on, or an empty string while that is open.
        on_end: called once, with an empty string when the snapshot is complete and kept, or with the reason
            why it has failed.

    Attributes:
        waiting: donors whose share is not complete, and when they last moved; before its upload begins,
            when a donor should have copied its share.
        received: bytes so far.
        manifest: of the snapshot; ``None`` before the first donor has begun.
        ended: in words, why nothing more is taken; empty while it goes on.
    """

    def __init__(
        self,
        snapshot: str,
        round_index: int,
        nbytes: int,
        shares: Mapping[str, tuple[int, int]],
        *,
        store: ChunkStore,
        pool: Pool,
        now: Callable[[], float],
        agreed: Callable[[], str],
        on_end: Callable[[str], None],
    ) -> None:
        self.id = snapshot
        self.round = round_index
        self.nbytes = nbytes
        self.shares = dict(shares)
        self.waiting = {node: now() + self._share_bytes(node) / COPIED for node in shares}
        self.received = 0
        self.manifest: Manifest | None = None
        self.ended = ""
        self._store = store
        self._pool = pool
        self._now = now
        self._agreed = agreed
        self._on_end = on_end
        self._digests = [b""] * chunks(nbytes)
        self._uploads: dict[str, Upload] = {}
        self._data: StoredState | None = None  # belongs to the pool's thread
        self._common = ""  # the agreed digest, once it is known
        self._digested_at: float | None = None  # when the digest was found to be what the donors announced
        self._keeping = False

    @property
    def data(self) -> StoredState:
        """The stored bytes of a snapshot that is complete."""
        assert self._data is not None
        return self._data

    def upload(self, node: str) -> Upload:
        """A donor begins.

        Raises:
            Refused: it was not asked, or has begun already.
        """
        if node not in self.shares:
            raise Refused(
                BAD_TRANSFER, f"{node} was not asked for chunks of {self.id}", "FAILED_PRECONDITION"
            )
        if node in self._uploads:
            raise Refused(
                BAD_TRANSFER, f"{node} is uploading its chunks of {self.id} already", "ALREADY_EXISTS"
            )
        self._uploads[node] = Upload(self, node)
        return self._uploads[node]

    def _share_bytes(self, node: str) -> int:
        start, stop = chunk_range(self.nbytes, *self.shares[node])
        return stop - start

    # --------------------------------------------------------------------------------------------- uploads

    def accept(self, node: str, header: ChunksHeader) -> None:
        """Check what a donor announces; the first header of a snapshot is what the others have to equal."""
        told = (header.snapshot, header.round, header.nbytes, (header.first, header.count))
        asked = (self.id, self.round, self.nbytes, self.shares[node])
        if told != asked:
            raise Refused(
                BAD_TRANSFER,
                f"the header is of chunks {header.first} to {header.first + header.count} of snapshot "
                f"{header.snapshot[:64]!r} of round {header.round} ({header.nbytes} bytes), asked for were "
                f"{self.shares[node][1]} from {self.shares[node][0]} on of {self.id!r} of round {self.round} "
                f"({self.nbytes} bytes)",
            )
        manifest = manifest_of(header)
        if self.manifest is None:
            check_manifest(manifest)
            problem = self._disagreement(manifest)
            if problem:
                raise Refused(BAD_TRANSFER, problem, "FAILED_PRECONDITION")
            self.manifest = manifest
        elif manifest.state_digest != self.manifest.state_digest:
            raise Refused(
                BAD_TRANSFER,
                f"the state of round {self.round} has the digest {manifest.state_digest[:64]!r} with {node}, "
                f"and {self.manifest.state_digest} with another donor",
            )
        elif manifest != self.manifest:
            raise Refused(BAD_TRANSFER, f"{node} announces other tensors than another donor")

    def _disagreement(self, manifest: Manifest) -> str:
        self._common = self._common or self._agreed()
        if self._common in ("", manifest.state_digest):
            return ""
        return (
            f"the donors' state of round {self.round} has the digest {manifest.state_digest[:64]!r}, the "
            f"nodes agreed on {self._common}"
        )

    def write(self, offset: int, body: memoryview) -> None:
        """Store bytes; in the pool."""
        if self._data is None:
            self._data = self._store.create(self.id, self.nbytes)
        self._data.write(offset, body)

    async def run(self, work: Callable[[], list[bytes]]) -> None:
        """Do ``work`` in the pool for an upload.

        Raises:
            Refused: it failed, or the snapshot has failed meanwhile.
        """
        self.check_going_on()
        try:
            await in_pool(self._pool, work)
        except ChunkStoreError as error:
            self.fail(str(error))
        self.check_going_on()

    def check_going_on(self) -> None:
        """Raise :class:`Refused` if nothing more is taken."""
        if self.ended:
            raise Refused("", f"the snapshot was given up: {self.ended}", "ABORTED")

    def moved(self, node: str, nbytes: int) -> None:
        """Bytes of a donor have been stored."""
        self.waiting[node] = self._now()
        self.received += nbytes

    def delivered(self, node: str, digests: list[bytes]) -> None:
        """A donor's share is complete."""
        first, count = self.shares[node]
        self._digests[first : first + count] = digests
        del self.waiting[node]
        if not self.waiting:
            self._complete()

    # --------------------------------------------------------------------------------------------- end

    def departed(self, node: str, reason: str) -> None:
        """A node is gone; without a donor's chunks there is no snapshot."""
        if node in self.waiting:
            self.fail(f"{node} left before it had uploaded its chunks: {reason}")

    def fail(self, reason: str) -> None:
        """Give it up; harmless when it has ended."""
        if not self.ended:
            self.stop(reason)
            self._on_end(reason)

    def stop(self, reason: str) -> None:
        """Give it up and tell only the donors."""
        if self.ended:
            return
        self.ended = reason
        in_background(self._pool, self._drop)
        for upload in self._uploads.values():
            upload.close()

    def _drop(self) -> None:
        if self._data is not None:
            self._data.drop()

    def _complete(self) -> None:
        """All chunks are stored: digest the state, a piece at a time, compare, and keep it."""
        manifest = self.manifest
        assert manifest is not None
        manifest.digests.extend(self._digests)
        pieces = digesting(manifest, lambda offset, nbytes: self.data.read(offset, nbytes))

        def advance() -> None:
            self._pool.submit(lambda: [next(pieces)], advanced)

        def advanced(outcome: list[bytes] | None, error: BaseException | None) -> None:
            if self.ended:
                return
            digest = outcome[0].decode() if outcome else ""
            if error is not None:
                self.fail(_text(error))
            elif not digest:
                advance()
            elif digest != manifest.state_digest:
                told = manifest.state_digest
                self.fail(f"the state that came has the digest {digest}, its donors announced {told}")
            else:
                self._digested_at = self._now()
                self.judge()

        advance()

    def judge(self) -> None:
        """Keep the state once it is digested and the nodes agree on it; give it up if they hold another."""
        manifest = self.manifest
        if self.ended or self._keeping or manifest is None:
            return
        if problem := self._disagreement(manifest):
            self.fail(problem)
        elif self._common and self._digested_at is not None:
            self._keeping = True
            self._pool.submit(lambda: self._keep(manifest), self._kept)

    def _keep(self, manifest: Manifest) -> list[bytes]:
        self.data.keep(manifest.SerializeToString())
        return []

    def _kept(self, _: list[bytes] | None, error: BaseException | None) -> None:
        if self.ended:
            return
        if error is not None:
            self.fail(_text(error))
        else:
            self.ended = "it is complete"
            self._on_end("")

    def expire(self, stall: float) -> None:
        """Give it up if the nodes cannot agree on the state within ``stall`` seconds."""
        since = self._digested_at
        if since is not None and not self._keeping and self._now() - since >= stall:
            self.fail(f"the nodes did not agree on the state after {self.round} rounds within {stall:g} s")


class Upload:
    """One donor's chunks.

    Attributes:
        node: the donor.
        on_close: set by the transport: wake whatever waits for the donor.
    """

    def __init__(self, partial: PartialSnapshot, node: str) -> None:
        self.node = node
        self.on_close: Callable[[], None] | None = None
        self._partial = partial
        first, count = partial.shares[node]
        self._place, self._end = chunk_range(partial.nbytes, first, count)
        self._count = count
        self._chunk_bytes = chunk_bytes(partial.nbytes)
        self._begun = False
        self._hasher = xxhash.xxh3_128()
        self._digests: list[bytes] = []

    @property
    def count(self) -> int:
        """Chunks that are stored."""
        return len(self._digests)

    @property
    def refusal(self) -> Refused | None:
        """Why nothing more is taken, if the snapshot has been given up."""
        try:
            self._partial.check_going_on()
        except Refused as refusal:
            return refusal
        return None

    async def feed(self, message: bytes) -> bool:
        """Take one message; ``True`` after the last. Returns when what it brought is stored.

        Raises:
            Refused: a message that does not fit, or no room for it: the snapshot has failed then.
        """
        self._partial.check_going_on()
        try:
            return await self._feed(message)
        except Refused as refusal:
            self.broke(refusal.text)
            raise

    async def _feed(self, message: bytes) -> bool:
        check_length(message)
        frame = frame_of(message, BAD_TRANSFER)
        if not self._begun:
            self._partial.accept(self.node, parse_chunks_header(frame))
            self._begun = True
            self._partial.moved(self.node, 0)
        elif frame.kind == CHUNK:
            await self._chunk(frame)
        elif frame.kind == END:
            self._finish(frame)
            return True
        else:
            raise Refused(BAD_TRANSFER, f"a frame of kind {frame.kind} among the chunks of a snapshot")
        return False

    async def _chunk(self, frame: Frame) -> None:
        end = frame.offset + len(frame.body)
        if frame.offset != self._place or not frame.body or end > self._end:
            raise Refused(
                BAD_TRANSFER,
                f"{len(frame.body)} bytes at offset {frame.offset}; expected were some from {self._place} "
                f"on, before {self._end}",
            )
        await self._partial.run(lambda: self._store(frame.offset, frame.body))
        self._place = end
        self._partial.moved(self.node, len(frame.body))

    def _store(self, offset: int, body: memoryview) -> list[bytes]:
        """In the pool: write, and digest chunk by chunk."""
        self._partial.write(offset, body)
        while body:
            end = min(offset - offset % self._chunk_bytes + self._chunk_bytes, self._end)
            part = body[: end - offset]
            self._hasher.update(part)
            body, offset = body[len(part) :], offset + len(part)
            if offset == end:
                self._digests.append(self._hasher.digest())
                self._hasher.reset()
        return []

    def _finish(self, frame: Frame) -> None:
        if self._place != self._end:
            raise Refused(BAD_TRANSFER, f"the chunks end at byte {self._place}, {self._end} was announced")
        try:
            announced = list(ChunksEnd.FromString(bytes(frame.body)).digests)
        except DecodeError as error:
            raise Refused(BAD_TRANSFER, "the end of the chunks cannot be read") from error
        if len(announced) != self._count:
            raise Refused(BAD_TRANSFER, f"{len(announced)} digests of {self._count} chunks")
        for index, (digest, told) in enumerate(zip(self._digests, announced, strict=True)):
            if digest != told:
                raise Refused(
                    BAD_TRANSFER,
                    f"chunk {self._partial.shares[self.node][0] + index} has the digest {digest.hex()}, "
                    f"{self.node} announces {told[:16].hex()}",
                )
        self._partial.delivered(self.node, self._digests)

    def broke(self, reason: str) -> None:
        """The upload is lost; harmless after its end."""
        if self.node in self._partial.waiting:
            self._partial.fail(f"the upload of {self.node} broke off: {reason}")

    def close(self) -> None:
        """Let the transport go."""
        if self.on_close is not None:
            self.on_close()


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, ChunkStoreError) else f"it cannot be checked: {error!r}"
