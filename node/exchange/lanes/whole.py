"""A contribution that is put together of the lanes of a node's ranks, while these are still being written."""

from __future__ import annotations

from collections.abc import Sequence

from node.exchange.filling import Filling
from protos.lane_layout import LaneLayout
from protos.upload import Upload


class Whole:
    """The contribution of a node to one round.

    Args:
        payload: of the round's table; what is in it is of no meaning.
        layouts: of the lanes, by rank; together they are the whole table.

    Attributes:
        payload: as it is being written.
        filling: how far that is. It is finished once all lanes are complete, or one has been withdrawn.
        retired: another one has taken its place, and the payload is that one's: nothing is written any more.
    """

    def __init__(self, payload: memoryview, layouts: Sequence[LaneLayout]) -> None:
        self.payload, self.filling, self.retired = payload, Filling(len(payload)), False
        self._layouts = layouts
        self._there = [0] * len(layouts)  # bytes of each lane
        self._complete: set[int] = set()

    def take(self, rank: int, offset: int, body: memoryview) -> None:
        """Bytes of a lane. Those that have come before are as they were, and are not written again."""
        there, end = self._there[rank], offset + len(body)
        if end <= there or self.retired:
            return
        rest = body[there - offset :]
        for start, stop in self._layouts[rank].up.spread(there, end):
            self.payload[start:stop] = rest[: stop - start]
            rest = rest[stop - start :]
        self._there[rank] = end
        if not self.filling.finished:
            self.filling.advance(self._reach())

    def complete(self, rank: int) -> None:
        """All of a lane is there, and usable."""
        self._complete.add(rank)
        if len(self._complete) == len(self._layouts):
            self.filling.finish(True)

    def withdraw(self, reason: str) -> None:
        """A lane comes to nothing: so does the whole, unless it is complete."""
        self.filling.finish(False, reason)

    def _reach(self) -> int:
        """The byte before which nothing is missing of any lane."""
        lanes = zip(self._layouts, self._there, strict=True)
        return min(layout.up.reach(there, len(self.payload)) for layout, there in lanes)


class LaneUpload(Upload):
    """A lane as it comes from its rank.

    Args:
        whole: that it is a part of.
        rank: whose lane it is.
        layout: of that.
    """

    def __init__(self, whole: Whole, rank: int, layout: LaneLayout) -> None:
        super().__init__(layout.up.nbytes)
        self._whole, self._rank = whole, rank

    def _take(self, offset: int, body: memoryview) -> None:
        self._whole.take(self._rank, offset, body)
