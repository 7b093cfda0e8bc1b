"""One upload to a round, of a whole contribution or of a lane: each frame is checked, then copied once."""

from __future__ import annotations

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from coordinator.inspection import Inspection
from coordinator.lane_layout import LaneLayout
from coordinator.refusal import (
    BAD_DIGEST,
    BAD_FRAME,
    BAD_WEIGHT,
    OUT_OF_ORDER,
    OVERSIZED,
    TRUNCATED,
    WRONG_TABLE,
    Refused,
)
from optim.aggregate import Bytes
from protos.atoll_pb2 import ContributionEnd, ContributionHeader
from protos.buckets import BucketTable
from protos.wire import CHUNK, END, Frame


def check_header(header: ContributionHeader, table: BucketTable, lane: LaneLayout, weight: int) -> None:
    """Check what a contribution announces against the bucket table, its ``lane`` and the member's ``weight``.

    Raises:
        Refused: another table, another size, or another weight.
    """
    if header.abstain:
        if header.nbytes:
            raise Refused(BAD_FRAME, f"a node that abstains announces 0 bytes, not {header.nbytes}")
        return
    if header.table_digest != table.digest:
        raise Refused(
            WRONG_TABLE,
            f"the contribution is laid out by table {header.table_digest[:128] or 'none'}, this round by "
            f"{table.digest}: join again with the coordinator's run file",
            "FAILED_PRECONDITION",
        )
    nbytes = lane.up.nbytes
    if header.nbytes != nbytes:
        kind = OVERSIZED if header.nbytes > nbytes else TRUNCATED
        what = f"the lane of {len(lane.buckets)} buckets" if lane.part else "a contribution"
        raise Refused(kind, f"{what} has {nbytes} bytes, this one announces {header.nbytes}")
    if header.weight != weight:
        raise Refused(
            BAD_WEIGHT, f"this node joined with weight {weight}, its contribution claims {header.weight}"
        )


class Contribution:
    """An upload whose header has been accepted.

    Args:
        row: of the member, for the payload of the whole table.
        inspection: of that payload.
        lane: what of it is uploaded here.

    Attributes:
        received: bytes of the lane so far; they are contiguous from 0.
        reach: byte of the row before which nothing of the lane is missing.
        complete: the last frame has come and everything was right.
    """

    def __init__(self, row: Bytes, inspection: Inspection, lane: LaneLayout) -> None:
        self.lane = lane
        self.received = 0
        self.reach = lane.up.reach(0, len(row))
        self.complete = False
        self._row = row
        self._inspection = inspection
        self._hasher = xxhash.xxh3_128()

    def feed(self, frame: Frame) -> None:
        """Take the next frame.

        Raises:
            Refused: the frame is out of order, out of bounds, of the wrong kind, or the digest does not fit.
        """
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
        layout = self.lane.up
        if end > layout.nbytes:
            raise Refused(OVERSIZED, f"a chunk ends at byte {end}, the contribution has {layout.nbytes}")
        body = np.frombuffer(frame.body, np.uint8)
        for start, stop in layout.spread(frame.offset, end):
            self._row[start:stop] = body[: stop - start]
            body = body[stop - start :]
        self._hasher.update(frame.body)
        self.received, self.reach = end, layout.reach(end, len(self._row))
        for start, stop in layout.spread(frame.offset, end):  # a bucket lies within one range
            self._inspection.check(self._row, start, stop)

    def _end(self, frame: Frame) -> None:
        if self.received != self.lane.up.nbytes:
            raise Refused(
                TRUNCATED, f"the contribution ends after {self.received} of {self.lane.up.nbytes} bytes"
            )
        announced = parse_end(frame).payload_digest
        digest = self._hasher.hexdigest()
        if announced != digest:
            raise Refused(
                BAD_DIGEST, f"the payload's digest is {digest}, the node announces {announced[:64]!r}"
            )
        self.complete = True


def parse_header(frame: Frame) -> ContributionHeader:
    """The body of a HEADER frame; raises :class:`Refused` on anything else."""
    try:
        return ContributionHeader.FromString(bytes(frame.body))
    except DecodeError as error:
        raise Refused(BAD_FRAME, "the header of the contribution cannot be read") from error


def parse_end(frame: Frame) -> ContributionEnd:
    """The body of an END frame; raises :class:`Refused` on anything else."""
    try:
        return ContributionEnd.FromString(bytes(frame.body))
    except DecodeError as error:
        raise Refused(BAD_FRAME, "the end of the contribution cannot be read") from error
