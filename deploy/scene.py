"""How a run stood at a moment, folded from the events before it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from coordinator import events as of_coordinator
from deploy.event_log import EventsLost
from deploy.event_words import sentence
from deploy.moments import Moment
from node import events as of_node

LAST_EVENTS: Final = 8  # that a scene remembers


@dataclass
class NodeScene:
    """What is known of a node at a moment."""

    name: str = ""
    state: str = "joining"
    round: int = -1  # the last that it has reported or applied
    loss: float = math.nan
    voted: str = ""  # in the last committed round
    note: str = ""  # what it is doing beside training


@dataclass
class Scene:
    """A run at a moment. :meth:`take` moves it on.

    Attributes:
        at: seconds since 1970.
        phase: of the coordinator, in words.
        open, committed: the round in flight, and the next to commit.
    """

    at: float = math.nan
    run: str = ""
    method: str = ""
    rounds: int = 0
    phase: str = "gathering"
    open: int = -1
    committed: int = 0
    reason: str = ""
    snapshot: str = ""
    digest: str = ""
    validation: float = math.nan
    nodes: dict[str, NodeScene] = field(default_factory=dict)
    told: deque[tuple[float, str, str]] = field(default_factory=lambda: deque(maxlen=LAST_EVENTS))

    def take(self, moment: Moment) -> None:
        """The next event."""
        self.at = moment.at
        event = moment.event
        if isinstance(event, (of_coordinator.RoundOpened, of_coordinator.RoundCommitted)):
            self._round(event)
        elif isinstance(event, of_coordinator.NodeReported):
            self._result(event.node, event.round, event.loss, event.validation_loss)
        elif isinstance(event, of_node.RoundDone):
            self._applied(moment.who, event)
        else:
            self.told.append((moment.at, moment.who, sentence(event)))
            if isinstance(event, of_coordinator.Event):
                self._coordinator(event)
            elif not isinstance(event, EventsLost):
                self._node(moment.who, event)

    @property
    def loss(self) -> float:
        """Mean over the nodes that are in the run, of the last that each has said."""
        last = [n.loss for n in self.nodes.values() if n.state != "left" and math.isfinite(n.loss)]
        return sum(last) / len(last) if last else math.nan

    def of(self, node: str) -> NodeScene:
        """A node, which may be new."""
        return self.nodes.setdefault(node, NodeScene())

    def _round(self, event: of_coordinator.RoundOpened | of_coordinator.RoundCommitted) -> None:
        self.phase = "training"
        if isinstance(event, of_coordinator.RoundOpened):
            self.open, self.reason = event.round, event.waits
            for node in event.members:
                self.of(node).state = "lagging" if node in event.lagging else "active"
                self.of(node).note = ""
            return
        self.committed, self.reason = event.round + 1, event.reason
        for name, scene in self.nodes.items():
            scene.voted = "yes" if name in event.voters else "late" if name in event.silent else ""

    def _result(self, node: str, round_index: int, loss: float, validation: float | None) -> None:
        scene = self.of(node)
        scene.round = max(scene.round, round_index)
        if math.isfinite(loss):
            scene.loss = loss
        if validation is not None:
            self.validation = validation

    def _applied(self, who: str, event: of_node.RoundDone) -> None:
        self._result(who, event.round, event.loss, event.validation_loss)
        self.rounds = max(self.rounds, event.rounds)
        scene = self.of(who)
        if self.open < 0:  # no log of the coordinator: a node's own is all there is
            scene.state, scene.voted = "active", "yes" if event.counted else ""
            self.phase, self.reason = "training", event.reason
            self.committed = max(self.committed, event.round + 1)

    def _coordinator(self, event: of_coordinator.Event) -> None:
        if isinstance(event, (of_coordinator.RunBegun, of_coordinator.RunResumed)):
            self.run, self.method, self.rounds = event.run, event.method, event.rounds
            self.committed, self.reason = event.round, event.reason
            self.phase = "training" if isinstance(event, of_coordinator.RunBegun) else "gathering"
            if isinstance(event, of_coordinator.RunResumed):
                for scene in self.nodes.values():
                    scene.note = "waiting for the coordinator"
        elif isinstance(event, (of_coordinator.NodeJoined, of_coordinator.NodeRejoined)):
            scene = self.of(event.node)
            scene.name, scene.state, scene.note = event.name, "joining", ""
        elif isinstance(event, of_coordinator.NodeLeft):
            scene = self.of(event.node)
            scene.state, scene.voted, scene.note = "left", "", event.reason
        elif isinstance(event, of_coordinator.CatchUpPlanned):
            scene = self.of(event.node)
            scene.state = "loading"
            scene.note = f"{event.action}, to round {event.round}"
        elif isinstance(event, of_coordinator.NodeDeviated):
            self.of(event.node).note = f"deviated in round {event.round + 1}"
        elif isinstance(event, of_coordinator.DigestAgreed):
            self.digest = event.digest
        elif isinstance(event, of_coordinator.CoordinatorStopped):
            self.phase, self.reason = event.phase, event.reason
        elif isinstance(
            event,
            (of_coordinator.SnapshotBegun, of_coordinator.SnapshotComplete, of_coordinator.SnapshotFailed),
        ):
            self.snapshot = sentence(event)

    def _node(self, who: str, event: of_node.Event) -> None:
        if isinstance(event, of_node.Started):
            self.run, self.method = self.run or event.run, self.method or event.method
            return
        scene = self.of(who)
        if isinstance(event, of_node.Stopped):
            scene.state, scene.note = "left", event.reason
        elif isinstance(event, of_node.MicroStep):
            scene.note = f"step {event.micro_step}/{event.micro_steps}"
        elif not isinstance(event, (of_node.Joined, of_node.Notice)):
            scene.note = sentence(event)
