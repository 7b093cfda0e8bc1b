"""Bucket tables, contributions to rounds of them, and the results that come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optim.codecs import codec_of
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import Bucket, BucketTable, MeanRule, TableSchedule


def slow_tally(
    votes: Sequence[np.ndarray], weights: Sequence[int] | None = None, *, casting: int, out: Any = None
) -> np.ndarray:
    """The majority as a sum of signs: the definition, independent of the kernels."""
    signs = np.stack([np.unpackbits(vote, bitorder="little").astype(np.int64) * 2 - 1 for vote in votes])
    total = (signs * np.asarray(weights or [1] * len(votes))[:, None]).sum(0)
    bits = np.where(total == 0, signs[casting] > 0, total > 0)
    result = np.packbits(bits, bitorder="little")
    if out is not None:
        out[:] = result
    return result


def voted_table(lines: int = 2) -> BucketTable:
    """One voted bucket of ``lines`` * 64 bytes."""
    return BucketTable((Bucket.of("w", "majority", [("w", (lines * 512,))]),))


def mixed_table() -> BucketTable:
    """Votes, a mean, votes: 64 + 128 + 192 bytes, with padding in each."""
    return BucketTable(
        (
            Bucket.of("a", "majority", [("a", (20, 25))]),
            Bucket.of("b", "mean", [("b", (17,))]),
            Bucket.of("c", "majority", [("c", (1100,))]),
        )
    )


def schedule(*tables: BucketTable) -> TableSchedule:
    """Rounds that take ``tables`` in turn."""
    return TableSchedule(tables, tuple(range(len(tables))))


def coded_table(codec: str = "int4", rule: MeanRule | None = None) -> BucketTable:
    """Votes, an encoded mean, an exact mean with the basis of it, and an exact mean."""
    return BucketTable(
        (
            Bucket.of("a", "majority", [("a", (20, 25))]),
            Bucket.of("b", "mean", [("b", (12, 30))], codec=codec),
            Bucket.of("m", "mean", [("m", (16, 24))]),
            Bucket.of("m/basis", "basis", [("optimizer/m/basis", (16, 3))], source="m"),
            Bucket.of("c", "mean", [("c", (17,)), ("d", (4,))]),
        ),
        rule or MeanRule(),
    )


def contribution_frames(
    order: pb.RoundOpen, table: BucketTable, payload: bytes, *, chunk: int = wire.CHUNK_BYTES, **changes: Any
) -> list[bytes]:
    """HEADER, CHUNKs, END; ``changes`` are fields of the header."""
    values: dict[str, Any] = {
        "round": order.round,
        "epoch": order.epoch,
        "table_digest": table.digest,
        "nbytes": len(payload),
        "weight": 1,
    }
    header = pb.ContributionHeader(**{**values, **changes})
    chunks = [
        wire.encode_frame(wire.CHUNK, payload[start : start + chunk], offset=start)
        for start in range(0, len(payload), chunk)
    ]
    return [wire.encode_frame(wire.HEADER, header.SerializeToString()), *chunks, end_frame(payload)]


def lane_frames(
    order: pb.RoundOpen, table: BucketTable, payload: bytes, buckets: Sequence[int], **changes: Any
) -> list[bytes]:
    """Frames of the lane that carries ``buckets`` of a whole ``payload``."""
    part = b"".join(payload[table.offsets[i] :][: table.buckets[i].nbytes] for i in buckets)
    return contribution_frames(order, table, part, part=True, buckets=buckets, **changes)


def abstain_frames(order: pb.RoundOpen, reason: str = "loss is nan", **changes: Any) -> list[bytes]:
    header = pb.ContributionHeader(
        round=order.round, epoch=order.epoch, abstain=True, reason=reason, **changes
    )
    return [wire.encode_frame(wire.HEADER, header.SerializeToString()), end_frame(b"")]


def end_frame(payload: bytes) -> bytes:
    end = pb.ContributionEnd(payload_digest=wire.payload_digest(payload))
    return wire.encode_frame(wire.END, end.SerializeToString())


class Download:
    """A result put together from its frames."""

    def __init__(self, nbytes: int) -> None:
        self.payload = bytearray(nbytes)
        self.received = 0
        self.attempt = 0
        self.restarts = 0
        self.commit: pb.Commit | None = None

    def add(self, message: bytes) -> None:
        frame = wire.decode_frame(message)
        if frame.kind == wire.RESTART:
            self.restarts += 1
            self.attempt, self.received = frame.attempt, 0
        elif frame.kind == wire.CHUNK:
            assert frame.attempt == self.attempt, "a chunk of an attempt that was not announced"
            assert frame.offset == self.received
            self.received += len(frame.body)
            self.payload[frame.offset : self.received] = frame.body
        else:
            assert frame.kind == wire.COMMIT
            self.commit = pb.Commit.FromString(bytes(frame.body))
            assert self.commit.nbytes == self.received
            if self.received:
                assert self.commit.payload_digest == wire.payload_digest(self.payload[: self.received])


def random_payload(seed: int, table: BucketTable) -> bytes:
    """Votes, and encodings of finite values."""
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, table.nbytes, dtype=np.uint8)
    for bucket, start in zip(table.buckets, table.offsets, strict=True):
        if bucket.reduce != "mean":
            continue
        part = payload[start : start + bucket.nbytes]
        codec = codec_of(bucket.codec, bucket.shape)
        part[codec.nbytes :] = 0
        codec.encode(rng.standard_normal(bucket.shape).astype(np.float32), part[: codec.nbytes])
    return payload.tobytes()
