"""Who reads which samples: ranges of global sample indices, leased for one round.

A sample is *trained* when the contribution that was computed on it is counted in a commit. Ranges of members
that were not counted return to the pool and are handed out again before new ones, so that no sample is lost
and none is trained twice. The map from a global index to a window of the text (a permutation, epoch after
epoch) is the nodes'.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Lease:
    """The samples ``start`` to ``start + count - 1``."""

    start: int
    count: int

    @property
    def end(self) -> int:
        """One past the last sample."""
        return self.start + self.count


class LeaseError(ValueError):
    """A lease that cannot be given; the text says why."""


class LeaseBook:
    """All leases of a run, or of its continuation from the sample ``start`` on.

    Every index from there to below :attr:`frontier` is in exactly one of: trained, held by a member of an
    open round, or returned.
    """

    def __init__(self, start: int = 0, returned: Iterable[Lease] = (), trained: int = 0) -> None:
        self.frontier = start  # first index that was never leased
        self.trained = trained  # samples counted in commits so far
        self._returned: list[Lease] = []  # sorted, neighbours merged
        self._held: dict[str, tuple[int, Lease]] = {}  # node -> (round, lease)
        for lease in returned:
            self._give_back(lease)

    @property
    def returned(self) -> tuple[Lease, ...]:
        """Ranges waiting to be handed out again, lowest first."""
        return tuple(self._returned)

    @property
    def held(self) -> dict[str, Lease]:
        """Lease of each member that has one now."""
        return {node: lease for node, (_, lease) in self._held.items()}

    def held_by(self, node: str, round_index: int) -> Lease | None:
        """The lease that a node holds for a round."""
        held_round, lease = self._held.get(node, (round_index, None))
        return lease if held_round == round_index else None

    def reclaim(self, node: str, round_index: int, lease: Lease) -> bool:
        """Lease to ``node`` just the samples that it works on already, if they are nobody's.

        It had them from a coordinator that was started again since. What lies between the frontier and a
        lease beyond it goes back to the pool: others had it, and may still reclaim it.
        """
        if node in self._held:
            return self._held[node] == (round_index, lease)
        if lease.count < 1:
            return False
        if lease.start >= self.frontier:
            if lease.start > self.frontier:
                self._give_back(Lease(self.frontier, lease.start - self.frontier))
            self.frontier = lease.end
        else:
            place = bisect.bisect(self._returned, Lease(lease.start, 1 << 62)) - 1
            if place < 0 or self._returned[place].end < lease.end:
                return False
            around = self._returned.pop(place)
            for start, end in ((around.start, lease.start), (lease.end, around.end)):
                if start < end:
                    bisect.insort(self._returned, Lease(start, end - start))
        self._held[node] = (round_index, lease)
        return True

    def skipped(self, frontier: int, hands: Iterable[Lease]) -> LeaseBook:
        """The leases after rounds that this book knows nothing of.

        All up to ``frontier`` counts as read, returned or not, so that nothing is read twice, but for what is
        in nodes' ``hands`` still: that waits to be reclaimed.
        """
        book = LeaseBook(max(frontier, self.frontier), trained=self.trained)
        end = self.frontier
        for lease in sorted(hands):
            if end <= lease.start and lease.count > 0 and lease.end <= book.frontier:
                book._give_back(lease)
                end = lease.end
        return book

    def take(self, node: str, round_index: int, count: int) -> Lease:
        """Lease up to ``count`` consecutive samples to ``node`` for a round.

        A returned range may be shorter than ``count``: leases are one range, and returned samples come first.

        Raises:
            LeaseError: ``count`` below 1, or the node holds a lease already.
        """
        if count < 1:
            raise LeaseError(f"a lease has at least one sample, not {count}")
        if node in self._held:
            other, lease = self._held[node]
            raise LeaseError(f"{node} still holds samples {lease.start} to {lease.end - 1} of round {other}")
        if self._returned:
            lowest = self._returned[0]
            lease = Lease(lowest.start, min(count, lowest.count))
            if lease.count == lowest.count:
                del self._returned[0]
            else:
                self._returned[0] = Lease(lease.end, lowest.count - lease.count)
        else:
            lease = Lease(self.frontier, count)
            self.frontier = lease.end
        self._held[node] = (round_index, lease)
        return lease

    def settle(self, round_index: int, counted: Collection[str]) -> dict[str, Lease]:
        """Close a round: the leases of those counted are trained, all other leases of the round return.

        Returns the former, by node.
        """
        trained = {}
        for node, (held_round, lease) in list(self._held.items()):
            if held_round != round_index:
                continue
            del self._held[node]
            if node in counted:
                self.trained += lease.count
                trained[node] = lease
            else:
                self._give_back(lease)
        return trained

    def _give_back(self, lease: Lease) -> None:
        place = bisect.bisect(self._returned, lease)
        before = self._returned[place - 1] if place else None
        after = self._returned[place] if place < len(self._returned) else None
        if after is not None and after.start == lease.end:
            lease = Lease(lease.start, lease.count + after.count)
            del self._returned[place]
        if before is not None and before.end == lease.start:
            lease = Lease(before.start, before.count + lease.count)
            place -= 1
            del self._returned[place]
        self._returned.insert(place, lease)
