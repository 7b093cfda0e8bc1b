"""When a snapshot of the shared state is made, and by whom: all who hold it upload a part each."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final

from coordinator.catchup import snapshot_due
from coordinator.chunk_store import ChunkStore
from coordinator.events import SnapshotBegun, SnapshotComplete, SnapshotFailed
from coordinator.snapshots import Snapshot, Snapshots
from protos.atoll_pb2 import CoordinatorMessage

if TYPE_CHECKING:
    from coordinator.reducing import Pool
    from coordinator.run import Run

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0  # after a snapshot that failed
MAX_FAILURES: Final = 5  # in a row; then nodes that wait for one are sent away


class Snapshotting:
    """Snapshots of a run.

    Args:
        run: whose members upload them.
        store: where they are kept.
        pool: for work on files.

    Attributes:
        snapshots: those that are kept, and the one in progress.
    """

    def __init__(self, run: Run, store: ChunkStore, pool: Pool) -> None:
        self._run = run
        self._failures = 0
        self._not_before = self._began = 0.0
        self._name = ("", 0)
        self.snapshots = Snapshots(
            store,
            pool=pool,
            now=run.now,
            stall=run.plan.stall,
            agreed=lambda round_index: run.history.digest_after(round_index - 1),
            on_end=self._ended,
            moved_at=self._moved_at,
        )

    def _moved_at(self, node_id: str) -> float:
        """When a contribution or a result of a node last moved."""
        node = self._run.registry.get(node_id)
        exchanges = node.exchanges if node is not None else ()
        return max((exchange.progress_at for exchange in exchanges), default=-math.inf)

    def consider(self) -> None:
        """Between two rounds: begin a snapshot of the present state, if one is wanted."""
        run = self._run
        if self.snapshots.gathering is not None or run.now() < self._not_before:
            return
        if run.leases.held:  # after a restart: the first order must be the round in hand, or its work is lost
            return
        last = max((kept.round for kept in self.snapshots.kept), default=None)
        reason = "a node waits for it" if run.newcomers.want_snapshot() else ""
        reason = reason or snapshot_due(
            run.round,
            last,
            run.plan.snapshot_every,
            result_bytes_since=run.result_bytes(last or 0, run.round),
            state_bytes=run.state_bytes,
        )
        donors = run.registry.donors(run.round)
        if not reason or not donors or last == run.round:
            return
        self._began = run.now()
        log.info("a snapshot after %d rounds by %d nodes: %s", run.round, len(donors), reason)
        parts = self.snapshots.begin(run.round, run.state_bytes, donors)
        if parts:
            self._name = (parts[0][1].snapshot, run.round)
            run.tell(SnapshotBegun(*self._name, tuple(node for node, _ in parts), run.state_bytes))
        for node, donate in parts:
            run.send(run.registry.get(node), CoordinatorMessage(donate=donate))

    def _ended(self, snapshot: Snapshot | None, reason: str) -> None:
        run = self._run
        if snapshot is not None:
            self._failures = 0
            log.info("the snapshot after %d rounds is complete", snapshot.round)
            seconds = run.now() - self._began
            run.tell(SnapshotComplete(*self._name, snapshot.nbytes, snapshot.state_digest, seconds))
            run.journal.forget(snapshot.round)
        else:
            self._failures += 1
            self._not_before = run.now() + RETRY_SECONDS
            log.warning("a snapshot failed: %s", reason)
            run.tell(SnapshotFailed(*self._name, reason))
            run.timer.call_at(self._not_before, run.newcomer_moved)
            if self._failures >= MAX_FAILURES:
                for node in run.newcomers.waiting():
                    run.dismiss(node, f"the shared state cannot be had: {reason}")
        run.newcomers.snapshot_ended(snapshot)
