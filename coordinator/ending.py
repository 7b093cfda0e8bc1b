"""The end of a run, and what it still owes its nodes then: the last results, and a word that it is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from coordinator.events import CoordinatorStopped
from coordinator.nodes import Node
from protos.refusal import Refused

if TYPE_CHECKING:
    from coordinator.run import Run
    from coordinator.timer import Alarm

ENDED: Final = ("done", "failed", "suspended")


class Ending:
    """How a run ends.

    Args:
        run: that ends.

    Attributes:
        at: when, on the coordinator's clock; ``None`` before.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last_chance: Alarm | None = None  # for nodes that still lack results
        self.at: float | None = None

    def refusal(self, reason: str = "") -> Refused:
        """What a stream is told that has no place any more; nodes hold where another coordinator goes on."""
        run = self._run
        reason = reason or run.reason
        if run.phase == "suspended":
            return Refused("", f"this coordinator is stopping, another one goes on: {reason}", "UNAVAILABLE")
        return Refused("", f"the run has ended: {reason}", "UNAVAILABLE")

    def suspend(self, reason: str) -> None:
        """Go no further, and tell the nodes nothing: they hold until a coordinator goes on."""
        if self._run.phase not in ENDED:
            self._halt("suspended", reason)
            self._run.finished.set()

    def end(self, phase: Literal["done", "failed"], reason: str) -> None:
        """End the run; nodes are told why, once they have what they lack."""
        run = self._run
        if run.phase in ENDED:
            return
        self._halt(phase, reason)
        self._last_chance = run.timer.call_at(run.now() + run.plan.stall, self._all_out)
        evaluating = run.training.last_evaluator() if phase == "done" else None
        for node in list(run.registry.nodes.values()):
            if phase == "done" and node.joining:
                run.newcomers.advance(node)
            elif phase == "done" and self._lacks(node):
                run.training.order(node)
            else:
                run.dismiss(node, reason, done=phase == "done", evaluate=node is evaluating)
        self.departed()

    def _halt(self, phase: Literal["done", "failed", "suspended"], reason: str) -> None:
        run = self._run
        run.phase, run.reason = phase, reason
        self.at = run.now()
        run.gathering.end()
        active, run.training.active = run.active, None
        if active is not None:
            active.stop(self.refusal())
        run.snapshots.stop()
        run.tell(CoordinatorStopped(phase, reason, run.round))

    def _lacks(self, node: Node) -> bool:
        """Whether a member is on its way to the last state, and can get there."""
        run = self._run
        return node.seated and node.position < run.round and run.results.get(node.position) is not None

    def arrived(self, node: Node) -> None:
        """A node has come, or come back, after the end."""
        run = self._run
        if run.phase == "done" and node.known:
            run.newcomers.add(node, node.held)  # it is given what it lacks, then its leave
        else:
            run.dismiss(node, run.reason)

    def departed(self) -> None:
        """A node has left, perhaps the last one."""
        run = self._run
        if run.phase in ENDED and not run.registry.nodes and not self._owing():
            run.finished.set()

    def _owing(self) -> bool:
        """Whether a member, or one of the last round that is none any more, was cut off and may come back for
        what it lacks."""
        run = self._run
        members = {*run.registry.roster.members, *run.training.members}
        return (
            run.phase == "done"
            and self._last_chance is not None
            and any(node.cut_off and node.node in members for node in run.registry.left)
        )

    def _all_out(self) -> None:
        run = self._run
        self._last_chance = None
        for node in list(run.registry.nodes.values()):
            run.dismiss(node, run.reason, done=run.phase == "done")
        self.departed()
