"""Processes of one run that are killed, frozen, leave and come, and what became of the run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from bisect import bisect
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench.bed import Bed
from bench.faults import Fault
from coordinator.audit import Audit, audit
from coordinator.journal_reading import JournalReader
from deploy.event_log import EventReader
from deploy.processes import Child, ProcessError
from protos.runfile import RunFile

FEWEST: Final = 3  # nodes
MOST: Final = 8
PAUSE: Final = (2.0, 6.0)  # seconds between two events, at least and at most
AWAY: Final = (1.0, 5.0)  # seconds for which there is no coordinator
FROZEN: Final = (1.0, 20.0)  # seconds for which a node stands still; after 15 it is taken for gone
LEAVE: Final = 30.0  # seconds within which a node has left
COMPUTE: Final = 0.1  # seconds that a batch takes longer, as on a device of the node's own
RUN: Final[dict[str, dict[str, Any]]] = {
    "run": {"name": "churn", "nodes": FEWEST, "rounds": 1_000_000, "validation_windows": 32},
    "model": {"d_model": 32, "layers": 1, "heads": 2, "context": 32},
    "data": {"batch": 2},
    "method": {"name": "sign-muon", "warmup": 0, "schedule": "constant"},
    "round": {"deadline": 20.0, "start_timeout": 60.0},
}
# What happens, and how often.
EVENTS: Final[dict[str, int]] = {
    "come": 20,  # a node: a new one, or one that was there before, with its checkpoint
    "die": 13,  # a node, by SIGKILL
    "leave": 5,  # a node, by SIGINT
    "freeze": 7,  # a node, by SIGSTOP; SIGCONT follows some seconds later
    "crash": 2,  # the coordinator, by SIGKILL; another follows some seconds later
    "suspend": 1,  # the same by SIGTERM
}
_POLL_SECONDS: Final = 0.05
_TELL_SECONDS: Final = 30.0  # between two lines where there is no terminal
_never = threading.Event()


@dataclass
class Course:
    """What was seen.

    Attributes:
        file: of the run.
        events: (seconds since 1970, what happened), kinds as in :data:`EVENTS`.
        commits: seconds since 1970 of each round's commit, by the journal.
        voters: how many votes each round had.
        losses: round and validation loss, where it was measured.
        differing: rounds after which two nodes had different states.
        deviations: that the coordinator has found.
        troubles: what processes did that they should not, in words.
        found: by the audit of the journal.
        ended: seconds since 1970.
    """

    file: RunFile
    events: list[tuple[float, str]] = field(default_factory=list)
    commits: dict[int, float] = field(default_factory=dict)
    voters: list[int] = field(default_factory=list)
    losses: list[tuple[int, float]] = field(default_factory=list)
    differing: list[int] = field(default_factory=list)
    deviations: int = 0
    troubles: list[str] = field(default_factory=list)
    found: Audit = field(default_factory=Audit)
    ended: float = 0.0

    @property
    def standstill(self) -> float:
        """The longest time without a commit, seconds."""
        moments = [*sorted(self.commits.values()), self.ended]
        return max(after - before for before, after in pairwise(moments))

    def count(self, kind: str) -> int:
        """Events of a kind."""
        return sum(kind == other for _, other in self.events)

    def rounds_of(self, kind: str) -> list[int]:
        """The round that was committed last before each event of a kind."""
        times = sorted(self.commits.values())
        return [max(0, bisect(times, at) - 1) for at, other in self.events if other == kind]


class Churn:
    """A run whose processes come and go.

    Args:
        bed: where they are.
        chance: decides what happens, and when.
        every: rounds between two measurements of the validation loss.
        console: is told how it goes.
    """

    def __init__(self, bed: Bed, chance: random.Random, every: int, console: Console) -> None:
        self._bed, self._chance, self._console = bed, chance, console
        self._hub = EventReader(bed.folder / "coordinator.jsonl")
        self._present: list[str] = []
        self._gone: list[str] = []
        self._frozen: dict[str, float] = {}  # and when they go on
        self._leaving: list[tuple[Child, float]] = []  # and by when they have left
        self._back_at: float | None = None  # when there is a coordinator again
        self._last, self._moved = -1, time.monotonic()  # the last commit
        self._votes = 0  # in it
        self.course = Course(bed.write({**RUN, "run": {**RUN["run"], "evaluate_every": every}}))

    def play(self, seconds: float, standstill: float) -> Course:
        """Let it go on for so long from its first commit, or until there is none for ``standstill``
        seconds."""
        self._lead()
        for _ in range((FEWEST + MOST) // 2):
            self._come()
        columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, disable=not self._console.is_terminal) as bar:
            task = bar.add_task("", total=seconds)
            told = began = due = time.monotonic()
            try:
                while (now := time.monotonic()) < began + seconds and now - self._moved < standstill:
                    if self._last < 0:
                        began = due = now
                    elif now >= due:
                        self._happen(self._drawn())
                        due = now + self._chance.uniform(*PAUSE)
                    self._look(now)
                    bar.update(task, completed=now - began, description=self._state())
                    if now >= told + _TELL_SECONDS and not self._console.is_terminal:
                        told = now
                        self._console.print(f"{now - began:.0f} of {seconds:.0f} s: {self._state()}")
                    _never.wait(_POLL_SECONDS)
            finally:
                for name in [*self._frozen]:  # else it could not be told to end
                    self._thaw(name)
        self._close(standstill)
        self._read()
        return self.course

    def _state(self) -> str:
        what = "no coordinator" if self._back_at is not None else f"{len(self._present)} nodes"
        return f"{self._last + 1} rounds, {what}, {len(self.course.events)} events"

    # -------------------------------------------------------------------------------------- what happens

    def _drawn(self) -> str:
        """What happens next; empty if nothing may."""
        able = dict(EVENTS)
        if len(self._present) >= MOST:
            del able["come"]
        if min(len(self._awake()), self._votes) <= FEWEST:  # who has come may not take part yet
            del able["die"], able["leave"], able["freeze"]
        if self._back_at is not None:
            del able["crash"], able["suspend"]
        return self._chance.choices([*able], [*able.values()])[0] if able else ""

    def _happen(self, kind: str) -> None:
        if not kind:
            return
        self.course.events.append((time.time(), kind))
        getattr(self, f"_{kind}")()

    def _awake(self) -> list[str]:
        return [name for name in self._present if name not in self._frozen]

    def _come(self) -> None:
        if self._gone and self._chance.random() < 0.5:
            name = self._gone.pop(self._chance.randrange(len(self._gone)))
        else:
            name = f"n{len(self._bed.nodes) + 1}"
        self._present.append(name)
        checkpoints = str(self._bed.folder / f"{name}-saved")
        options = ("--wait", "120s", "--save", checkpoints, "--resume", checkpoints)
        self._bed.join(name, *options, fault=Fault(compute=COMPUTE))

    def _take(self, names: list[str]) -> Child:
        name = self._chance.choice(names)
        self._present.remove(name)
        self._frozen.pop(name, None)
        self._gone.append(name)
        return self._bed.nodes[name]

    def _die(self) -> None:
        self._bed.kill(self._take(self._present))

    def _leave(self) -> None:
        self._send_away(self._take(self._awake()))

    def _send_away(self, child: Child) -> None:
        os.kill(child.pid, signal.SIGINT)
        self._leaving.append((child, time.monotonic() + LEAVE))

    def _freeze(self) -> None:
        name = self._chance.choice(self._awake())
        os.kill(self._bed.nodes[name].pid, signal.SIGSTOP)
        self._frozen[name] = time.monotonic() + self._chance.uniform(*FROZEN)

    def _crash(self) -> None:
        self._end_coordinator(signal.SIGKILL)

    def _suspend(self) -> None:
        self._end_coordinator(signal.SIGTERM)

    def _end_coordinator(self, number: signal.Signals) -> None:
        assert self._bed.coordinator is not None
        self._bed.kill(self._bed.coordinator, number)
        self._back_at = time.monotonic() + self._chance.uniform(*AWAY)

    def _lead(self) -> None:
        self._back_at = None
        self._bed.lead("--events", str(self._hub.path))

    # ------------------------------------------------------------------------------------- what is seen

    def _look(self, now: float) -> None:
        """What is due, what the coordinator has told, and who has ended though nobody asked for it."""
        for name in [name for name, until in self._frozen.items() if now >= until]:
            self._thaw(name)
        if self._back_at is not None and now >= self._back_at:
            self._lead()
        for event in self._hub.new():
            if event["event"] == "RoundCommitted":
                self._last, self._moved, self._votes = event["round"], now, len(event["voters"])
            elif event["event"] == "NodeDeviated":
                self.course.deviations += 1
        hub = self._bed.coordinator
        if self._back_at is None and hub is not None and hub.code is not None:
            self.course.troubles.append(hub.fate())
            self._back_at = now
        for name in [name for name in self._present if self._bed.nodes[name].code is not None]:
            self.course.troubles.append(self._bed.nodes[name].fate())
            self._present.remove(name)
            self._frozen.pop(name, None)
            self._gone.append(name)
        for child, until in [entry for entry in self._leaving if entry[0].code is not None or now > entry[1]]:
            self._leaving.remove((child, until))
            if child.code is None:
                self.course.troubles.append(f"told to leave, {child.fate()}")

    def _thaw(self, name: str) -> None:
        del self._frozen[name]
        os.kill(self._bed.nodes[name].pid, signal.SIGCONT)

    # --------------------------------------------------------------------------------------- its end

    def _close(self, seconds: float) -> None:
        """Bring the coordinator back, wait for one more round, suspend it and let all nodes leave."""
        bed, course = self._bed, self.course
        if self._back_at is not None:
            self._lead()
        last = self._last
        end = time.monotonic() + seconds
        while self._last <= last and (now := time.monotonic()) < end:
            self._look(now)
            _never.wait(_POLL_SECONDS)
        course.ended = time.time()
        assert bed.coordinator is not None
        bed.kill(bed.coordinator, signal.SIGTERM)
        for name in self._present:
            self._send_away(bed.nodes[name])
        for child, _ in self._leaving:
            try:
                bed.ended(child, LEAVE)
            except ProcessError as error:
                course.troubles.append(str(error))

    def _read(self) -> None:
        """What nodes and the journal say."""
        bed, course = self._bed, self.course
        states: dict[int, set[str]] = {}
        losses: dict[int, float] = {}
        for name in bed.nodes:
            for event in bed.events(name, "RoundDone"):
                states.setdefault(event["round"], set()).add(event["digest"])
                if event["validation_loss"] is not None:
                    losses[event["round"]] = event["validation_loss"]
        course.differing = sorted(index for index, digests in states.items() if len(digests) > 1)
        course.losses = sorted(losses.items())
        with JournalReader(bed.journal) as reader:
            course.found = audit(reader.ledger)
            for record in reader.ledger.rounds():
                course.commits[record.round] = record.at
                course.voters.append(len(record.voters))
