"""Whether a link is what was asked for, as far as its probe and this machine can tell. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from deploy.links.shape import Shape
from deploy.testbed.probe import Reading
from protos.units import format_duration, format_rate

OFF: Final = 0.10  # share by which rate and round trip may be off
GRACE_SECONDS: Final = 0.002  # by which any round trip may be late
REACH: Final = 3.0  # a shaped link costs the machine so many times the work of a bare one
SIGMAS: Final = 4.0


@dataclass(frozen=True)
class Verdict:
    """What a probe comes to: ``problems`` forbid a report; ``notes`` go into it."""

    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the link is what was asked for."""
        return not self.problems


def judge(name: str, asked: Shape, found: Reading, machine: float, *, others: float = 0.0) -> Verdict:
    """Compare a link with its probe.

    Args:
        name: of the link.
        asked: its shape, each way.
        found: the probe's readings.
        machine: bits per second that this machine moves over a link without a shape.
        others: seconds of a round trip that other links on the way add.
    """
    problems, notes = list[str](), list[str]()
    for problem, fatal in (*_rates(name, asked, found, machine), *_rtt(name, asked, found, others)):
        (problems if fatal else notes).append(problem)
    problems += _loss(name, asked, found)
    return Verdict(tuple(problems), tuple(notes))


def _rates(name: str, asked: Shape, found: Reading, machine: float) -> Iterator[tuple[str, bool]]:
    if asked.rate is None:
        return
    within = machine / REACH
    for way, value in (("up", found.up), ("down", found.down)):
        if abs(value / asked.rate - 1) <= OFF:
            continue
        told = f"{name} {way}: asked for {format_rate(asked.rate)}, measured {format_rate(value)}"
        if value < asked.rate and asked.rate > within and value >= (1 - OFF) * within:
            limit = f"this machine is the limit: it moves {format_rate(machine)} without any shaping"
            yield f"{told}; {limit}", False
        else:
            yield told, True


def _rtt(name: str, asked: Shape, found: Reading, others: float) -> Iterator[tuple[str, bool]]:
    wanted = 2 * asked.delay + others
    spread = 2 * asked.jitter
    least = found.rtt.least
    if wanted * (1 - OFF) - spread - GRACE_SECONDS <= least <= wanted * (1 + OFF) + spread + GRACE_SECONDS:
        return
    told = f"{name}: asked for a round trip of {format_duration(wanted)}, measured {format_duration(least)}"
    yield told, True


def _loss(name: str, asked: Shape, found: Reading) -> Iterator[str]:
    """More or less loss than chance allows."""
    both = 1 - (1 - asked.loss) ** 2
    sent, lost = found.rtt.sent, found.rtt.sent - found.rtt.back
    chance = SIGMAS * math.sqrt(sent * both * (1 - both)) + 1
    if abs(lost - sent * both) > chance:
        yield (
            f"{name}: asked for {100 * both:.3g} % of loss there and back, "
            f"{lost} of {sent} datagrams were lost"
        )
