"""A result while it arrives: chunks land in place and count only once a commit with their digest has come."""

from __future__ import annotations

import torch
import xxhash
from google.protobuf.message import DecodeError

from node.exchange.base import RoundResult
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos import wire


class ChunkAssembly:
    """Puts the chunks of one result, or of a slice of one, in their place.

    Args:
        buffer: where the bytes go, as many as there will be.
        what: is put together, for texts.
        base: offset of the first one in the chunks.
    """

    def __init__(self, buffer: memoryview, what: str, base: int = 0) -> None:
        self._buffer, self._what, self._base = buffer, what, base
        self._attempt = 0
        self._received = 0
        self._hasher = xxhash.xxh3_128()

    @property
    def received(self) -> int:
        """Bytes of the present attempt that have come."""
        return self._received

    def _decoded(self, message: wire.Message) -> wire.Frame:
        try:
            return wire.decode_frame(message)
        except wire.FrameError as error:
            raise self._broken(str(error)) from error

    def _chunk(self, frame: wire.Frame) -> None:
        start = frame.offset - self._base
        if frame.attempt != self._attempt:
            if start or self._received:
                raise self._broken(f"a chunk of attempt {frame.attempt} came in attempt {self._attempt}")
            self._attempt = frame.attempt  # a stored result is served as it was made
        if start != self._received:
            due = self._base + self._received
            raise self._broken(f"a chunk starts at byte {frame.offset}, expected was {due}")
        end = start + len(frame.body)
        if end > len(self._buffer):
            raise self._broken(f"it exceeds the {len(self._buffer)} bytes of the bucket table")
        self._buffer[start:end] = frame.body
        self._hasher.update(frame.body)
        self._received = end

    def _restart(self, attempt: int) -> None:
        self._attempt = attempt
        self._received = 0
        self._hasher.reset()

    def _broken(self, what: str) -> Trouble:
        return Trouble(
            Kind.PROTOCOL,
            f"{self._what} is damaged and was not applied: {what}. Nothing of the "
            "run is lost: start this node again, and check its memory and network if this repeats",
        )


class ResultAssembly(ChunkAssembly):
    """Puts the frames of one result of the coordinator together.

    Args:
        buffer: where the payload goes, as long as the round's bucket table says.
        round_index: the round that was asked for.
    """

    def __init__(self, buffer: memoryview, round_index: int) -> None:
        super().__init__(buffer, f"the result of round {round_index + 1}")
        self.round = round_index

    def add(self, message: bytes) -> pb.Commit | None:
        """Take the next frame; the commit once it has come and everything fits. Of a round whose slices
        travelled between nodes it comes alone: the result is theirs to give.

        Raises:
            Trouble: kind PROTOCOL, if a frame or the digest is wrong. Nothing may be applied then.
        """
        frame = self._decoded(message)
        if frame.kind == wire.CHUNK:
            self._chunk(frame)
            return None
        if frame.kind == wire.RESTART:
            self._restart(frame.attempt)
            return None
        if frame.kind == wire.COMMIT:
            return self._commit(frame.body)
        raise self._broken(f"a frame of kind {frame.kind} has no place in a result")

    def _commit(self, body: memoryview) -> pb.Commit:
        commit = pb.Commit()
        try:
            commit.ParseFromString(bytes(body))
        except DecodeError as error:
            raise self._broken(f"its commit cannot be read: {error}") from error
        if commit.round != self.round:
            raise self._broken(f"it commits round {commit.round + 1}")
        if commit.slices and self._received:
            raise self._broken("its slices travelled between nodes, and chunks came before the commit")
        if commit.nbytes not in (0, len(self._buffer)):
            raise self._broken(
                f"it announces {commit.nbytes} bytes, the bucket table has {len(self._buffer)}"
            )
        if commit.nbytes != self._received and not commit.slices:
            raise self._broken(f"it announces {commit.nbytes} bytes, {self._received} came")
        if len(commit.voters) != len(commit.weights):
            raise self._broken(f"it names {len(commit.voters)} voters and {len(commit.weights)} weights")
        if self._received and commit.payload_digest != (digest := self._hasher.hexdigest()):
            raise self._broken(f"its digest is {digest}, the coordinator announced {commit.payload_digest}")
        return commit


def round_result(commit: pb.Commit, buffer: torch.Tensor, *, counted: bool) -> RoundResult:
    """A result that has come whole.

    Args:
        commit: as :meth:`ResultAssembly.add` returned it; of slices, once all of them have come.
        buffer: uint8, what was assembled; empty for a lane without buckets.
        counted: whether a contribution of this node is in it.
    """
    return RoundResult(
        round=commit.round,
        payload=buffer if commit.nbytes or commit.slices or (commit.voters and not len(buffer)) else None,
        voters=tuple(commit.voters),
        weights=tuple(commit.weights),
        counted=counted,
        agreement=commit.agreement,
        reason=commit.reason,
    )
