"""What nodes report after a round, and what becomes of those who have left the common state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.digests import Judgement
from coordinator.events import DigestAgreed, NodeDeviated, NodeReported
from coordinator.nodes import Node
from protos.atoll_pb2 import Report
from protos.refusal import DIGEST_MISMATCH

if TYPE_CHECKING:
    from coordinator.run import Run


class Reports:
    """The reports of a run's nodes."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def take(self, node: Node, report: Report) -> None:
        """A node tells what it did in a round."""
        run = self._run
        run.moved_bytes += node.take(report)
        if node.position <= report.round:  # it has had the result from other nodes
            run.served(node, report.round)
        measured = (report.validation_loss, report.bits_per_byte) if report.evaluated else ()
        run.tell(NodeReported(node.node, report.round, report.loss, report.state_digest, *measured))
        judgement = run.history.reported(node.node, report)
        if judgement is not None:
            self._sentence(judgement)
        for round_index, digest in run.history.newly_agreed():
            run.journal.agreed(round_index, digest)
            run.tell(DigestAgreed(round_index, digest))
            run.snapshots.judge()

    def _sentence(self, judgement: Judgement) -> None:
        """Those who have left the common state lose their place until they have loaded it."""
        run = self._run
        for node_id in judgement.deviants:
            node = run.registry.get(node_id)
            run.history.retract(node_id)
            if node is None or node.deviated or (node.joining and node.held is None):
                continue
            run.count(DIGEST_MISMATCH)
            problem = f"{node_id} has left the common state: {judgement.reason}"
            facts = (node_id, node.report.round, node.report.state_digest, judgement.agreed or "")
            if node.in_session:
                node.state, node.held, node.goal = "joining", None, -1
                run.withdraw(node, "it has left the common state")
                times = run.newcomers.failed(node, problem)
            else:  # too late: it has been told to leave
                node.deviated, times = True, 1
            run.tell(NodeDeviated(*facts, times, judgement.reason))
