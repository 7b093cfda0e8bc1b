"""Lines of a result that can be made anew by themselves, from the same lines of the contributions.

A line is 64 bytes. Majorities and means of fp32 that stays fp32 are made entry by entry, so any line of them
follows from that line of every contribution. Encoded means do not: what a reducer makes of them depends on
what its encodings have lost in rounds before, and with ``clip`` on the norms of whole buckets; nor do bases.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from optim.aggregate import Bytes, TallyFunction, casting_voter, reduced
from optim.mean import trimmed_mean, weighted_mean
from optim.pieces import streams
from protos.buckets import LINE_BYTES, BucketTable, MeanRule

_FLOAT: Final = 4  # bytes


@dataclass(frozen=True)
class Line:
    """Bytes from ``start`` on of every contribution: they make those from ``out_start`` on of the result.

    ``real`` is how many bytes of a mean's line are entries; the result is 0 behind them.
    """

    start: int
    out_start: int
    rule: Literal["majority", "mean"]
    real: int = LINE_BYTES


@dataclass(frozen=True)
class _Run:
    """Neighbouring lines of one bucket; ``first`` is the number of the first one."""

    first: int
    start: int
    out_start: int
    rule: Literal["majority", "mean"]
    real: int  # bytes, of all lines


class Recountable:
    """The lines of a table that can be made anew, numbered in its order."""

    def __init__(self, table: BucketTable) -> None:
        self._runs: list[_Run] = []
        self.count = 0
        sources = frozenset(bucket.source for bucket in table.buckets if bucket.reduce == "basis")
        places = zip(table.buckets, table.offsets, table.result_offsets, strict=True)
        for bucket, start, out_start in places:
            exact = bucket.reduce == "mean" and bucket.codec == bucket.result == "fp32"
            if bucket.reduce != "majority" and not (exact and not table.rule.clip):
                continue
            rule: Literal["majority", "mean"] = "majority" if bucket.reduce == "majority" else "mean"
            # A bucket that is made as a whole is padded with zeros, others with what the padding gives.
            whole = not streams(bucket, table.rule, sources)
            real = _FLOAT * bucket.elements if whole else bucket.nbytes
            self._runs.append(_Run(self.count, start, out_start, rule, real))
            self.count += bucket.nbytes // LINE_BYTES

    def line(self, number: int) -> Line:
        """One of them; numbers count from 0 and are less than :attr:`count`."""
        run = self._runs[bisect.bisect_right(self._runs, number, key=lambda run: run.first) - 1]
        offset = LINE_BYTES * (number - run.first)
        real = min(LINE_BYTES, max(0, run.real - offset))
        return Line(run.start + offset, run.out_start + offset, run.rule, real)


@dataclass(frozen=True)
class Terms:
    """How a round is reduced: as in :class:`optim.aggregate.Aggregation`, with one weight for each voter."""

    round: int
    rule: MeanRule
    tally: TallyFunction
    weights: Sequence[int]
    mean_weights: Sequence[int]


def recount(terms: Terms, lines: Sequence[Line], rows: Sequence[Bytes | None]) -> tuple[Bytes, Bytes]:
    """The result of some lines, and which bits of it are certain.

    Args:
        terms: of the round.
        lines: which.
        rows: uint8[len(lines), 64] of each voter, in slot order; ``None``: not known. A bit that holds
            whatever such a voter has voted is certain; of a mean nothing is then.

    Returns:
        Both uint8[len(lines), 64]; the bits that are 1 in the second array are certain in the first.
    """
    result, certain = (
        np.zeros((len(lines), LINE_BYTES), np.uint8),
        np.zeros((len(lines), LINE_BYTES), np.uint8),
    )
    votes = [place for place, line in enumerate(lines) if line.rule == "majority"]
    if votes:
        least, most = (_majority(terms, votes, rows, fill) for fill in (0x00, 0xFF))
        result[votes], certain[votes] = least, ~(least ^ most)
    means = [place for place, line in enumerate(lines) if line.rule == "mean"]
    known = [row for row in rows if row is not None]
    if means and len(known) == len(rows):
        result[means], certain[means] = _mean(terms, means, known), 0xFF
        for place in means:
            result[place, lines[place].real :] = 0
    return result, certain


def _majority(terms: Terms, places: list[int], rows: Sequence[Bytes | None], fill: int) -> Bytes:
    """With the votes that are not known all alike: a majority never falls as a vote rises."""
    size = LINE_BYTES * len(places)
    votes = [np.full(size, fill, np.uint8) if row is None else row[places].reshape(-1) for row in rows]
    made = votes[0]
    if len(votes) > 1:
        made = terms.tally(votes, terms.weights, casting=casting_voter(terms.round, len(votes)))
    return made.reshape(-1, LINE_BYTES)


def _mean(terms: Terms, places: list[int], rows: Sequence[Bytes]) -> Bytes:
    weights = reduced(terms.mean_weights)
    with np.errstate(all="ignore"):  # what a voter shows may be anything
        values = [row[places].reshape(-1).view("<f4") for row in rows]
        if terms.rule.trim:
            mean = trimmed_mean(np.stack(values).astype(np.float64), weights, terms.rule.trim)
        else:
            mean = weighted_mean(values, weights)
        return mean.astype("<f4").view(np.uint8).reshape(-1, LINE_BYTES)
