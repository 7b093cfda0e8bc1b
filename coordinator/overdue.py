"""When reducers lose their slices of the round in flight: a pure function of what is known of each slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.waits import FACTOR, FLOOR_SECONDS, patience


@dataclass(frozen=True)
class Standing:
    """One slice.

    Attributes:
        reducer: who has it.
        live: whether that one's session is open.
        trouble: what the reducer, or a member that cannot reach it, said of it; empty: nothing.
        whole_at: when the contributions of all likely voters were there and reduced, seconds on one monotonic
            clock; ``None``: that is not so.
    """

    reducer: str
    live: bool = True
    trouble: str = ""
    whole_at: float | None = None


@dataclass(frozen=True)
class Overdue:
    """The verdict.

    Attributes:
        taken: reducers that lose all their slices, with the reason in words.
        until: when to ask again if nothing else happens; ``None``: only once something has.
    """

    taken: dict[str, str]
    until: float | None


def overdue(
    slices: Sequence[Standing],
    *,
    opened_at: float,
    now: float,
    floor: float = FLOOR_SECONDS,
    factor: float = FACTOR,
) -> Overdue:
    """Which reducers lose their slices now.

    One that is not live or that there is trouble with, however far it has come: before the commit nobody may
    hold its result. And a silent one: the slices of all others have been whole for ``floor`` seconds, and for
    ``factor`` times as long as these took since the opening, and its own are not. Where nobody else reduces
    there is nothing to compare with.

    Args:
        slices: all of the round.
        opened_at: when the round opened, seconds; not when slices were given to others since.
        now: seconds on the same clock.
        floor: seconds.
        factor: of the others' time.
    """
    taken: dict[str, str] = {}
    untils: list[float] = []
    for reducer in dict.fromkeys(one.reducer for one in slices):
        own = [one for one in slices if one.reducer == reducer]
        trouble = next((one.trouble for one in own if one.trouble), "")
        if not all(one.live for one in own):
            taken[reducer] = f"{reducer} has left"
        elif trouble:
            taken[reducer] = trouble
        elif any(one.whole_at is None for one in own):
            others = [one.whole_at for one in slices if one.reducer != reducer]
            whole = [at for at in others if at is not None]
            if not others or len(whole) < len(others):
                continue
            last = max(whole)
            due = last + patience(last - opened_at, floor, factor)
            if now < due:
                untils.append(due)
            else:
                taken[reducer] = (
                    f"nothing whole from {reducer} {now - last:.3g} s after all others, "
                    f"who took {last - opened_at:.3g} s"
                )
    return Overdue(taken, min(untils, default=None))
