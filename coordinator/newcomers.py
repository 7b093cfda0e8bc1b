"""Nodes that are no members yet: how each comes to hold the present state, while the run goes on.

A node that joins, comes back after an absence, or has left the common state loads a snapshot, replays
results, or both, whatever moves the fewest bytes (:mod:`coordinator.catchup`). Once it is near enough it
takes its place between two rounds, and fetches the last results as any member does that is behind.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

from coordinator.catchup import CatchUp, plan
from coordinator.ending import ENDED
from coordinator.events import CatchUpPlanned
from coordinator.nodes import Node, NodeState
from coordinator.snapshots import Snapshot
from coordinator.start import choose
from protos.atoll_pb2 import CoordinatorMessage, LoadState, Ready, Replay
from protos.refusal import DIGEST_MISMATCH

if TYPE_CHECKING:
    from coordinator.run import Run

log = logging.getLogger(__name__)

NEAR: Final = 2  # rounds behind which a node may be and take its place
MAX_FAILURES: Final = 3  # times that a node may hold another state than the common one; then it is out
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
        node.state, node.held, node.goal, node.loading, node.waits = "joining", held, -1, "", False
        self.advance(node)

    def departed(self, node: Node) -> None:
        """A node is gone."""
        self._idle.pop(node.node, None)

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
            and (node.held == run.round or run.first_kept() <= node.held)
        )

    def seat(self) -> bool:
        """Make members of those who are ready, and give the others their next orders; whether the roster has
        changed."""
        run, ready = self._run, []
        for node in run.registry.joiners():
            if not self.ready(node):
                self.advance(node)
                continue
            ready.append(node)
            afresh = not (node.known or node.claim.round)
            if not run.settling and (node.loaded or afresh):
                node.since = node.held  # its momentum is as young as that
            node.waits = node.loaded = False
        run.training.seated(ready)
        return run.registry.renew([(node, node.held or 0) for node in ready])

    def want_snapshot(self) -> bool:
        """Whether one of them waits for a new one."""
        return any(node.waits for node in self._run.registry.joiners())

    def believe(self) -> bool:
        """Nobody holds the shared state for certain: take those at their word, as at the start of a run, who
        say that they hold one from which on all results are kept; their reports will tell. Whether there is
        somebody."""
        run = self._run
        claims = [
            node.claim
            for node in run.registry.joiners()
            if node.held is None
            and run.first_kept() <= node.claim.round <= run.round
            and not run.history.digest_after(node.claim.round - 1)
            and not (node.loaded or self._failures[node.node])
        ]
        start = choose(claims)
        for node in run.registry.joiners():
            if node.node in start.holders:
                log.warning("nobody else is here: %s is believed to hold what it says", node.node)
                self.add(node, start.round)
        return bool(start.holders)

    def advance(self, node: Node) -> None:
        """Give a node its next order, if it needs one and has none."""
        run = self._run
        if node.goal >= 0 or not node.joining or not run.begun or run.now() < node.retry_at:
            return
        if run.phase == "done":
            if node.held == run.round:
                run.dismiss(node, run.reason, done=True)
                return
        elif run.phase in ENDED or self.ready(node):
            return
        chosen = plan(
            node.held,
            run.round,
            first_kept=run.first_kept(),
            result_bytes=run.result_bytes,
            snapshots=[snapshot.round for snapshot in run.snapshots.kept],
            state_bytes=run.state_bytes,
            training=run.phase != "done",
        )
        if chosen.action == "snapshot" and run.phase == "done":
            run.dismiss(node, f"{run.reason}; this node cannot be given the final state any more")
            return
        if chosen.action != "snapshot" or not node.waits:
            self._tell(node, chosen)
        node.waits = chosen.action == "snapshot"
        frontier = run.leases.frontier
        if chosen.action == "replay":
            assert node.held is not None
            node.goal = min(run.round, node.held + MAX_REPLAY)
            replay = Replay(first=node.held, count=node.goal - node.held, frontier=frontier)
            self._order(node, "replaying", CoordinatorMessage(replay=replay))
        elif chosen.action == "load":
            snapshot = next(kept for kept in run.snapshots.kept if kept.round == chosen.snapshot)
            node.goal, node.loading, node.loaded = snapshot.round, snapshot.id, True
            load = LoadState(snapshot=snapshot.id, round=snapshot.round, frontier=frontier)
            self._order(node, "loading", CoordinatorMessage(load_state=load))
        else:
            node.state = "joining"  # until there is a new snapshot

    def _tell(self, node: Node, chosen: CatchUp) -> None:
        log.info("%s (%s) catches up: %s", node.node, node.name, chosen.reason)
        goal = self._run.round if chosen.snapshot is None else chosen.snapshot
        action = "wait" if chosen.action == "snapshot" else chosen.action
        self._run.tell(CatchUpPlanned(node.node, action, goal, chosen.nbytes, chosen.reason))

    def _order(self, node: Node, state: NodeState, message: CoordinatorMessage) -> None:
        node.state = state
        node.progress_at = self._run.now()
        self._run.send(node, message)

    def answered(self, node: Node, ready: Ready) -> str:
        """A node says what it holds: what it was told to load, or less, if that came to nothing. Returns what
        is wrong with it, or an empty string."""
        run = self._run
        if not (node.joining and run.begun):
            return ""  # an old answer
        goal, loading, before = node.goal, node.loading, node.held
        node.goal, node.loading, node.state = -1, "", "joining"
        expected = run.history.digest_after(ready.round - 1)
        if loading and ready.round == goal:
            expected = next(
                (kept.state_digest for kept in run.snapshots.kept if kept.id == loading), expected
            )
        if not expected and before == ready.round:
            expected = ready.state_digest  # it has been trusted with that before
        problem = ""
        if ready.round > run.round:
            problem = (
                f"{node.node} says that it holds the state of round {ready.round + 1}, which is not there"
            )
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
        """A node holds the state of a round for certain; if that is no progress, its next order waits."""
        node.held = held
        if held is not None and (before is None or held > before):
            self._idle.pop(node.node, None)
            self.advance(node)
            return
        self._idle[node.node] += 1
        if self._idle[node.node] > MAX_IDLE:
            self._run.dismiss(node, f"{node.node} could not load the shared state in {MAX_IDLE} attempts")
        else:
            node.retry_at = self._run.now() + RETRY_SECONDS
            self._run.timer.call_at(node.retry_at, lambda: self.advance(node))

    def failed(self, node: Node, problem: str) -> int:
        """What a node holds is not the common state; it loads that anew, a few times. Returns how often that
        has happened."""
        self._failures[node.node] += 1
        if self._failures[node.node] >= MAX_FAILURES:
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
