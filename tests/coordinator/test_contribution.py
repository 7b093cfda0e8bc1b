"""An upload, frame by frame: what fits is stored, anything else is refused by kind."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.contribution import Contribution, check_header, parse_header
from optim.inspection import Inspection
from protos.atoll_pb2 import ContributionHeader
from protos.lane_layout import LaneLayout
from protos.refusal import Refused
from protos.wire import CHUNK, COMMIT, END, HEADER, RESTART, Frame, decode_frame, encode_frame
from tests.coordinator.contribution_rig import end_frame, mixed_table, random_payload

TABLE = mixed_table()
PAYLOAD = random_payload(1, TABLE)
N = TABLE.nbytes


def begun() -> tuple[Contribution, np.ndarray]:
    row = np.zeros(N, np.uint8)
    return Contribution(row, Inspection(TABLE), LaneLayout(TABLE)), row


def chunk(start: int, body: bytes) -> Frame:
    return decode_frame(encode_frame(CHUNK, body, offset=start))


def end(payload: bytes) -> Frame:
    return decode_frame(end_frame(payload))


@given(st.lists(st.integers(1, N - 1), max_size=8))
def test_any_split_arrives(cuts: list[int]) -> None:
    contribution, row = begun()
    edges = sorted({0, N, *cuts})
    for start, stop in itertools.pairwise(edges):
        contribution.feed(chunk(start, PAYLOAD[start:stop]))
        assert contribution.received == stop and not contribution.complete
    contribution.feed(end(PAYLOAD))
    assert contribution.complete
    assert row.tobytes() == PAYLOAD


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        ([chunk(64, PAYLOAD[64:])], "out-of-order"),
        ([chunk(0, PAYLOAD[:64]), chunk(0, PAYLOAD[:64])], "out-of-order"),
        ([chunk(0, PAYLOAD[:64]), chunk(128, PAYLOAD[128:])], "out-of-order"),
        ([chunk(2**63, b"x")], "out-of-order"),
        ([chunk(0, PAYLOAD + b"\0")], "oversized"),
        ([chunk(0, PAYLOAD), chunk(N, b"\0")], "oversized"),
        ([chunk(0, b"")], "bad-frame"),
        ([end(b"")], "truncated"),
        ([chunk(0, PAYLOAD[:-64]), end(PAYLOAD[:-64])], "truncated"),
        ([chunk(0, PAYLOAD), end(PAYLOAD[:-1])], "bad-digest"),
        ([chunk(0, PAYLOAD), decode_frame(encode_frame(END, b""))], "bad-digest"),
        ([chunk(0, PAYLOAD), decode_frame(encode_frame(END, b"\xff\xff\xff"))], "bad-frame"),
        ([decode_frame(encode_frame(HEADER, b""))], "bad-frame"),
        ([decode_frame(encode_frame(COMMIT, b""))], "bad-frame"),
        ([decode_frame(encode_frame(RESTART, b""))], "bad-frame"),
    ],
)
def test_refused(frames: list[Frame], kind: str) -> None:
    contribution, _ = begun()
    with pytest.raises(Refused) as refused:
        for frame in frames:
            contribution.feed(frame)
    assert refused.value.kind == kind
    assert not contribution.complete


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("step", [1, 3, 64, 4096])
def test_a_mean_with_a_value_that_is_not_finite(value: float, step: int) -> None:
    bad = bytearray(PAYLOAD)
    bad[64 + 40 : 64 + 44] = np.array([value], "<f4").tobytes()
    contribution, _ = begun()
    with pytest.raises(Refused, match="must abstain") as refused:
        for start in range(0, N, step):
            contribution.feed(chunk(start, bytes(bad[start : start + step])))
    assert refused.value.kind == "not-finite"
    assert contribution.received >= 64 + 44


def test_votes_may_look_like_nan() -> None:
    payload = b"\xff" * 64 + PAYLOAD[64:]
    contribution, _ = begun()
    contribution.feed(chunk(0, payload))
    contribution.feed(end(payload))
    assert contribution.complete


def header(**changes: Any) -> ContributionHeader:
    values: dict[str, Any] = {"table_digest": TABLE.digest, "nbytes": N, "weight": 3}
    return ContributionHeader(**{**values, **changes})


def test_headers_that_fit() -> None:
    check_header(header(), TABLE, LaneLayout(TABLE), 3)
    check_header(ContributionHeader(abstain=True), TABLE, LaneLayout(TABLE), 3)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"table_digest": "other"}, "wrong-table"),
        ({"table_digest": ""}, "wrong-table"),
        ({"nbytes": N + 64}, "oversized"),
        ({"nbytes": 2**60}, "oversized"),
        ({"nbytes": N - 64}, "truncated"),
        ({"nbytes": 0}, "truncated"),
        ({"weight": 4}, "bad-weight"),
        ({"weight": 0}, "bad-weight"),
        ({"abstain": True}, "bad-frame"),
    ],
)
def test_headers_that_do_not(changes: dict[str, Any], kind: str) -> None:
    with pytest.raises(Refused) as refused:
        check_header(header(**changes), TABLE, LaneLayout(TABLE), 3)
    assert refused.value.kind == kind


def test_a_wrong_table_names_both_digests() -> None:
    with pytest.raises(Refused) as refused:
        check_header(header(table_digest="abc"), TABLE, LaneLayout(TABLE), 3)
    assert "abc" in refused.value.text and TABLE.digest in refused.value.text


def test_a_header_that_cannot_be_read() -> None:
    with pytest.raises(Refused) as refused:
        parse_header(decode_frame(encode_frame(HEADER, b"\xff\xff\xff\xff")))
    assert refused.value.kind == "bad-frame"
