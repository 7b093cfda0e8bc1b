"""Nodes that are no members yet: how each comes to hold the present state, while the run goes on.

A node that joins, comes back after an absence, or has left the common state loads a snapshot, replays results,
or both, whatever moves the fewest bytes (:mod:`coordinator.catchup`). Once it is near enough it takes its place
between two rounds, and fetches the last results as any member does that is behind.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from coordinator.catchup import plan
from coordinator.events import CatchUpPlanned
from coordinator.nodes import Node
from coordinator.refusal import DIGEST_MISMATCH
from coordinator.snapshots import Snapshot
from protos.atoll_pb2 import CoordinatorMessage, LoadState, Ready, Replay

if TYPE_CHECKING:
    from coordinator.run import Run

log = logging.getLogger(__name__)

NEAR: Final = 2  # rounds behind which a node may be and take its place
MAX_FAILURES: Final = 3  # of one node, to hold the state that it was told to load
MAX_IDLE: Final = 8  # orders in a row that a node could not carry out
RETRY_SECONDS: Final = 1.0  # between two of them
MAX_REPLAY: Final = 4096  # rounds in one order


class Newcomers:
    """The nodes of a run that are to become members.

    Args:
        run: gives them orders, and is told when one of them is ready.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._failures: Counter[str] = Counter()  # by node
        self._idle: Counter[str] = Counter()  # orders in a row that came to nothing, by node
        self.plans: dict[str, str] = {}  # of each, in words

    def trusted(self, node: Node) -> int | None:
        """The round whose shared state a node that has just come holds for certain; ``None`` for none.

        The digest must be the one that the nodes had agreed on. Where that is not known, as after a restart
        in the moment after a commit, a node that was a member is believed: its next report tells.
        """
        claim, run = node.claim, self._run
        if claim.round > run.round:
            return None
        known = run.history.digest_after(claim.round - 1)
        if known:
            return claim.round if claim.digest == known else None
        return claim.round if node.known else None

    def add(self, node: Node, held: int | None) -> None:
        """A node is to become a member; ``held`` as in :meth:`trusted`."""
        node.state, node.held, node.goal, node.loading = "joining", held, -1, ""
        self.advance(node)

    def waiting(self) -> list[Node]:
        """Those who are not ready."""
        return [node for node in self._run.registry.joiners() if not self.ready(node)]

    def ready(self, node: Node) -> bool:
        """Whether it can take its place."""
        run = self._run
        return (
            node.held is not None
            and node.goal < 0
            and 0 <= run.round - node.held <= NEAR
            and all(run.results.get(index) is not None for index in range(node.held, run.round))
        )

    def seat(self) -> bool:
        """Make members of those who are ready; whether the roster has changed."""
        ready = [node for node in self._run.registry.joiners() if self.ready(node)]
        for node in ready:
            if not (self._run.settling or node.known or node.claim.round):
                node.since = node.held  # its momentum is as young as that
            self.plans.pop(node.node, None)
        self._run.training.seated(ready)
        return self._run.registry.renew([(node, node.held or 0) for node in ready])

    def want_snapshot(self) -> bool:
        """Whether one of them waits for a new one."""
        return any(
            node.goal < 0 and node.state == "joining" and self.plans.get(node.node, "").startswith("snapshot")
            for node in self.waiting()
        )

    def advance(self, node: Node) -> None:
        """Give a node its next order, if it needs one and has none."""
        run = self._run
        if node.goal >= 0 or node not in run.registry.joiners() or self.ready(node):
            return
        chosen = plan(
            node.held,
            run.round,
            first_kept=run.first_kept(),
            result_bytes=run.result_bytes,
            snapshots=[snapshot.round for snapshot in run.snapshots.kept],
            state_bytes=run.state_bytes,
        )
        words = f"{chosen.action}: {chosen.reason}"
        if self.plans.get(node.node) != words:
            log.info("%s (%s) catches up: %s", node.node, node.name, words)
            self.plans[node.node] = words
            goal = run.round if chosen.snapshot is None else chosen.snapshot
            action = "wait" if chosen.action == "snapshot" else chosen.action
            run.tell(CatchUpPlanned(node.node, action, goal, chosen.nbytes, chosen.reason))
        frontier = run.leases.frontier
        if chosen.action == "replay":
            assert node.held is not None
            node.goal = min(run.round, node.held + MAX_REPLAY)
            replay = Replay(first=node.held, count=node.goal - node.held, frontier=frontier)
            self._order(node, "replaying", CoordinatorMessage(replay=replay))
        elif chosen.action == "load":
            snapshot = next(kept for kept in run.snapshots.kept if kept.round == chosen.snapshot)
            node.goal, node.loading = snapshot.round, snapshot.id
            load = LoadState(snapshot=snapshot.id, round=snapshot.round, frontier=frontier)
            self._order(node, "loading", CoordinatorMessage(load_state=load))
        else:
            node.state = "joining"  # until there is a new snapshot

    def _order(self, node: Node, state: str, message: CoordinatorMessage) -> None:
        node.state = "loading" if state == "loading" else "replaying"
        node.progress_at = self._run.now()
        self._run.send(node, message)

    def answered(self, node: Node, ready: Ready) -> str:
        """A node says what it holds: what it was told to load, or less, if that came to nothing. Returns what
        is wrong with it, or an empty string."""
        run = self._run
        if node not in run.registry.joiners():
            return ""  # an old answer
        goal, loading, before = node.goal, node.loading, node.held
        node.goal, node.loading, node.state = -1, "", "joining"
        expected = run.history.digest_after(ready.round - 1)
        if loading and ready.round == goal:
            expected = next((kept.state_digest for kept in run.snapshots.kept if kept.id == loading), expected)
        if not expected and before == ready.round:
            expected = ready.state_digest  # it has been trusted with that before
        problem = ""
        if ready.round > run.round:
            problem = f"{node.node} says that it holds the state of round {ready.round + 1}, which is not there"
        elif expected and ready.state_digest != expected:
            problem = (
                f"the state of {node.node} after {ready.round} rounds has the digest "
                f"{ready.state_digest[:128]}, the common one {expected}"
            )
        if problem:
            run.count(DIGEST_MISMATCH)
            self.failed(node, problem)
        else:
            self._hold(node, ready.round if expected or ready.round == goal else None, before)
        run.newcomer_moved()
        return problem

    def _hold(self, node: Node, held: int | None, before: int | None) -> None:
        """A node holds the state of a round for certain; its next order comes later if that is no progress."""
        node.held = held
        if held is not None and (before is None or held > before):
            self._idle[node.node] = 0
            self.advance(node)
            return
        self._idle[node.node] += 1
        if self._idle[node.node] > MAX_IDLE:
            self._run.dismiss(node, f"{node.node} could not load the shared state in {MAX_IDLE} attempts")
        else:
            self._run.timer.call_at(self._run.now() + RETRY_SECONDS, lambda: self.advance(node))

    def failed(self, node: Node, problem: str) -> int:
        """What a node holds is not the common state; it loads that anew, a few times. Returns how often that
        has happened."""
        self._failures[node.node] += 1
        if self._failures[node.node] > MAX_FAILURES:
            self._run.dismiss(node, f"{problem}; it has happened {self._failures[node.node]} times")
        else:
            log.warning("%s; it loads the state again", problem)
            self.add(node, None)
        return self._failures[node.node]

    def snapshot_ended(self, snapshot: Snapshot | None) -> None:
        """A new snapshot is there, or has failed."""
        if snapshot is not None:
            for node in self.waiting():
                self.advance(node)
        self._run.newcomer_moved()

    def sweep(self) -> int:
        """Give up those who make no progress with what they were told to load; returns how many."""
        run = self._run
        stuck = [
            node
            for node in run.registry.joiners()
            if node.goal >= 0 and run.now() - node.progress_at >= run.plan.stall
        ]
        for node in stuck:
            run.departed(node, f"it has made no progress with {node.state} for {run.plan.stall:g} s")
        return len(stuck)
