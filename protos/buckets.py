"""What travels in a round: the bucket table, which is the layout of every contribution and of every result.

A *bucket* is the unit of exchange: one matrix, or a pack of small tensors. The payload of a round is the
concatenation of all buckets; each starts at a multiple of 64 bytes, so a slice never cuts a cache line, but
for single numbers, which are packed at the end. A result may be laid out otherwise than the contributions:
coarser codecs, and buckets that only results have.
Node and coordinator build the table independently from the run file and compare digests at join.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, Literal

from protos.codecs import LINE_BYTES, LINE_ELEMENTS, CodecError, CodecSpec, matrix_shape, round_up

__all__ = [
    "LINE_BYTES",
    "LINE_ELEMENTS",
    "MEDIAN",
    "SCALE",
    "Bucket",
    "BucketTable",
    "BucketTableError",
    "MeanRule",
    "Member",
    "Reduce",
    "TableSchedule",
]

MEDIAN: Final = 32767  # values to trim: more than half of any voters
SCALE: Final = "/scale"  # behind the name of a majority: the mean magnitudes of what is voted on

Reduce = Literal["majority", "mean", "basis"]


@dataclass(frozen=True)
class Member:
    """One tensor inside a bucket: its name, shape, and first element within the bucket."""

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

    Attributes:
        name: unique in the table.
        reduce: ``"majority"`` (1 bit an element, LSB first, 1 = +1, pad bits 0), ``"mean"`` (of what
            ``codec`` decodes, encoded again with ``result``), or ``"basis"`` (nothing comes in; the result is
            an orthonormal fp32 basis of the mean of the bucket ``source``, see ``optim.lordo.basis``).
        members: the tensors in it, back to back.
        codec: of a contribution to a mean, see :mod:`protos.codecs`; of several members together as one
            vector. Padding is 0.
        result: codec of the mean; where it is lossy, the reducer carries what it lost into the next result.
        source: of a basis: the name of a mean bucket of one matrix, earlier in the table.
        padded: whether it fills whole lines of 64 bytes; False only for a mean of fp32 with nothing padded
            behind it in the table.
    """

    name: str
    reduce: Reduce
    members: tuple[Member, ...]
    codec: str = "fp32"
    result: str = "fp32"
    source: str = ""
    padded: bool = True

    @cached_property
    def elements(self) -> int:
        """True number of elements, without padding."""
        return sum(member.elements for member in self.members)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape in which the codec sees the bucket: that of the only member, or one vector."""
        return self.members[0].shape if len(self.members) == 1 else (self.elements,)

    @cached_property
    def nbytes(self) -> int:
        """Bytes in a contribution; 0 for a basis."""
        if self.reduce == "majority":
            return round_up(self.elements, LINE_ELEMENTS) // 8
        if self.reduce == "basis":
            return 0
        return self._lines(CodecSpec.parse(self.codec).nbytes(self.shape))

    @cached_property
    def result_nbytes(self) -> int:
        """Bytes in a result."""
        if self.reduce == "majority":
            return self.nbytes
        if self.reduce == "basis":
            return self._lines(4 * self.elements)
        return self._lines(CodecSpec.parse(self.result).nbytes(self.shape))

    def _lines(self, nbytes: int) -> int:
        return round_up(nbytes, LINE_BYTES) if self.padded else nbytes

    @classmethod
    def of(
        cls,
        name: str,
        reduce: Reduce,
        tensors: Iterable[tuple[str, tuple[int, ...]]],
        *,
        codec: str = "fp32",
        result: str | None = None,
        source: str = "",
        padded: bool = True,
    ) -> Bucket:
        """Lay ``tensors`` (name, shape) out back to back, in the given order; ``result`` is ``codec`` unless
        given."""
        members, start = [], 0
        for tensor, shape in tensors:
            member = Member(tensor, tuple(shape), start)
            members.append(member)
            start += member.elements
        coarse = codec if result is None else result
        return cls(name, reduce, tuple(members), codec, coarse, source, padded)


class BucketTableError(ValueError):
    """A bucket table that cannot be used; the text names the bucket and the rule it breaks."""


@dataclass(frozen=True)
class MeanRule:
    """How contributions to mean buckets are averaged, beyond their weights.

    Attributes:
        clip: a voter's bucket whose norm is above ``clip`` times the voters' median norm of it is scaled down
            to that; 0 = off.
        trim: this many of the largest and of the smallest values of each entry are left out of its mean; less
            where there are not more than ``2 * trim`` voters. 0 = off; :data:`MEDIAN` leaves one or two.
    """

    clip: float = 0.0
    trim: int = 0


@dataclass(frozen=True)
class BucketTable:
    """All buckets of a round in payload order.

    Attributes:
        buckets: in the order of the payload.
        rule: how means are taken.
        numbers: what seeds the zero votes and the rounding of each bucket; its place in the table unless
            given. A part of a table keeps the numbers of the whole.
    """

    buckets: tuple[Bucket, ...]
    rule: MeanRule = MeanRule()
    numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.numbers:
            object.__setattr__(self, "numbers", tuple(range(len(self.buckets))))
        if len(set(self.numbers)) != len(self.buckets) or any(number < 0 for number in self.numbers):
            raise BucketTableError(f"{len(self.buckets)} buckets cannot have the numbers {self.numbers}")
        if not 0 <= self.rule.clip < float("inf") or self.rule.trim < 0:
            raise BucketTableError(
                f"clip {self.rule.clip} must be a number from 0 on, and trim {self.rule.trim} from 0 on"
            )
        seen: set[str] = set()
        earlier: dict[str, Bucket] = {}
        for bucket in self.buckets:
            _check(bucket, earlier)
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
            earlier[bucket.name] = bucket

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of each bucket in a contribution."""
        return _offsets([bucket.nbytes for bucket in self.buckets])

    @cached_property
    def result_offsets(self) -> tuple[int, ...]:
        """Byte offset of each bucket in a result."""
        return _offsets([bucket.result_nbytes for bucket in self.buckets])

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of one contribution."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def result_nbytes(self) -> int:
        """Payload bytes of one result."""
        return sum(bucket.result_nbytes for bucket in self.buckets)

    @cached_property
    def elements(self) -> int:
        """Entries that are contributed, without padding."""
        return sum(bucket.elements for bucket in self.buckets if bucket.reduce != "basis")

    def sections(self) -> tuple[tuple[Reduce, int, int], ...]:
        """Maximal runs of buckets with one reduce: ``(reduce, first byte, end byte)`` of a contribution."""
        runs: list[tuple[Reduce, int, int]] = []
        for bucket, offset in zip(self.buckets, self.offsets, strict=True):
            if runs and runs[-1][0] == bucket.reduce:
                runs[-1] = (bucket.reduce, runs[-1][1], offset + bucket.nbytes)
            else:
                runs.append((bucket.reduce, offset, offset + bucket.nbytes))
        return tuple(runs)

    def part(self, names: Collection[str]) -> BucketTable:
        """The table of some buckets, by name, in the same order and with their numbers: what one rank of an
        island carries."""
        chosen = [index for index, bucket in enumerate(self.buckets) if bucket.name in names]
        buckets = tuple(self.buckets[index] for index in chosen)
        return BucketTable(buckets, self.rule, tuple(self.numbers[index] for index in chosen))

    def to_json(self) -> str:
        """Canonical JSON: equal tables give equal bytes."""
        rows = [
            [
                bucket.name,
                bucket.reduce,
                [[m.name, list(m.shape)] for m in bucket.members],
                bucket.codec,
                bucket.result,
                bucket.source,
                bucket.padded,
            ]
            for bucket in self.buckets
        ]
        whole: list[Any] = [[self.rule.clip, self.rule.trim], rows]
        if self.numbers != tuple(range(len(rows))):
            whole.append(list(self.numbers))
        return json.dumps(whole, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> BucketTable:
        """Parse what :meth:`to_json` wrote; raises :class:`BucketTableError` on anything else."""
        try:
            (clip, trim), rows, *rest = json.loads(text)
            buckets = tuple(_bucket(row) for row in rows)
            numbers = tuple(int(number) for number in rest[0]) if rest else ()
            rule = MeanRule(float(clip), int(trim))
        except (ValueError, TypeError, OverflowError) as error:
            raise BucketTableError(f"not a bucket table: {error}") from error
        return cls(buckets, rule, numbers)

    @cached_property
    def digest(self) -> str:
        """sha256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


@dataclass(frozen=True)
class TableSchedule:
    """Which table a round has: fragments of a model take turns, and some rounds carry more than others.

    Attributes:
        tables: the different tables.
        cycle: round ``r`` has ``tables[cycle[r % len(cycle)]]``.
    """

    tables: tuple[BucketTable, ...]
    cycle: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.cycle or set(self.cycle) != set(range(len(self.tables))):
            raise BucketTableError(f"the cycle {self.cycle} does not use all of {len(self.tables)} tables")

    def of(self, round_index: int) -> BucketTable:
        """The table of a round."""
        return self.tables[self.cycle[round_index % len(self.cycle)]]

    def part(self, names: Collection[str]) -> TableSchedule:
        """The tables of some buckets; see :meth:`BucketTable.part`."""
        return TableSchedule(tuple(table.part(names) for table in self.tables), self.cycle)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the largest contribution."""
        return max(table.nbytes for table in self.tables)

    @cached_property
    def result_nbytes(self) -> int:
        """Bytes of the largest result."""
        return max(table.result_nbytes for table in self.tables)

    @cached_property
    def mean_nbytes(self) -> tuple[float, float]:
        """Bytes of a contribution and of a result, as a mean over the rounds."""
        rounds = [self.tables[index] for index in self.cycle]
        count = len(rounds)
        return sum(table.nbytes for table in rounds) / count, sum(t.result_nbytes for t in rounds) / count

    @cached_property
    def digest(self) -> str:
        """sha256 of all tables and the cycle, in hex."""
        text = json.dumps([[table.digest for table in self.tables], list(self.cycle)], separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _offsets(sizes: list[int]) -> tuple[int, ...]:
    offsets, offset = [], 0
    for size in sizes:
        offsets.append(offset)
        offset += size
    return tuple(offsets)


def _bucket(row: Any) -> Bucket:
    name, reduce, tensors, codec, result, source, padded = row
    members = [(str(tensor), tuple(int(size) for size in shape)) for tensor, shape in tensors]
    names = {"codec": str(codec), "result": str(result), "source": str(source)}
    return Bucket.of(str(name), reduce, members, **names, padded=bool(padded))


def _check(bucket: Bucket, earlier: dict[str, Bucket]) -> None:
    """Raise :class:`BucketTableError` for a bucket that breaks a rule by itself or with those before it."""
    where = f"bucket {bucket.name!r}"
    if bucket.name in earlier:
        raise BucketTableError(f"{where} is there twice")
    if bucket.reduce not in ("majority", "mean", "basis"):
        raise BucketTableError(f"{where}: reduce must be majority, mean or basis, not {bucket.reduce!r}")
    for member in bucket.members:
        if any(size < 1 for size in member.shape):
            raise BucketTableError(
                f"{where}: {member.name!r} of shape {list(member.shape)} holds no elements"
            )
    if not bucket.members:
        raise BucketTableError(f"{where} holds no elements")
    try:
        CodecSpec.parse(bucket.codec)
        CodecSpec.parse(bucket.result)
    except CodecError as error:
        raise BucketTableError(f"{where}: {error}") from error
    last = next(reversed(earlier.values()), None)
    if bucket.padded and last is not None and not last.padded:
        raise BucketTableError(f"{where} does not start at a line: it comes behind {last.name!r}, not padded")
    if not bucket.padded and (bucket.reduce, bucket.codec, bucket.result) != ("mean", "fp32", "fp32"):
        raise BucketTableError(f"{where}: only a mean of fp32 goes without padding")
    if bucket.reduce != "basis":
        if bucket.source:
            raise BucketTableError(f"{where}: only a basis has a source")
        return
    source = earlier.get(bucket.source)
    if source is None or source.reduce != "mean" or len(source.shape) < 2:
        raise BucketTableError(f"{where}: its source {bucket.source!r} is no earlier mean bucket of a matrix")
    short = min(matrix_shape(source.shape))
    if len(bucket.shape) != 2 or bucket.shape[0] != short or not 1 <= bucket.shape[1] <= short:
        raise BucketTableError(
            f"{where}: a basis of {list(source.shape)} is [{short}, rank], not {list(bucket.shape)}"
        )
