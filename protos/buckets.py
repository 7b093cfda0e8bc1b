"""What travels in a round: the bucket table, which is the layout of every contribution and of every result.

A *bucket* is the unit of exchange: one matrix, or a pack of small tensors. The payload of a round is the
concatenation of all buckets; each starts at a multiple of 64 bytes, so a slice never cuts a cache line.
Node and coordinator build the table independently from the run file and compare digests at join.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

Reduce = Literal["majority", "mean"]

LINE_ELEMENTS = 512  # a majority bucket is padded to this many elements: 64 bytes of packed signs
LINE_BYTES = 64


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Member:
    """One tensor inside a bucket: its parameter name, shape, and first element within the bucket."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def elements(self) -> int:
        """Number of elements (1 for a scalar)."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Bucket:
    """A unit of exchange.

    ``reduce`` is ``"majority"`` (1 bit an element, LSB first, 1 = +1, pad bits 0) or ``"mean"``
    (little-endian fp32, padding 0).
    """

    name: str
    reduce: Reduce
    members: tuple[Member, ...]

    @cached_property
    def elements(self) -> int:
        """True number of elements, without padding."""
        return sum(member.elements for member in self.members)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in the payload, a multiple of 64."""
        if self.reduce == "majority":
            return _round_up(self.elements, LINE_ELEMENTS) // 8
        return _round_up(self.elements * 4, LINE_BYTES)

    @classmethod
    def of(cls, name: str, reduce: Reduce, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> Bucket:
        """Lay ``tensors`` (name, shape) out back to back, in the given order."""
        members, start = [], 0
        for tensor, shape in tensors:
            member = Member(tensor, tuple(shape), start)
            members.append(member)
            start += member.elements
        return cls(name, reduce, tuple(members))


class BucketTableError(ValueError):
    """A bucket table that cannot be used; the text names the bucket and the rule it breaks."""


@dataclass(frozen=True)
class BucketTable:
    """All buckets of a run in payload order."""

    buckets: tuple[Bucket, ...]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for bucket in self.buckets:
            if bucket.reduce not in ("majority", "mean"):
                raise BucketTableError(
                    f"bucket {bucket.name!r}: reduce must be majority or mean, not {bucket.reduce!r}"
                )
            if bucket.elements <= 0:
                raise BucketTableError(f"bucket {bucket.name!r} holds no elements")
            start = 0
            for member in bucket.members:
                if member.name in seen:
                    raise BucketTableError(f"tensor {member.name!r} is in two buckets")
                if member.start != start:
                    raise BucketTableError(
                        f"bucket {bucket.name!r}: {member.name!r} starts at {member.start}, not {start}"
                    )
                seen.add(member.name)
                start += member.elements

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each bucket in the payload."""
        offsets, offset = [], 0
        for bucket in self.buckets:
            offsets.append(offset)
            offset += bucket.nbytes
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of one contribution, and of one result."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def elements(self) -> int:
        """Parameters that travel, without padding."""
        return sum(bucket.elements for bucket in self.buckets)

    def sections(self) -> tuple[tuple[Reduce, int, int], ...]:
        """Maximal runs of buckets with one reduce: ``(reduce, first byte, end byte)``."""
        runs: list[tuple[Reduce, int, int]] = []
        for bucket, offset in zip(self.buckets, self.offsets, strict=True):
            if runs and runs[-1][0] == bucket.reduce:
                runs[-1] = (bucket.reduce, runs[-1][1], offset + bucket.nbytes)
            else:
                runs.append((bucket.reduce, offset, offset + bucket.nbytes))
        return tuple(runs)

    def to_json(self) -> str:
        """Canonical JSON: equal tables give equal bytes."""
        rows = [
            [bucket.name, bucket.reduce, [[m.name, list(m.shape)] for m in bucket.members]]
            for bucket in self.buckets
        ]
        return json.dumps(rows, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BucketTable:
        """Parse what :meth:`to_json` wrote; raises :class:`BucketTableError` on anything else."""
        try:
            rows: list[Any] = json.loads(text)
            buckets = tuple(
                Bucket.of(str(name), reduce, [(str(t), tuple(int(s) for s in shape)) for t, shape in tensors])
                for name, reduce, tensors in rows
            )
        except (ValueError, TypeError) as error:
            raise BucketTableError(f"not a bucket table: {error}") from error
        return cls(buckets)

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
