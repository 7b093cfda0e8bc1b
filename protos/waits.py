"""The waits of a run: they follow from two numbers of the run file, ``[round] deadline`` and
``start_timeout``.

One that waits for another must be the longer of the two, or it ends first and hides what has happened.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

HEARTBEAT_SECONDS: Final = 5.0
MISSED: Final = 3  # heartbeats until a node counts as departed
FLOOR_SECONDS: Final = 5.0  # of a silence between nodes: lost packets or a busy machine take as long
FACTOR: Final = 1.0  # of the time that the others took: one that is silent makes a round last twice as long
ANSWER_SECONDS: Final = 30.0  # at most, for answers about a result that is not announced yet
_SLACK_SECONDS: Final = 60.0  # for transfers and the reduction


class Wait(NamedTuple):
    """A wait that has a name, in seconds; ``key`` is where it is set, empty for one that follows."""

    name: str
    seconds: float
    key: str = ""


def patience(took: float, floor: float = FLOOR_SECONDS, factor: float = FACTOR) -> float:
    """Seconds of silence for one of several that ought to be done at the same time, where the others took
    ``took``."""
    return max(floor, factor * took)


def answer_patience(took: float) -> float:
    """Seconds for answers about a result, which came ``took`` seconds after all that it was made of."""
    return min(patience(took), ANSWER_SECONDS)


def longest_round(deadline: float, start_timeout: float) -> float:
    """Seconds after which a node no longer waits for the result of a round: later than any verdict, which may
    wait for the first contribution, the deadline, and as long again for a quorum; and than answers of voters
    and then of reducers about the result."""
    return 2 * start_timeout + deadline + 2 * ANSWER_SECONDS + _SLACK_SECONDS


def waits(deadline: float, start_timeout: float) -> tuple[Wait, ...]:
    """All of them, from a heartbeat to the patience of a node."""
    return (
        Wait("heartbeat", HEARTBEAT_SECONDS),
        Wait("departure of a silent node", MISSED * HEARTBEAT_SECONDS),
        Wait("others of a round, at most", deadline, "[round] deadline"),
        Wait("first of a round, or a quorum", start_timeout, "[round] start_timeout"),
        Wait("a node for a result", longest_round(deadline, start_timeout)),
    )


def advice(deadline: float, start_timeout: float) -> Iterator[str]:
    """A sentence for each wait that is allowed and yet shorter than what it waits for."""
    departure = MISSED * HEARTBEAT_SECONDS
    if start_timeout < departure:
        yield (
            f"[round] start_timeout = {start_timeout:g} s is shorter than the {departure:g} s ({MISSED} "
            "heartbeats) after which a silent node counts as departed: a round may commit without a quorum "
            f"while it waits for a node that is gone; make it {departure:g} s or more"
        )
