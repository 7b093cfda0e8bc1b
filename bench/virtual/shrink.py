"""Shrinking: the shortest script that still breaks an invariant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from bench.virtual.schedule import Schedule


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], most: int = 200) -> Schedule:
    """Leave out faults, then seconds, nodes and rounds, as long as ``fails`` says so; ``most`` attempts."""
    attempts = 0
    found = True
    while found:
        found = False
        for smaller in _smaller(schedule):
            attempts += 1
            if attempts > most:
                return schedule
            if fails(smaller):
                schedule, found = smaller, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    faults = schedule.faults
    for index in range(len(faults)):
        yield replace(schedule, faults=faults[:index] + faults[index + 1 :])
    needed = {fault.who for fault in faults}
    last = f"n{schedule.nodes - 1}"
    if schedule.nodes > 1 and last not in needed:
        yield replace(schedule, nodes=schedule.nodes - 1)
    if schedule.rounds > max(2, *(fault.round + 2 for fault in faults), 2):
        yield replace(schedule, rounds=schedule.rounds - 1)
    for index, fault in enumerate(faults):
        for seconds in (1.0, 3.0, 10.0, 30.0):
            if 0 < seconds < fault.seconds:
                shorter = replace(fault, seconds=seconds)
                yield replace(schedule, faults=(*faults[:index], shorter, *faults[index + 1 :]))
