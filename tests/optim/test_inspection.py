"""What a contribution must hold is checked as it arrives, and before it counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optim.codecs import codec_of
from optim.inspection import Inspection
from protos.buckets import Bucket, BucketTable
from protos.refusal import Refused
from tests.coordinator.contribution_rig import coded_table, mixed_table, random_payload

CODECS = ("bf16", "int8", "int4", "2bit", "ternary", "1bit", "1bit-row", "lowrank:2", "lowrank:1+int8")


def row_of(table: BucketTable, seed: int = 0) -> np.ndarray:
    return np.frombuffer(random_payload(seed, table), np.uint8).copy()


def at_once(table: BucketTable, row: np.ndarray) -> None:
    Inspection(table).check(row, 0, table.nbytes)


def test_fp32_is_checked_in_mean_buckets_only() -> None:
    table = mixed_table()
    row = row_of(table)
    row[:64] = 0xFF  # votes may hold any bits, also those of a NaN
    inspection = Inspection(table)
    inspection.check(row, 0, table.nbytes)
    for bad in (np.nan, np.inf, -np.inf):
        row[64 + 12 : 64 + 16] = np.array([bad], "<f4").view(np.uint8)
        with pytest.raises(Refused, match="are not finite") as refused:
            inspection.check(row, 0, table.nbytes)
        assert refused.value.kind == "not-finite"
        inspection.check(row, 0, 76)
        inspection.check(row, 80, table.nbytes)
        with pytest.raises(Refused):
            inspection.check(row, 76, 80)
        with pytest.raises(Refused):
            inspection.check(row, 78, 81)  # the value's last bytes are among these


@pytest.mark.parametrize("codec", CODECS)
def test_good_encodings_pass_in_any_split(codec: str) -> None:
    table = coded_table(codec)
    row = row_of(table)
    for step in (1, 7, 64, table.nbytes):
        inspection = Inspection(table)
        for checked in range(0, table.nbytes, step):
            inspection.check(row, checked, min(checked + step, table.nbytes))


@pytest.mark.parametrize("codec", CODECS)
def test_a_scale_that_is_not_finite(codec: str) -> None:
    table = BucketTable((Bucket.of("b", "mean", [("b", (6, 10))], codec=codec),))
    row = row_of(table)
    at = {"1bit": 64, "1bit-row": 64, "bf16": 8}.get(codec, 0)
    row[at : at + 4] = np.array([np.nan], "<f4").view(np.uint8)
    with pytest.raises(Refused, match="bucket 'b' cannot be decoded: <codec ") as refused:
        at_once(table, row)
    assert refused.value.kind == "bad-code"


@given(st.lists(st.integers(1, 2000), max_size=12))
def test_a_bad_bucket_is_found_with_its_last_byte(cuts: list[int]) -> None:
    """Not before, as its bytes are no encoding yet; not later, as they would be decoded."""
    table = coded_table()
    start, bucket = table.offsets[1], table.buckets[1]
    end = start + codec_of(bucket.codec, bucket.shape).nbytes
    row = row_of(table)
    row[start : start + 4] = np.array([-1.0], "<f4").view(np.uint8)
    inspection, checked = Inspection(table), 0
    for received in sorted({*(cut for cut in cuts if cut < table.nbytes), table.nbytes}):
        if received < end:
            inspection.check(row, checked, received)
        elif checked < end:
            with pytest.raises(Refused):
                inspection.check(row, checked, received)
        else:
            inspection.check(row, checked, received)
        checked = received
