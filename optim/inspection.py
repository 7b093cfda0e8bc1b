"""Whether the bytes of a contribution may be decoded: checked as they arrive, before any of them count."""

from __future__ import annotations

import bisect
from typing import Final

import numpy as np

from optim.aggregate import Bytes
from optim.codecs import codec_of
from protos.buckets import BucketTable
from protos.codecs import CodecSpec
from protos.refusal import BAD_CODE, NOT_FINITE, Refused

_FLOAT: Final = 4  # bytes; of fp32 values, which are checked without waiting for the end of their bucket


class Inspection:
    """What contributions laid out by ``table`` must hold; shared by all of them."""

    def __init__(self, table: BucketTable) -> None:
        self._exact: list[tuple[int, int]] = []  # byte ranges of fp32 values, neighbours merged
        self._coded: list[tuple[int, int, int]] = []  # end, first byte, bucket index
        self._buckets = table.buckets
        for index, (bucket, offset) in enumerate(zip(table.buckets, table.offsets, strict=True)):
            if bucket.reduce != "mean":
                continue
            end = offset + bucket.nbytes
            if CodecSpec.parse(bucket.codec).exact:
                if self._exact and self._exact[-1][1] == offset:
                    self._exact[-1] = (self._exact[-1][0], end)
                else:
                    self._exact.append((offset, end))
            else:
                self._coded.append(
                    (offset + CodecSpec.parse(bucket.codec).nbytes(bucket.shape), offset, index)
                )

    def check(self, row: Bytes, checked: int, received: int, base: int = 0) -> None:
        """Check the bytes that have come since this was last asked.

        Args:
            row: the contribution, or a slice of it that cuts no bucket which is decoded as a whole.
            checked: where in the contribution those end that had come then.
            received: where those end that have come now.
            base: where in the contribution ``row`` begins, a multiple of 64.

        Raises:
            Refused: they must not be decoded.
        """
        self._check_exact(row, checked - checked % _FLOAT, received - received % _FLOAT, base)
        for end, start, index in self._coded[bisect.bisect(self._coded, (checked + 1,)) :]:
            if end > received:
                break
            bucket = self._buckets[index]
            problem = codec_of(bucket.codec, bucket.shape).problem(row[start - base : end - base])
            if problem:
                raise Refused(
                    BAD_CODE,
                    f"bucket {bucket.name!r} cannot be decoded: {problem}; a node whose gradient is not "
                    "finite must abstain",
                )

    def _check_exact(self, row: Bytes, start: int, end: int, base: int) -> None:
        place = max(0, bisect.bisect(self._exact, (start, start)) - 1)
        for first, last in self._exact[place:]:
            if first >= end:
                break
            first, last = max(start, first), min(end, last)
            if first < last and not np.isfinite(row[first - base : last - base].view("<f4")).all():
                raise Refused(
                    NOT_FINITE,
                    f"values in bytes {first} to {last} are not finite: a node whose gradient is not finite "
                    "must abstain",
                )
