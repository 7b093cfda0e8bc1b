"""Where the bytes of a lane lie in the payload of a round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.contribution import Contribution, check_header
from optim.inspection import Inspection
from protos.atoll_pb2 import ContributionHeader
from protos.lane_layout import LaneLayout, Ranges, layout_of
from protos.refusal import Refused
from protos.wire import CHUNK, decode_frame, encode_frame
from tests.coordinator.contribution_rig import coded_table, end_frame, random_payload

TABLE = coded_table()  # votes, int4, fp32, a basis of it, fp32
PAYLOAD = random_payload(3, TABLE)
SIZE = 40

edges = st.lists(st.integers(0, SIZE), unique=True, max_size=12).map(sorted)


@given(edges, st.data())
def test_ranges_are_what_they_say(points: list[int], data: st.DataObject) -> None:
    pairs = list(zip(points[::2], points[1::2], strict=False))
    ranges = Ranges(pairs)
    members = [byte for start, end in pairs for byte in range(start, end)]
    assert ranges.nbytes == len(members)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(members))] * 2)))
    assert [b for start, end in ranges.spread(first, last) for b in range(start, end)] == members[first:last]
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, SIZE)] * 2)))
    place, found = ranges.within(start, end)
    inside = [byte for byte in members if start <= byte < end]
    assert [byte for one, two in found for byte in range(one, two)] == inside
    assert not inside or members[place] == inside[0]
    assert ranges.reach(first, SIZE) == (members[first] if first < len(members) else SIZE)


def header(*buckets: int, **changes: Any) -> ContributionHeader:
    return ContributionHeader(part=True, buckets=buckets, table_digest=TABLE.digest, weight=1, **changes)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (header(0, 5), "names bucket 5, the table of round 1 has 5"),
        (header(2**32 - 1), "names bucket 4294967295"),
        (header(2, 1), "names bucket 1 after bucket 2"),
        (header(1, 1), "names bucket 1 after bucket 1"),
        (ContributionHeader(buckets=[0, 1]), "may not name buckets, this one names 2"),
    ],
)
def test_buckets_that_make_no_lane(bad: ContributionHeader, words: str) -> None:
    with pytest.raises(Refused, match=words) as refused:
        layout_of(bad, TABLE)
    assert refused.value.kind == "bad-lane"


def test_layouts() -> None:
    whole = layout_of(ContributionHeader(), TABLE)
    assert not whole.part and whole.buckets == (0, 1, 2, 3, 4) and not whole.idle
    assert (whole.up.nbytes, whole.down.nbytes) == (TABLE.nbytes, TABLE.result_nbytes)
    nothing = layout_of(header(), TABLE)
    assert nothing.idle and (nothing.up.nbytes, nothing.down.nbytes) == (0, 0)
    basis = layout_of(header(3), TABLE)
    assert not basis.idle and basis.up.nbytes == 0
    assert basis.down.bounds == [(TABLE.result_offsets[3], TABLE.result_offsets[4])]
    assert layout_of(header(1, 2), TABLE).up.bounds == [(TABLE.offsets[1], TABLE.offsets[3])]


@pytest.mark.parametrize(("extra", "kind"), [(64, "oversized"), (-64, "truncated")])
def test_a_lane_announces_the_size_of_its_buckets(extra: int, kind: str) -> None:
    lane = LaneLayout(TABLE, (0, 2))
    check_header(header(0, 2, nbytes=lane.up.nbytes), TABLE, lane, 1)
    with pytest.raises(Refused, match=f"the lane of 2 buckets has {lane.up.nbytes} bytes") as refused:
        check_header(header(0, 2, nbytes=lane.up.nbytes + extra), TABLE, lane, 1)
    assert refused.value.kind == kind


def uploaded(buckets: list[int], payload: bytes, step: int) -> np.ndarray:
    """The row after an upload of a lane in chunks of ``step``."""
    lane = LaneLayout(TABLE, buckets)
    row = np.full(TABLE.nbytes, 0xA5, np.uint8)
    contribution = Contribution(row, Inspection(TABLE), lane)
    body = b"".join(payload[start:end] for start, end in lane.up.bounds)
    for start in range(0, len(body), step):
        frame = encode_frame(CHUNK, body[start : start + step], offset=start)
        contribution.feed(decode_frame(frame))
    contribution.feed(decode_frame(end_frame(body)))
    assert contribution.complete and contribution.reach == TABLE.nbytes
    return row


@given(st.sets(st.integers(0, 4)).map(sorted), st.integers(1, 700))
def test_a_lane_lands_in_its_places_and_nowhere_else(buckets: list[int], step: int) -> None:
    row = uploaded(buckets, PAYLOAD, step)
    expected = np.full(TABLE.nbytes, 0xA5, np.uint8)
    for index in buckets:
        place = slice(TABLE.offsets[index], TABLE.offsets[index] + TABLE.buckets[index].nbytes)
        expected[place] = np.frombuffer(PAYLOAD, np.uint8)[place]
    assert (row == expected).all()


@pytest.mark.parametrize("step", [1, 7, 64, 4096])
@pytest.mark.parametrize(
    ("bucket", "kind"), [(1, "bad-code"), (2, "not-finite"), (4, "not-finite")]
)  # the scales of an int4 code, and values
def test_what_cannot_be_decoded_is_found_in_a_lane(bucket: int, kind: str, step: int) -> None:
    bad = bytearray(PAYLOAD)
    start = TABLE.offsets[bucket]
    bad[start : start + TABLE.buckets[bucket].nbytes] = b"\xff" * TABLE.buckets[bucket].nbytes
    uploaded([i for i in range(5) if i != bucket], bytes(bad), step)
    with pytest.raises(Refused) as refused:
        uploaded([0, bucket], bytes(bad), step)
    assert refused.value.kind == kind
