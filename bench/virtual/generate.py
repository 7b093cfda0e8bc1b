"""Random schedules: what may go wrong, drawn so that a run can always be finished by somebody."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from bench.virtual.schedule import (
    COORDINATOR,
    COORDINATOR_FAULTS,
    COORDINATOR_PHASES,
    JOIN,
    NODE_FAULTS,
    NODE_PHASES,
    Fault,
    Schedule,
)

MOST_FAULTS: Final = 6
LONGEST: Final = 40.0  # seconds
COORDINATORS_SHARE: Final = 0.3  # of the faults
NEWCOMER_PHASES: Final = ("joining", "loading", "replaying")
_LASTING: Final = ("hang", "partition", "delay", "reorder", "jump", "skew")
_MORTAL: Final = ("kill", "vanish", "leave")


def random_schedule(seed: int) -> Schedule:
    """The schedule number ``seed``; equal numbers give equal schedules."""
    draws = random.Random(seed)
    nodes = draws.randint(1, 5)
    rounds = draws.randint(4, 12)
    names = [f"n{index}" for index in range(nodes)]
    faults: list[Fault] = []
    for _ in range(draws.randint(0, MOST_FAULTS)):
        if draws.random() < 0.2:
            names.append(f"n{len(names)}")
            faults.append(Fault(JOIN, names[-1], draws.randint(0, rounds - 2)))
            if draws.random() < 0.6:  # and does not get far
                faults.append(_of_node(draws, names[-1], rounds, nodes, NEWCOMER_PHASES))
        elif draws.random() < COORDINATORS_SHARE:
            faults.append(_of_coordinator(draws, rounds))
        else:
            faults.append(_of_node(draws, draws.choice(names), rounds, nodes))
    kept = draws.choice((0, 0, 1, 2, 3))
    return Schedule(nodes, rounds, seed, kept, tuple(faults))


def allowed(fault: Fault, nodes: int) -> bool:
    """Whether a run that ``nodes`` begin can be finished in spite of it: somebody must stay whose state is
    good, and the run must have begun before anybody leaves for good. A run that all have left is over."""
    # A newcomer with another state is refused; if it comes first, all others are.
    if fault.kind == "deviate" and (nodes < 4 or fault.who == "n0" or fault.phase == "joining"):
        return False
    if fault.kind == "leave" and fault.who == "n0":
        return False
    return not (
        fault.kind in _MORTAL and not fault.seconds and (fault.who == "n0" or fault.round < 1 or nodes < 2)
    )


def _seconds(draws: random.Random) -> float:
    return round(math.exp(draws.random() * math.log(LONGEST)), 1)


def _of_coordinator(draws: random.Random, rounds: int) -> Fault:
    kind = draws.choice(list(COORDINATOR_FAULTS))
    phase = draws.choice(COORDINATOR_PHASES)
    return Fault(kind, COORDINATOR, draws.randrange(rounds), phase, _seconds(draws))


def _of_node(
    draws: random.Random, who: str, rounds: int, nodes: int, phases: Sequence[str] = NODE_PHASES
) -> Fault:
    while True:
        kind = draws.choice(list(NODE_FAULTS))
        phase = draws.choice(phases)
        rare = phase in (*NEWCOMER_PHASES, "donating")
        round_index = -1 if rare or draws.random() < 0.1 else draws.randrange(rounds)
        lasts = kind in _LASTING or (kind in _MORTAL and draws.random() < 0.75)
        seconds = _seconds(draws) if lasts else 0.0
        fault = Fault(kind, who, round_index, phase, seconds)
        if allowed(fault, nodes):
            return fault
