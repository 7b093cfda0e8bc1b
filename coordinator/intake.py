"""Where an exchange belongs: to the round in flight, to a result that is still kept, or nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coordinator.active_round import ActiveRound
from coordinator.ending import ENDED
from coordinator.run import Run
from protos.atoll_pb2 import ContributionHeader
from protos.lane_layout import LaneLayout, layout_of
from protos.refusal import (
    DUPLICATE,
    FELL_BEHIND,
    LATE,
    NOT_A_MEMBER,
    REPLACED,
    WRONG_ROUND,
    Refused,
)
from protos.wire import SESSION_UNKNOWN

if TYPE_CHECKING:
    from coordinator.exchange import Exchange


class Intake:
    """Answers the exchanges of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def begin(self, exchange: Exchange, header: ContributionHeader) -> None:
        """An exchange has read its header: attach it to a result, and to the round in flight.

        Late and repeated contributions are counted and ignored; their senders receive the result all the
        same.

        Raises:
            Refused: there is nothing that the node could contribute to or receive.
        """
        run, node, active = self._run, exchange.node, self._run.active
        lane = exchange.lane = layout_of(header, run.tables.of(header.round))
        exchange.round_index, exchange.contributes = header.round, not (header.abstain or lane.idle)
        for other in list(node.exchanges):
            if other is not exchange and not other.served and exchange.supersedes(other):
                self.replace(other)
        if header.round < run.round:
            self._serve(exchange, header, lane)
            return
        if run.phase in ENDED:
            raise run.ending.refusal()
        if active is None or header.round > run.round:
            raise Refused(
                WRONG_ROUND,
                f"round {header.round + 1} is not open: round {run.round + 1} is next "
                f"({run.phase}: {run.reason})",
                "FAILED_PRECONDITION",
            )
        if node.node not in active.members:
            raise Refused(
                NOT_A_MEMBER,
                f"{node.node} is not in the roster of round {active.round + 1} (epoch {active.epoch})",
                "FAILED_PRECONDITION",
            )
        at_hub = active if isinstance(active, ActiveRound) else None
        exchange.attach(active.result, at_hub)  # before an abstention closes the round
        if active.closing and exchange.contributes:
            run.count(LATE)
            return
        if not isinstance(active, ActiveRound):
            if exchange.contributes:
                raise Refused(
                    WRONG_ROUND,
                    f"the slices of round {active.round + 1} travel between nodes",
                    "FAILED_PRECONDITION",
                )
            return  # it asks for the commit
        try:
            exchange.contribution = active.accept(node.node, header, lane)
        except Refused as refusal:
            if refusal.kind != DUPLICATE:
                raise
            run.count(DUPLICATE)

    def replace(self, exchange: Exchange) -> None:
        """Another stream of its node takes the place of this one."""
        self._run.count(REPLACED)
        exchange.broke()
        exchange.close(Refused("", f"{exchange.node.node} has opened another exchange", "ABORTED"))

    def _serve(self, exchange: Exchange, header: ContributionHeader, lane: LaneLayout) -> None:
        """Attach an exchange to the stored result of a round that has been committed."""
        run, node = self._run, exchange.node
        if header.round < node.first_round or not (node.joining or node.node in run.registry.roster):
            raise Refused(
                NOT_A_MEMBER,
                f"{node.node} was not a member in round {header.round + 1}: wait for the next order",
                "FAILED_PRECONDITION",
            )
        result = run.results.get(header.round)
        if result is None:
            # Its session ends here; a node answers that by joining again, and then loads the present state.
            oldest = run.round if run.results.oldest is None else run.results.oldest
            reason = (
                f"it asked for round {header.round + 1}, but only the results since round {oldest + 1} are "
                "kept: it fell too far behind"
            )
            run.departed(node, reason)
            text = f"{SESSION_UNKNOWN}the session of {node.node} has ended: {reason}"
            raise Refused(FELL_BEHIND, text, "UNAUTHENTICATED")
        if exchange.contributes:
            run.count(DUPLICATE if node.node in result.voters else LATE)
        exchange.attach(result)
        if node.give(header.round, [lane]):
            run.served(node, header.round)

    def refused(self, exchange: Exchange, refusal: Refused) -> None:
        """An exchange was refused: the round in flight does not wait for its node."""
        run, node = self._run, exchange.node
        run.count(refusal.kind)
        active = exchange.round if exchange.result is not None else run.active
        if isinstance(active, ActiveRound) and active is run.active and node.node in active.members:
            active.refuse(node.node, exchange.contribution)

    def ignored(self, exchange: Exchange) -> None:
        """All of a contribution has come that does not count: it tells how long one has to wait for such."""
        node, result = exchange.node, exchange.result
        if not exchange.contributes or result is None or not result.committed:
            return
        if node.node not in result.voters and node.late_round < result.round:  # of lanes the first one tells
            node.late_round = result.round
            self._run.training.deadlines.late(result.round, self._run.now())

    def count(self, kind: str) -> None:
        """Count an event."""
        self._run.count(kind)

    def now(self) -> float:
        """Seconds on the coordinator's clock."""
        return self._run.now()
