"""One upload to a round, of a whole contribution or of a lane: each frame is checked, then copied once."""

from __future__ import annotations

import numpy as np
from google.protobuf.message import DecodeError

from optim.aggregate import Bytes
from optim.inspection import Inspection
from protos.atoll_pb2 import ContributionHeader
from protos.buckets import BucketTable
from protos.lane_layout import LaneLayout
from protos.refusal import BAD_FRAME, BAD_WEIGHT, OVERSIZED, TRUNCATED, WRONG_TABLE, Refused
from protos.upload import Upload
from protos.wire import Frame


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


class Contribution(Upload):
    """An upload whose header has been accepted.

    Args:
        row: of the member, for the payload of the whole table.
        inspection: of that payload.
        lane: what of it is uploaded here.

    Attributes:
        reach: byte of the row before which nothing of the lane is missing.
    """

    def __init__(self, row: Bytes, inspection: Inspection, lane: LaneLayout) -> None:
        super().__init__(lane.up.nbytes)
        self.lane = lane
        self.reach = lane.up.reach(0, len(row))
        self._row = row
        self._inspection = inspection

    def _take(self, offset: int, body: memoryview) -> None:
        layout, end = self.lane.up, offset + len(body)
        rest = np.frombuffer(body, np.uint8)
        for start, stop in layout.spread(offset, end):
            self._row[start:stop] = rest[: stop - start]
            rest = rest[stop - start :]
        self.reach = layout.reach(end, len(self._row))
        for start, stop in layout.spread(offset, end):  # a bucket lies within one range
            self._inspection.check(self._row, start, stop)


def parse_header(frame: Frame) -> ContributionHeader:
    """The body of a HEADER frame; raises :class:`Refused` on anything else."""
    try:
        return ContributionHeader.FromString(bytes(frame.body))
    except DecodeError as error:
        raise Refused(BAD_FRAME, "the header of the contribution cannot be read") from error
