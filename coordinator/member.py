"""One seat of a round, and what its streams have delivered so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from coordinator.contribution import Contribution
from coordinator.leases import Lease
from coordinator.ramp import FULL, Share
from coordinator.rounds import State
from optim.aggregate import Bytes
from protos.buckets import BucketTable
from protos.lane_layout import LaneLayout
from protos.refusal import BAD_LANE, Refused


class Lanes:
    """The contributions that together make a member's: one of everything, or one for each lane.

    No two of them carry the same bucket.
    """

    def __init__(self) -> None:
        self._lanes: list[Contribution] = []
        self._covered = 0  # bytes from the first on that somebody carries
        self._broken: Counter[int] = Counter()  # streams, by bucket

    def __contains__(self, contribution: object) -> bool:
        return contribution in self._lanes

    def __len__(self) -> int:
        return len(self._lanes)

    def delivered(self, lane: LaneLayout) -> bool:
        """Whether just these buckets have arrived whole, on one stream."""
        return any(other.complete and other.lane.buckets == lane.buckets for other in self._lanes)

    def add(self, contribution: Contribution, table: BucketTable) -> None:
        """A stream begins.

        Raises:
            Refused: another one carries one of its buckets.
        """
        taken = {bucket for other in self._lanes for bucket in other.lane.buckets}
        for bucket in contribution.lane.buckets:
            if bucket in taken:
                raise Refused(
                    BAD_LANE,
                    f"bucket {table.buckets[bucket].name!r} is carried by another stream of this node: each "
                    "rank must send the buckets that it alone holds",
                )
        self._lanes.append(contribution)
        self._measure()

    def drop(self, contribution: Contribution) -> int:
        """A stream broke; returns how many have broken by now that carried one of its buckets."""
        self._lanes.remove(contribution)
        self._measure()
        self._broken.update(contribution.lane.buckets)
        return max((self._broken[bucket] for bucket in contribution.lane.buckets), default=0)

    def clear(self) -> None:
        """Forget them all."""
        self._lanes.clear()
        self._covered = 0

    @property
    def complete(self) -> bool:
        """Whether all buckets have arrived whole."""
        carried = [len(lane.lane.buckets) for lane in self._lanes if lane.complete]
        return bool(carried) and sum(carried) == self._lanes[0].lane.total

    @property
    def received(self) -> int:
        """Bytes of the row that have arrived, from the first on without a gap."""
        return min(self._covered, *(lane.reach for lane in self._lanes)) if self._lanes else 0

    def _measure(self) -> None:
        self._covered = 0
        for start, end in sorted(bounds for lane in self._lanes for bounds in lane.lane.up.bounds):
            if start > self._covered:
                break
            self._covered = end


@dataclass
class Member:
    """One seat of the round; its means weigh ``weight`` for each of its ``samples``, its votes ``share`` of
    ``weight``, both divided by ``penalty``. ``lease``: which samples those are; ``None``: it has not been
    given any. ``refused``: what it sent was no valid contribution."""

    node: str
    weight: int
    row: Bytes
    state: State
    samples: int = 1
    lease: Lease | None = None
    share: Share = FULL
    penalty: int = 1
    live: bool = True
    lanes: Lanes = field(default_factory=Lanes)
    reason: str = ""
    refused: bool = False

    @property
    def pending(self) -> bool:
        """Whether it may still become a voter."""
        return self.state in (State.EXPECTED, State.LAGGING)
