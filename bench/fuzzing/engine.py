"""The engine: inputs go to a target, and what must not happen is kept."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from bench.fuzzing.inputs import Mutator
from bench.fuzzing.targets import Target

SLOW_SECONDS: Final = 5.0  # of one input; machines are shared
KEPT: Final = 20  # findings of a target


@dataclass(frozen=True)
class Finding:
    """An input, and what it has led to."""

    data: bytes
    what: str


@dataclass
class Outcome:
    """What came of one target.

    Attributes:
        inputs: how many it was given.
        refused: of them, how many ended in an error that is allowed.
        slowest: seconds of one input.
        growth: bytes by which the highest resident size of this process rose.
        findings: the first of them.
    """

    name: str
    inputs: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    growth: int = 0
    findings: list[Finding] = field(default_factory=list)


def peak_bytes() -> int:
    """Highest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def fuzz(target: Target, inputs: int, seed: int = 0, now: Callable[[], float] = time.process_time) -> Outcome:
    """Give ``target`` that many inputs; the same ones for the same seed."""
    outcome = Outcome(target.name)
    mutator = Mutator(target.seeds, random.Random(f"{seed} {target.name}"), target.made)
    check, before, began = target.make(), peak_bytes(), now()
    for _ in range(inputs):
        data = mutator.next()
        since = now()
        try:
            check(data)
        except target.errors:
            outcome.refused += 1
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            outcome.findings.append(Finding(data, found))
            check = target.make()
        took = now() - since
        outcome.slowest = max(outcome.slowest, took)
        if took > SLOW_SECONDS:
            outcome.findings.append(Finding(data, f"it took {took:.1f} s"))
        outcome.inputs += 1
        if len(outcome.findings) >= KEPT:
            break
    outcome.seconds, outcome.growth = now() - began, peak_bytes() - before
    return outcome
