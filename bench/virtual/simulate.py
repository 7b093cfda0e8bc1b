"""One schedule from its first second to its last."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from bench.virtual import loop
from bench.virtual.invariants import Violation
from bench.virtual.loop import VirtualLoop
from bench.virtual.machine import MakeRun, pooled
from bench.virtual.schedule import Schedule
from bench.virtual.world import World
from coordinator.run import Run

LIMIT: Final = 6000.0  # virtual seconds of a whole run


@dataclass
class Outcome:
    """How a schedule went.

    Attributes:
        violations: what did not hold.
        payloads: digest of the result of each round.
        rounds: committed.
        seconds: of virtual time.
        log: what happened, a line each.
        fired: faults that happened.
    """

    violations: list[Violation]
    payloads: dict[int, str]
    rounds: int
    seconds: float
    log: list[str] = field(default_factory=list)
    fired: int = 0


def simulate(schedule: Schedule, make_run: MakeRun = Run) -> Outcome:
    """Run a schedule to its end."""
    worlds: list[World] = []

    async def main(virtual: VirtualLoop) -> float:
        worlds.append(World(schedule, virtual, make_run))
        await worlds[0].run()
        return virtual.time() - loop.START

    def start(virtual: VirtualLoop) -> Coroutine[Any, Any, float]:
        return main(virtual)

    seconds = LIMIT
    logging.disable(logging.ERROR)  # what fails is told by the checker
    with pooled():
        try:
            seconds = loop.run(start, seconds=LIMIT)
        except (loop.Deadlock, loop.OutOfTime) as error:
            worlds[0].checker.fail("progress", str(error))
        finally:
            logging.disable(logging.NOTSET)
    world = worlds[0]
    checker = world.checker
    return Outcome(
        checker.violations, checker.payloads, len(checker.payloads), seconds, world.log, world.fired
    )
