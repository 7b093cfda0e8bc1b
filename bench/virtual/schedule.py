"""Schedules: what goes wrong in a run, as data and as a short script.

A script has one line for the run and one for each fault::

    run nodes=3 rounds=8 seed=7 kept=2
    restart coordinator round=2 phase=journaling seconds=4
    hang n1 round=3 phase=computing seconds=12.5
    join n3 round=4

A fault happens the first time that ``who`` comes to ``phase`` of ``round``; without a round, of any.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

COORDINATOR: Final = "coordinator"

NODE_PHASES: Final = (
    "joining",
    "loading",
    "replaying",
    "computing",
    "sending",
    "waiting",
    "applying",
    "reporting",
    "donating",
)
COORDINATOR_PHASES: Final = (
    "gathering",  # the first node has opened its session
    "open",  # the first RoundOpen is on its way
    "reducing",
    "journaling",  # the round is being written
    "durable",  # it is written, and nobody has been told
    "committed",  # the first node has been told
)
NODE_FAULTS: Final = {
    "kill": "the process dies; with seconds it is started again after them, from its last checkpoint",
    "vanish": "like kill, but nobody is told: the machine has lost its power",
    "leave": "it says goodbye; with seconds it joins again after them",
    "hang": "it does nothing for a while, and is not there",
    "cut": "its connections break; it may make new ones at once",
    "partition": "nothing gets through to it or from it for a while",
    "delay": "what is sent on its line takes longer for a while",
    "reorder": "calls on its line overtake each other for a while",
    "duplicate": "its next contribution travels twice",
    "deviate": "a bit of its shared state flips",
    "skew": "its clock jumps",
}
COORDINATOR_FAULTS: Final = {
    "restart": "it dies, loses what was not durable, and is started again on its journal",
    "hang": "it does nothing for a while",
    "jump": "its clock jumps: whatever was due rings late",
}
JOIN: Final = "join"  # a node comes late


class ScriptError(ValueError):
    """A script that cannot be read; the text names the line and what is wrong with it."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    ``round`` is the first round of the run that it may happen in, -1: any; ``phase`` is empty for a node that
    joins late. What ``seconds`` are depends on the kind; 0: for good, or none.
    """

    kind: str
    who: str
    round: int = -1
    phase: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        coordinator = self.who == COORDINATOR
        known = COORDINATOR_FAULTS if coordinator else {**NODE_FAULTS, JOIN: ""}
        if self.kind not in known:
            raise ScriptError(f"{self.kind!r} does not happen to {self.who}: known are {', '.join(known)}")
        phases = COORDINATOR_PHASES if coordinator else NODE_PHASES
        if (self.kind == JOIN) != (self.phase == "") or (self.phase and self.phase not in phases):
            raise ScriptError(f"{self.who} has no phase {self.phase!r}: known are {', '.join(phases)}")

    def __str__(self) -> str:
        words = [self.kind, self.who]
        if self.round >= 0:
            words.append(f"round={self.round}")
        if self.phase:
            words.append(f"phase={self.phase}")
        if self.seconds:
            words.append(f"seconds={self.seconds:g}")
        return " ".join(words)


@dataclass(frozen=True)
class Schedule:
    """A run and its faults: ``nodes`` begin it, latencies and data follow from ``seed``, results are ``kept``
    for so many rounds (0: for all)."""

    nodes: int = 3
    rounds: int = 8
    seed: int = 0
    kept: int = 0
    faults: tuple[Fault, ...] = ()

    def script(self) -> str:
        """The text that :meth:`parse` reads."""
        head = f"run nodes={self.nodes} rounds={self.rounds} seed={self.seed}"
        if self.kept:
            head += f" kept={self.kept}"
        return "\n".join([head, *map(str, self.faults)]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a script; empty lines and comments (#) are skipped.

        Raises:
            ScriptError: see there.
        """
        values: dict[str, Any] = {}
        faults: list[Fault] = []
        for number, line in enumerate(text.splitlines(), 1):
            words = shlex.split(line, comments=True)
            if not words:
                continue
            try:
                if words[0] == "run":
                    values.update(_values(words[1:], dict.fromkeys(("nodes", "rounds", "seed", "kept"), int)))
                else:
                    if len(words) < 2:
                        raise ScriptError(f"to whom does {words[0]!r} happen?")
                    kinds = {"round": int, "phase": str, "seconds": float}
                    faults.append(Fault(words[0], words[1], **_values(words[2:], kinds)))
            except ValueError as error:
                raise ScriptError(f"line {number}: {error}") from error
        return cls(**values, faults=tuple(faults))


def _values(words: Iterable[str], kinds: Mapping[str, type]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if name not in kinds or not equals:
            raise ScriptError(f"{word!r} is none of {', '.join(f'{kind}=' for kind in kinds)}")
        found[name] = kinds[name](value)
    return found
