"""The slices of one round that this node reduces, from the first order to the commit after its own."""

from __future__ import annotations

from collections.abc import Callable

from node.exchange.peers.lines import check_lines
from node.exchange.peers.plan import Plan
from node.exchange.peers.shelf import Stretch
from node.exchange.peers.slice_reducer import SliceReducer, SliceWork
from optim.slices import Slice
from protos.atoll_pb2 import Commit, Reduce, Retally, Shown, SliceNews
from protos.buckets import LINE_BYTES
from protos.refusal import LATE, WRONG_SLICE, Refused


class DeskRound:
    """Used in the network thread.

    Args:
        round_index: the round.
        work: of its table.
        tell: takes the news of a slice.

    Attributes:
        reducers: of the slices that the present topology gives to this node.
    """

    def __init__(self, round_index: int, work: SliceWork, tell: Callable[[SliceNews], None]) -> None:
        self.round = round_index
        self.reducers: dict[Slice, SliceReducer] = {}
        self._work = work
        self._tell = tell
        self._order: Reduce | None = None
        self._topology = 0
        self._places: dict[Slice, int] = {}  # index in the topology
        self._over = False

    @property
    def ordered(self) -> bool:
        """Whether it is known with whose votes to begin."""
        return self._order is not None

    def follow(self, plan: Plan, *, anew: bool = True) -> None:
        """Take up the slices that a topology gives to this node, and leave those that it gives to others.
        ``anew``: the coordinator may not know what it was told of those that stay.

        Raises:
            Trouble: it does not cover the round's table.
        """
        if self._over:
            return
        shares = plan.shares(self._work.table)
        self._topology, before = plan.number, self._places
        self._places = {share.slice: i for i, share in enumerate(shares) if share.reducer == plan.me}
        for part in self.reducers.keys() - self._places.keys():
            self.reducers.pop(part).close(
                Refused(
                    WRONG_SLICE, f"topology {plan.number} gives this slice to another node or cuts it anew"
                )
            )
        for part in self._places:
            if part in self.reducers:
                if anew or before[part] != self._places[part]:
                    self.reducers[part].repeat()
                continue
            reducer = self.reducers[part] = SliceReducer(part, self.round, self._work, self._changed)
            if self._order is not None:
                reducer.order(self._order)

    def take(self, order: Reduce) -> None:
        """With whose votes the results are made."""
        self._order = order
        for reducer in self.reducers.values():
            reducer.order(order)

    def show(self, order: Retally) -> Shown | None:
        """Lines of what was reduced here, and of what it was made of; ``None``: they are not all here.

        Raises:
            Trouble: kind PROTOCOL: there are no such lines.
        """
        check_lines(order, self._work.table)
        pairs = zip(order.lines, order.out_lines, strict=True)
        shown = [self._show(LINE_BYTES * line, LINE_BYTES * out_line) for line, out_line in pairs]
        found = [one for one in shown if one is not None]
        if len(found) < len(shown):
            return None
        received = [b"".join(rows) for rows in zip(*(rows for rows, _ in found), strict=True)]
        result = b"".join(result for _, result in found)
        return Shown(round=self.round, question=order.question, result=result, received=received)

    def _show(self, start: int, out_start: int) -> tuple[list[bytes], bytes] | None:
        for part, reducer in self.reducers.items():
            if part.out_start <= out_start < part.out_end:
                return reducer.show(start, out_start)
        return None

    def commit(self, commit: Commit) -> None:
        """The round is decided. Results that are the committed ones stay for those who have to fetch them."""
        digests = {(part.out_start, part.out_end): part.digest for part in commit.slices}
        self._over = True
        for part, reducer in self.reducers.items():
            reducer.commit(digests.get((part.out_start, part.out_end), b""))

    def retire(self) -> None:
        """A later round goes on; what is whole can still be fetched."""
        self._over = True
        for reducer in self.reducers.values():
            reducer.close(Refused(LATE, f"a round after {self.round + 1} is open: fetch the result"))

    def close(self, refusal: Refused) -> None:
        """Nothing of it is needed any more."""
        self._over = True
        for reducer in self.reducers.values():
            reducer.close(refusal)

    def finished(self) -> list[Stretch]:
        """All that is whole of the result, in ascending order."""
        parts = sorted(self.reducers, key=lambda part: part.out_start)
        return [stretch for part in parts for stretch in self.reducers[part].finished]

    def _changed(self, reducer: SliceReducer) -> None:
        news = reducer.news()
        news.topology, news.slice = self._topology, self._places[reducer.part]
        self._tell(news)
