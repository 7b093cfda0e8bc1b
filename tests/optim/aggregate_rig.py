"""Contributions for tests of the reduction, and the reduction as its definition reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optim import bits
from optim.aggregate import Aggregation, ReducerMemory
from optim.codecs import codec_of
from optim.lordo.basis import compute_basis
from optim.pieces import Part, parts_of
from protos.buckets import Bucket, BucketTable

CODECS = (
    "fp32",
    "bf16",
    "int8",
    "int8:32",
    "int4",
    "2bit",
    "ternary",
    "1bit",
    "1bit-row",
    "lowrank:3",
    "lowrank:2+int4:16",
)


def contribution(seed: int, table: BucketTable, scale: float = 1.0, *, zeros: float = 0.1) -> np.ndarray:
    """Votes, and encodings of normal values of which a share is exactly zero."""
    rng = np.random.default_rng(seed)
    payload = rng.integers(0, 256, table.nbytes, dtype=np.uint8)
    for bucket, start in zip(table.buckets, table.offsets, strict=True):
        if bucket.reduce != "mean":
            continue
        values = (scale * rng.standard_normal(bucket.shape)).astype(np.float32)
        values[rng.random(bucket.shape) < zeros] = 0.0
        codec = codec_of(bucket.codec, bucket.shape)
        payload[start : start + bucket.nbytes] = 0
        codec.encode(values, payload[start : start + codec.nbytes], state=codec.state())
    return payload


def decoded(bucket: Bucket, payload: np.ndarray, offset: int, *, result: bool = False) -> np.ndarray:
    """The values in a bucket of a payload."""
    codec = codec_of(bucket.result if result else bucket.codec, bucket.shape)
    return codec.decode(np.ascontiguousarray(payload[offset : offset + codec.nbytes]))


class Reference:
    """The reduction bucket by bucket, without runs, pieces and attempts."""

    def __init__(self, table: BucketTable) -> None:
        self.table = table
        self.residuals: dict[str, np.ndarray] = {}
        self.bases: dict[str, np.ndarray] = {}
        self.states: dict[str, dict[str, np.ndarray]] = {}

    def reduce(
        self, payloads: Sequence[np.ndarray], round_index: int, weights: Sequence[int] | None = None
    ) -> bytes:
        """The result of a round; every round is committed."""
        weights = list(weights or [1] * len(payloads))
        result, means = b"", {}
        for index, (bucket, offset) in enumerate(zip(self.table.buckets, self.table.offsets, strict=True)):
            rows = [payload[offset : offset + bucket.nbytes] for payload in payloads]
            if bucket.reduce == "majority":
                result += bits.tally(rows, weights, casting=round_index % len(rows)).tobytes()
            elif bucket.reduce == "basis":
                basis = compute_basis(means[bucket.source], bucket.shape[1], self.bases.get(bucket.name))
                self.bases[bucket.name] = basis
                result += basis.tobytes().ljust(bucket.result_nbytes, b"\0")
            else:
                values = [decoded(bucket, payload, offset).astype(np.float64) for payload in payloads]
                mean = self.mean(values, weights)
                means[bucket.name] = mean.astype(np.float32)
                result += self.encode(bucket, mean, bits.zero_seed(round_index, index))
        return result

    def mean(self, values: Sequence[np.ndarray], weights: Sequence[int]) -> np.ndarray:
        """In slot order, in the smallest whole weights."""
        divisor = int(np.gcd.reduce(weights))
        total = np.zeros(values[0].shape)
        for value, weight in zip(values, weights, strict=True):
            total = total + value * (weight // divisor)
        return total / (sum(weights) // divisor)

    def encode(self, bucket: Bucket, mean: np.ndarray, seed: int) -> bytes:
        """With what the last result lost, noting what this one loses."""
        codec = codec_of(bucket.result, bucket.shape)
        target = (mean + self.residuals.get(bucket.name, 0.0)).astype(np.float32)
        data = np.zeros(bucket.result_nbytes, np.uint8)
        state = self.states.setdefault(bucket.name, codec.state())
        codec.encode(target, data[: codec.nbytes], seed=seed, state=state)
        if bucket.result != "fp32":
            self.residuals[bucket.name] = target - codec.decode(data[: codec.nbytes])
        return data.tobytes()


def begun(
    table: BucketTable,
    payloads: Sequence[np.ndarray],
    memory: ReducerMemory,
    *,
    round_index: int = 0,
    weights: Sequence[int] | None = None,
    parts: Sequence[Part] | None = None,
) -> tuple[bytes, Aggregation]:
    """A result, and the attempt that made it, which is not committed."""
    aggregation = Aggregation(
        table,
        len(payloads),
        round_index=round_index,
        tally=bits.tally,
        memory=memory,
        weights=weights,
    )
    result = np.full(table.result_nbytes, 0xAA, np.uint8)  # padding has to be written too
    for part in parts_of(table) if parts is None else parts:
        rows = [payload[part.start : part.end] for payload in payloads]
        aggregation.reduce(part, rows, result[part.out_start : part.out_end])
    return result.tobytes(), aggregation


def reduced(
    table: BucketTable,
    payloads: Sequence[np.ndarray],
    memory: ReducerMemory,
    *,
    round_index: int = 0,
    weights: Sequence[int] | None = None,
) -> bytes:
    """The result of a committed round."""
    result, aggregation = begun(table, payloads, memory, round_index=round_index, weights=weights)
    aggregation.commit()
    return result


def mixed(codec: str = "int4", result: str | None = None) -> BucketTable:
    """All kinds of buckets, in shapes that fill no byte, block or line."""
    return BucketTable(
        (
            Bucket.of("votes", "majority", [("votes", (37, 19))]),
            Bucket.of("w", "mean", [("w", (23, 29))], codec=codec, result=result),
            Bucket.of("w/basis", "basis", [("optimizer/w/basis", (23, 4))], source="w"),
            Bucket.of("exact", "mean", [("exact", (13, 7))]),
            Bucket.of("x", "mean", [("x", (7, 31))]),
            Bucket.of("x/basis", "basis", [("optimizer/x/basis", (7, 2))], source="x"),
            Bucket.of("more votes", "majority", [("more votes", (3,))]),
            Bucket.of("[vectors]", "mean", [("g", (11,)), ("b", (6,))], codec=codec, result=result),
        )
    )
