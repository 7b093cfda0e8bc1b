"""How the reduction of a round is cut: which bytes of every contribution make which bytes of the result.

Majorities and exact means are cut anywhere, so that a result streams back while the contributions still come
in. A bucket whose values have to be decoded, and a basis, are made as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from protos.buckets import Bucket, BucketTable, MeanRule

Rule = Literal["majority", "mean", "coded", "basis"]

_CALL_COST: Final = 16 << 10  # of decoding a bucket, however small, in bytes of votes
_ELEMENT_COST: Final = 2
_BASIS_COST: Final = 1 << 30  # more than anything that is done without a thread


@dataclass(frozen=True)
class Part:
    """A range of the result with one rule.

    Attributes:
        rule: ``"majority"``; ``"mean"`` of fp32 that stays fp32; ``"coded"``: a whole mean bucket of any
            codec; ``"basis"``: a whole basis, which needs no bytes of its own.
        start, end: bytes that it reads of every contribution.
        out_start, out_end: bytes that it writes of the result.
        bucket: index in the table of a whole bucket, -1 for others.
        cost: of the work for each contribution, as bytes of votes that would take as long.
    """

    rule: Rule
    start: int
    end: int
    out_start: int
    out_end: int
    bucket: int = -1
    cost: int = 0

    def head(self, nbytes: int) -> tuple[Part, Part]:
        """Cut behind ``nbytes``, a multiple of 64 inside it; not for whole buckets."""
        middle, out_middle = self.start + nbytes, self.out_start + nbytes
        return (
            replace(self, end=middle, out_end=out_middle, cost=nbytes),
            replace(self, start=middle, out_start=out_middle, cost=self.cost - nbytes),
        )

    def chunks(self, nbytes: int) -> list[Part]:
        """Cut into chunks of ``nbytes``, a multiple of 64; not for whole buckets."""
        chunks, rest = [], self
        while rest.out_nbytes > nbytes:
            first, rest = rest.head(nbytes)
            chunks.append(first)
        return [*chunks, rest]

    @property
    def out_nbytes(self) -> int:
        """Bytes that it writes."""
        return self.out_end - self.out_start


@dataclass(frozen=True)
class Piece:
    """What is reduced at once: neighbouring parts, bytes ``start`` to ``end`` of the result.

    ``needs`` is how many bytes of every contribution, from the first, must have come.
    """

    start: int
    end: int
    needs: int
    parts: tuple[Part, ...]

    @property
    def cost(self) -> int:
        """Of all its parts."""
        return sum(part.cost for part in self.parts)


def streams(bucket: Bucket, rule: MeanRule, sources: frozenset[str]) -> bool:
    """Whether a bucket can be cut anywhere: what comes in is what goes out, entry by entry."""
    if bucket.reduce == "majority":
        return True
    exact = bucket.reduce == "mean" and bucket.codec == bucket.result == "fp32"
    return exact and rule == MeanRule() and bucket.name not in sources


def parts_of(table: BucketTable) -> tuple[Part, ...]:
    """The whole reduction in the order of the result; neighbours that can be cut anywhere are joined."""
    sources = frozenset(bucket.source for bucket in table.buckets if bucket.reduce == "basis")
    parts: list[Part] = []
    places = zip(table.buckets, table.offsets, table.result_offsets, strict=True)
    for index, (bucket, offset, out_offset) in enumerate(places):
        end, out_end = offset + bucket.nbytes, out_offset + bucket.result_nbytes
        if not streams(bucket, table.rule, sources):
            coded = bucket.reduce == "mean"
            cost = _CALL_COST + _ELEMENT_COST * bucket.elements if coded else _BASIS_COST
            parts.append(Part("coded" if coded else "basis", offset, end, out_offset, out_end, index, cost))
            continue
        rule: Rule = "majority" if bucket.reduce == "majority" else "mean"
        parts.append(Part(rule, offset, end, out_offset, out_end, cost=bucket.nbytes))
    return united(parts)


def united(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The same work in fewer parts: of ``parts``, which follow on one another, neighbours that can be cut
    anywhere are joined."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and part.bucket < 0 and groups[-1][0].rule == part.rule:
            groups[-1].append(part)
        else:
            groups.append([part])
    return tuple(
        replace(first, end=last.end, out_end=last.out_end, cost=sum(part.cost for part in group))
        for group in groups
        for first, last in [(group[0], group[-1])]
    )


def cut(table: BucketTable, piece_bytes: int) -> tuple[Piece, ...]:
    """Cut a reduction into pieces of ``piece_bytes`` of the result (a multiple of 64).

    Only a whole bucket may make a larger piece; the last before one, and the last of all, may be smaller.
    """
    pieces: list[Piece] = []
    held: list[Part] = []
    size = 0  # of what is held

    def close() -> None:
        nonlocal size
        if held:
            start, end = held[0].out_start, held[-1].out_end
            pieces.append(Piece(start, end, max(part.end for part in held), tuple(held)))
            held.clear()
            size = 0

    for part in parts_of(table):
        rest, whole = part, part.bucket >= 0
        if whole and size + rest.out_nbytes > piece_bytes:
            close()
        while not whole and size + rest.out_nbytes > piece_bytes:
            first, rest = rest.head(piece_bytes - size)
            held.append(first)
            close()
        held.append(rest)
        size += rest.out_nbytes
        if size >= piece_bytes:
            close()
    close()
    return tuple(pieces)
