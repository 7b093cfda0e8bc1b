"""A small bucket table with every kind of bucket, and payloads that fit it."""

from __future__ import annotations

from typing import Final

import numpy as np

from optim.codecs import codec_of
from protos.buckets import Bucket, BucketTable, TableSchedule

DIGEST: Final = "run-digest"
CODED: Final = BucketTable(
    (
        Bucket.of("a", "majority", [("a", (20, 25))]),
        Bucket.of("b", "mean", [("b", (12, 30))], codec="int4"),
        Bucket.of("b8", "mean", [("b8", (3, 30))], codec="int8"),
        Bucket.of("bf", "mean", [("bf", (5, 7))], codec="bf16"),
        Bucket.of("m", "mean", [("m", (16, 24))]),
        Bucket.of("m/basis", "basis", [("optimizer/m/basis", (16, 3))], source="m"),
        Bucket.of("c", "mean", [("c", (17,)), ("d", (4,))]),
    )
)
TABLES: Final = TableSchedule((CODED,), (0,))


def mixed_payload(seed: int = 0) -> bytes:
    """A contribution that is taken."""
    rng = np.random.default_rng(seed)
    payload = np.zeros(CODED.nbytes, np.uint8)
    for bucket, offset in zip(CODED.buckets, CODED.offsets, strict=True):
        if bucket.reduce == "majority":
            payload[offset : offset + (bucket.elements + 7) // 8 - 1] = rng.integers(
                0, 256, (bucket.elements + 7) // 8 - 1
            )
        elif bucket.reduce == "mean":
            codec = codec_of(bucket.codec, bucket.shape)
            values = rng.standard_normal(bucket.shape, np.float32)
            codec.encode(values, payload[offset : offset + codec.nbytes], seed=1)
    return payload.tobytes()
