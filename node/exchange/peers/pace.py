"""How long a result may stand still, from the time that the others of its round have taken: pure functions.

Words pass between a node and the coordinator though bytes between two nodes do not: nobody else can see that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from protos.waits import patience


@dataclass(frozen=True)
class Coming:
    """The result of one slice, as it arrives here; times in seconds on one monotonic clock.

    Attributes:
        reducer: who sends it.
        whole_at: since when it is here whole; ``None``: it is not.
        moved_at: when a part of it came, or its contribution went, last.
    """

    reducer: str
    whole_at: float | None = None
    moved_at: float = -math.inf


def standing_still(
    results: Sequence[Coming], began_at: float, now: float
) -> tuple[tuple[int, ...], float | None]:
    """Which results do not come although all those of other reducers are here: as long as these took, and
    :data:`~protos.waits.FLOOR_SECONDS` at least, none of their bytes has moved. And when to ask again if
    nothing else happens; ``None``: only once something has.

    A reducer that has not made its result yet loses the slice to another one no later than this, by the same
    rule: see :mod:`coordinator.overdue`.

    Args:
        results: of all slices of a round.
        began_at: when this node began to send.
        now: on the same clock.
    """
    lacking = [one for one in results if one.whole_at is None]
    whole = [one.whole_at for one in results if one.whole_at is not None]
    if not whole or len({one.reducer for one in lacking}) != 1:
        return (), None
    last = max(whole)
    due = max(last, *(one.moved_at for one in lacking)) + patience(last - began_at)
    if now < due:
        return (), due
    return tuple(index for index, one in enumerate(results) if one.whole_at is None), None
