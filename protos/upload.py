"""The frames of an upload behind its header: CHUNKs without a gap, then END with the digest of all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import xxhash
from google.protobuf.message import DecodeError

from protos.atoll_pb2 import ContributionEnd
from protos.refusal import BAD_DIGEST, BAD_FRAME, OUT_OF_ORDER, OVERSIZED, TRUNCATED, Refused
from protos.wire import CHUNK, CHUNK_BYTES, END, Frame, encode_frame

LEAST_BYTES: Final = 64 << 10  # of a chunk, but for the last: each message costs as much as some of its bytes
_SHARE: Final = 24  # chunks of a payload, if they are not larger than a chunk may be


def chunk_bytes(nbytes: int) -> int:
    """Of the chunks by which a payload of ``nbytes`` goes to a hub.

    What comes back is made of a chunk of every sender: it lags behind by that much, and so is all of it late.
    """
    share = nbytes // _SHARE
    return min(max(share - share % LEAST_BYTES, LEAST_BYTES), CHUNK_BYTES)


def chunk_stop(start: int, nbytes: int, final: int) -> int:
    """Where a chunk of about ``nbytes`` ends that begins at ``start``, if bytes up to ``final`` may be
    sent: small rests go with it."""
    stop = start + nbytes
    rest = final - stop
    return final if rest < LEAST_BYTES and nbytes + rest <= CHUNK_BYTES else stop


class Upload(ABC):
    """Checks each frame, and hands its bytes on before the next one is taken.

    Args:
        nbytes: that have been announced.

    Attributes:
        received: bytes so far; they are contiguous from 0.
        complete: the last frame has come and everything was right.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.received = 0
        self.complete = False
        self._hasher = xxhash.xxh3_128()

    @abstractmethod
    def _take(self, offset: int, body: memoryview) -> None:
        """Use these bytes, which are a view that holds during the call; may raise :class:`Refused`."""

    def feed(self, frame: Frame) -> None:
        """Take the next frame.

        Raises:
            Refused: the frame is out of order, out of bounds, of the wrong kind, the digest does not fit, or
                the bytes cannot be used.
        """
        if self.complete:
            raise Refused(BAD_FRAME, "a frame after the end of the contribution")
        if frame.kind == CHUNK:
            self._chunk(frame)
        elif frame.kind == END:
            self._end(frame)
        else:
            raise Refused(
                BAD_FRAME, f"a frame of kind {frame.kind} within a contribution; expected CHUNK or END"
            )

    def _chunk(self, frame: Frame) -> None:
        size = len(frame.body)
        end = frame.offset + size
        if not size:
            raise Refused(BAD_FRAME, f"an empty chunk at offset {frame.offset}")
        if frame.offset != self.received:
            raise Refused(OUT_OF_ORDER, f"a chunk at offset {frame.offset}, expected {self.received}")
        if end > self.nbytes:
            raise Refused(OVERSIZED, f"a chunk ends at byte {end}, the contribution has {self.nbytes}")
        self._hasher.update(frame.body)
        self.received = end
        self._take(frame.offset, frame.body)

    def _end(self, frame: Frame) -> None:
        if self.received != self.nbytes:
            raise Refused(TRUNCATED, f"the contribution ends after {self.received} of {self.nbytes} bytes")
        announced = parse_end(frame).payload_digest
        digest = self._hasher.hexdigest()
        if announced != digest:
            raise Refused(
                BAD_DIGEST, f"the payload's digest is {digest}, the node announces {announced[:64]!r}"
            )
        self.complete = True


def parse_end(frame: Frame) -> ContributionEnd:
    """The body of an END frame; raises :class:`Refused` on anything else."""
    try:
        return ContributionEnd.FromString(bytes(frame.body))
    except DecodeError as error:
        raise Refused(BAD_FRAME, "the end of the contribution cannot be read") from error


def end_frame(digest: str, attempt: int = 0) -> bytes:
    """The END frame behind chunks whose xxh3_128 is ``digest``, in hex."""
    return encode_frame(END, ContributionEnd(payload_digest=digest).SerializeToString(), attempt=attempt)
