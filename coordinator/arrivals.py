"""How long a round waits for contributions behind its first one: from when those of the last rounds came.

A fixed time is wrong in both directions: too short for a run on slow links, and where one node is cut off all
others pay it in full. Median and median absolute deviation (MAD) say what is usual, whatever less than half
of the nodes do; the deadline of the run file is the longest that a round waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

ROUNDS: Final = 32  # that are looked back on
ENOUGH: Final = 4  # of them; with fewer a round waits for the deadline of the run file
SPREADS: Final = 6.0  # MADs above the median; of a normal distribution 1 in 40,000 comes later
LEAST_SHARE: Final = 0.1  # of the time to the first contribution, however many nodes there are
FLOOR_SECONDS: Final = 1.0  # a busy machine or a few lost packets take as long


@dataclass(frozen=True)
class Arrivals:
    """When the contributions of one committed round were whole; seconds.

    Attributes:
        first: of the first one, since the round's opening.
        behind: of every one behind the first, whose own 0 is among them; also of those that came after the
            commit.
        missing: members whose contribution has not come: later than all others.
    """

    first: float
    behind: tuple[float, ...]
    missing: int = 0


@dataclass(frozen=True)
class Wait:
    """How long a round waits after its first contribution, in seconds, and why, in words."""

    seconds: float
    reason: str


def adaptive(rounds: Sequence[Arrivals], ceiling: float) -> Wait:
    """The wait after ``rounds`` (those in which nobody was late for a known reason), at most ``ceiling``.

    ``median + 6 x MAD`` of all contributions behind the first of their round, but not below what one more
    contribution is worth, nor below 1 s. With M nodes whose first one needs f seconds, M contributions in
    ``f * M / (M - 1)`` are as many a second as M - 1 in f: so it waits ``f / (M - 1)``, or a tenth of f where
    that is more. A missing one counts as ``ceiling``.
    """
    seen = [arrivals for arrivals in rounds if len(arrivals.behind) + arrivals.missing > 1]
    if len(seen) < ENOUGH:
        return Wait(
            ceiling, f"{_seconds(ceiling)}, the longest: {len(seen)} of {ENOUGH} rounds to learn from"
        )
    behind = [min(one, ceiling) for arrivals in seen for one in _all(arrivals, ceiling)]
    middle = median(behind)
    spread = median(abs(one - middle) for one in behind)
    usual = f"median {_seconds(middle)} + {SPREADS:g} x MAD {_seconds(spread)} of {len(seen)} rounds"
    wanted = middle + SPREADS * spread
    first = median(arrivals.first for arrivals in seen)
    nodes = median(len(arrivals.behind) + arrivals.missing for arrivals in seen)
    floor = max(FLOOR_SECONDS, first * max(LEAST_SHARE, 1.0 / (nodes - 1.0)))
    if wanted < floor <= ceiling:
        wanted, usual = floor, f"the least after a first one at {_seconds(first)}; {usual}"
    if wanted >= ceiling or floor > ceiling:
        return Wait(ceiling, f"{_seconds(ceiling)}, the longest: {usual}")
    wanted = min(ceiling, math.ceil(1000 * wanted - 1e-6) / 1000)
    return Wait(wanted, f"{_seconds(wanted)}: {usual}")


def _all(arrivals: Arrivals, ceiling: float) -> tuple[float, ...]:
    return arrivals.behind + arrivals.missing * (ceiling,)


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


class Deadlines:
    """The wait of one round after the other.

    Args:
        ceiling: the longest, seconds.

    Attributes:
        wait: that of the round in flight, or of the last one.
    """

    def __init__(self, ceiling: float) -> None:
        self.ceiling = ceiling
        self._rounds: deque[Arrivals] = deque(maxlen=ROUNDS)
        self._exceptional = True
        self._last: tuple[int, float] | None = None  # the newest of them, and when its first one came
        self.wait = Wait(ceiling, f"{_seconds(ceiling)}, the longest: no round has been committed")

    def opened(self, exceptional: str = "") -> Wait:
        """The wait of a round that opens now; ``exceptional`` says why somebody will be late in it, if that
        is known: it gets all the time there is, and does not count as usual."""
        self._exceptional = bool(exceptional)
        if exceptional:
            self.wait = Wait(self.ceiling, f"{_seconds(self.ceiling)}, the longest: {exceptional}")
        else:
            self.wait = adaptive(self._rounds, self.ceiling)
        return self.wait

    def committed(
        self, round_index: int, opened_at: float, whole_at: Sequence[float], missing: int = 0
    ) -> None:
        """That round is committed.

        Args:
            round_index: of it.
            opened_at: when it opened, seconds of the coordinator's clock.
            whole_at: when each whole contribution had arrived.
            missing: members, lagging ones too, from whom one may still come.
        """
        self._last = None
        if self._exceptional or not whole_at:
            return
        first = min(whole_at)
        behind = tuple(sorted(at - first for at in whole_at))
        self._rounds.append(Arrivals(max(0.0, first - opened_at), behind, missing))
        self._last = (round_index, first)

    def late(self, round_index: int, at: float) -> None:
        """A contribution to an earlier round has arrived now; only for the last one that still tells."""
        if self._last is None or self._last[0] != round_index or not self._rounds[-1].missing:
            return
        newest = self._rounds[-1]
        behind = (*newest.behind, at - self._last[1])
        self._rounds[-1] = replace(newest, behind=behind, missing=newest.missing - 1)
