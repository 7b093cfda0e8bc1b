"""Sets of whole numbers as ranges: rounds whose results are kept, samples that have been trained."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

Range = tuple[int, int]  # first, and one past the last


class Ranges:
    """A set of whole numbers, held as disjoint ranges in order; neighbours are merged."""

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for first, end in ranges:
            self.add(first, end)

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    @property
    def total(self) -> int:
        """How many numbers are in it."""
        return sum(self._ends) - sum(self._starts)

    def add(self, first: int, end: int) -> list[Range]:
        """Add the numbers from ``first`` up to ``end``; returns those that were in it before."""
        if end <= first:
            return []
        here = self._touching(first, end)
        known = [
            (max(first, start), min(end, stop))
            for start, stop in zip(self._starts[here], self._ends[here], strict=True)
            if start < end and stop > first
        ]
        low = min([first, *self._starts[here]])
        high = max([end, *self._ends[here]])
        self._starts[here], self._ends[here] = [low], [high]
        return known

    def remove(self, first: int, end: int) -> None:
        """Take the numbers from ``first`` up to ``end`` out of it, as far as they are in it."""
        if end <= first:
            return
        here = self._touching(first, end)
        left = [
            part
            for start, stop in zip(self._starts[here], self._ends[here], strict=True)
            for part in ((start, min(stop, first)), (max(start, end), stop))
            if part[0] < part[1]
        ]
        self._starts[here], self._ends[here] = [part[0] for part in left], [part[1] for part in left]

    def missing(self, first: int, end: int) -> list[Range]:
        """The numbers from ``first`` up to ``end`` that are not in it."""
        here = self._touching(first, end)
        edges = [first]
        for start, stop in zip(self._starts[here], self._ends[here], strict=True):
            edges += [start, stop]
        edges.append(end)
        return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]

    def unbroken(self, end: int) -> int:
        """The lowest number from which on all up to ``end`` are in it; ``end`` if ``end - 1`` is not."""
        place = bisect.bisect_left(self._starts, end) - 1
        return self._starts[place] if place >= 0 and self._ends[place] >= end else end

    def _touching(self, first: int, end: int) -> slice:
        """Places of the ranges that overlap this one or border on it."""
        return slice(bisect.bisect_left(self._ends, first), bisect.bisect_right(self._starts, end))


def in_words(ranges: Iterable[Range], *, most: int = 8) -> str:
    """Ranges for people, the numbers counted from 1: ``"3, 5 to 9"``; beyond ``most`` ranges how many."""
    texts = [str(first + 1) if end == first + 1 else f"{first + 1} to {end}" for first, end in ranges]
    more = [f"{len(texts) - most} more"] if len(texts) > most else []
    return ", ".join(texts[:most] + more)
