"""What one stream of a node carries of a round: all of it, or the buckets of one lane.

The ranks of an island each send, and receive, the buckets they hold on a stream of their own. A lane's bytes
are those of its buckets, end to end in the order of the table; offsets and digests in its frames are the
lane's own.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence

from protos.atoll_pb2 import ContributionHeader
from protos.buckets import BucketTable
from protos.refusal import BAD_LANE, Refused


class Ranges:
    """Byte ranges of a payload laid end to end.

    Args:
        ranges: first and end byte of each, ascending and apart; empty ones are left out, neighbours merged.

    Attributes:
        bounds: what is left of them.
        nbytes: of all together.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        bounds: list[tuple[int, int]] = []
        for start, end in ranges:
            if bounds and bounds[-1][1] == start:
                bounds[-1] = (bounds[-1][0], end)
            elif end > start:
                bounds.append((start, end))
        self.bounds: Sequence[tuple[int, int]] = bounds
        places = list(itertools.accumulate((end - start for start, end in bounds), initial=0))
        self.nbytes = places.pop()
        self._places = places  # of each range's first byte among all
        self._ends = [end for _, end in bounds]

    def spread(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Where bytes ``first`` to ``last`` of all of them lie in the payload, in order."""
        index = bisect.bisect(self._places, first) - 1
        while first < last:
            start, end = self.bounds[index]
            begin = start + first - self._places[index]
            stop = min(end, begin + last - first)
            yield begin, stop
            first += stop - begin
            index += 1

    def within(self, first: int, last: int) -> tuple[int, list[tuple[int, int]]]:
        """What of the payload's bytes ``first`` to ``last`` belongs to them, and its place among all."""
        found: list[tuple[int, int]] = []
        place = self.nbytes
        for index in range(bisect.bisect(self._ends, first), len(self.bounds)):
            start, end = self.bounds[index]
            if start >= last:
                break
            begin = max(start, first)
            if not found:
                place = self._places[index] + begin - start
            found.append((begin, min(end, last)))
        return place, found

    def reach(self, nbytes: int, size: int) -> int:
        """The byte of a payload of ``size`` before which none of them is missing, ``nbytes`` being there."""
        return size if nbytes == self.nbytes else next(self.spread(nbytes, nbytes + 1))[0]


class LaneLayout:
    """The buckets of one stream.

    Args:
        table: of the round.
        buckets: their indices in it, ascending; ``None``: all, on a stream that is not a part.

    Attributes:
        buckets: indices.
        part: whether the node may have more streams than this.
        total: buckets of the whole table.
        up: of a contribution.
        down: of a result.
    """

    def __init__(self, table: BucketTable, buckets: Sequence[int] | None = None) -> None:
        self.part = buckets is not None
        self.total = len(table.buckets)
        self.buckets = tuple(range(self.total) if buckets is None else buckets)
        if buckets is None:
            self.up, self.down = Ranges([(0, table.nbytes)]), Ranges([(0, table.result_nbytes)])
            return
        held = [(table.buckets[i], table.offsets[i], table.result_offsets[i]) for i in self.buckets]
        self.up = Ranges((offset, offset + bucket.nbytes) for bucket, offset, _ in held)
        self.down = Ranges((offset, offset + bucket.result_nbytes) for bucket, _, offset in held)

    @property
    def idle(self) -> bool:
        """Whether it has nothing to carry: it receives only the commit."""
        return self.part and not self.buckets


def layout_of(header: ContributionHeader, table: BucketTable) -> LaneLayout:
    """The layout that a header asks for.

    Raises:
        Refused: its buckets are not ascending indices of ``table``.
    """
    buckets = header.buckets
    if not header.part:
        if buckets:
            raise Refused(
                BAD_LANE, f"a stream that is no lane may not name buckets, this one names {len(buckets)}"
            )
        return LaneLayout(table)
    if buckets and max(buckets) >= len(table.buckets):
        raise Refused(
            BAD_LANE,
            f"a lane names bucket {max(buckets)}, the table of round {header.round + 1} has "
            f"{len(table.buckets)}: join again with the coordinator's run file",
        )
    for earlier, later in itertools.pairwise(buckets):
        if later <= earlier:
            raise Refused(
                BAD_LANE, f"a lane names bucket {later} after bucket {earlier}: the order is the table's"
            )
    return LaneLayout(table, tuple(buckets))
