"""A round at the hub: contributions come in, pieces are reduced once complete, a verdict closes it.

Reduction is speculative: pieces are made and sent as soon as every member that is still waited for has
delivered them. If the set of voters changes after pieces have been sent, they are void and a new attempt
starts. CPU work runs on a pool thread, one job at a time; tiny payloads are reduced at once.
"""

from __future__ import annotations

from typing import Final

from coordinator.contribution import Contribution, check_header
from coordinator.open_round import Made, Opening, OpenRound
from coordinator.reducing import Reducing
from coordinator.rounds import State
from optim.aggregate import Aggregation
from optim.reduction import INLINE_BYTES, Reduction
from protos.atoll_pb2 import ContributionHeader
from protos.lane_layout import LaneLayout
from protos.refusal import DUPLICATE, WRONG_ROUND, Refused
from protos.wire import CHUNK_BYTES

MAX_BROKEN_STREAMS: Final = 3  # of one member in one round; then it is not waited for


class ActiveRound(OpenRound):
    """A round whose contributions come to the coordinator, which reduces them; see :class:`OpenRound`."""

    def __init__(self, opening: Opening, reducing: Reducing) -> None:
        super().__init__(opening)
        self._shared = reducing
        self._reduction: Reduction | None = None
        self._busy = False

    # --------------------------------------------------------------------------------------------- events

    def accept(self, node: str, header: ContributionHeader, lane: LaneLayout) -> Contribution | None:
        """A member's stream announces its contribution, or a lane of it; ``None`` if it has nothing to take.

        One lane that abstains takes its member out, whatever the others have delivered; but whoever asks with
        an abstention for the result of what has arrived whole asks for no more than that.

        Raises:
            Refused: the header does not fit; a duplicate has kind ``DUPLICATE`` and leaves the member as it
                was.
        """
        member = self.members[node]
        delivered = not member.pending or member.lanes.delivered(lane)
        if delivered and not (header.abstain or lane.idle):
            raise Refused(
                DUPLICATE, f"{node} has already delivered for round {self.round + 1} ({member.state.value})"
            )
        if header.epoch != self.epoch:
            raise Refused(
                WRONG_ROUND,
                f"round {self.round + 1} belongs to epoch {self.epoch}, the header says {header.epoch}",
            )
        check_header(header, self.table, lane, member.weight)
        if header.abstain:
            if not delivered:
                self.abstain(node, header.reason)
            return None
        if lane.idle:
            return None
        contribution = Contribution(member.row, self._shared.inspection, lane)
        member.lanes.add(contribution, self.table)
        return contribution

    def delivered(self, node: str, contribution: Contribution) -> None:
        """More of a contribution has arrived."""
        member = self.members[node]
        if contribution not in member.lanes:
            return
        if contribution.complete and member.lanes.complete and member.pending:
            self._arrived(member)
        else:
            self._advance()

    def refuse(self, node: str, contribution: Contribution | None) -> None:
        """A member's contribution, or a stream that has none, was refused: nobody waits for the member in
        this round."""
        member = self.members[node]
        if member.pending and (contribution is None or contribution in member.lanes):
            member.refused = True
            self._exclude(member, State.FAILED)

    def lost(self, node: str, contribution: Contribution) -> None:
        """The stream of an unfinished contribution broke; the member may send it again."""
        member = self.members[node]
        if contribution not in member.lanes or contribution.complete:
            return
        broken = member.lanes.drop(contribution)
        if not member.pending:
            return
        if broken >= MAX_BROKEN_STREAMS:
            self._exclude(member, State.FAILED)
        elif node in self._voters:
            self._form(self._voters)  # a part of the row will be written again

    # --------------------------------------------------------------------------------------------- reduction

    def _form(self, voters: tuple[str, ...]) -> None:
        """Start the reduction afresh for ``voters``."""
        self._voters = voters
        self._reduction = None
        self.result.restart()

    def _advance(self) -> None:
        """Reduce what every voter has delivered, unless a job is running: its end comes back here."""
        if self._busy or self._closed or not self._voters:
            return
        lanes = [self.members[node].lanes for node in self._voters]
        if not all(lanes):
            return
        delivered = min(member.received for member in lanes)
        reduction = self._reduction or self._begin_reduction()
        cost = reduction.cost(delivered)
        if not cost:
            return
        if cost * len(self._voters) <= INLINE_BYTES:
            try:
                frames = reduction.advance(delivered)
            except Exception as error:
                self._reduced(reduction, None, error)
            else:
                self.result.extend(frames)
            return
        self._busy = True
        self._shared.pool.submit(
            lambda: reduction.advance(delivered),
            lambda frames, error: self._reduced(reduction, frames, error),
        )

    def _made(self, voters: tuple[str, ...]) -> Made | None:
        reduction = self._reduction
        if reduction is None or not reduction.done or self._busy:
            return None
        shares = reduction.agreement(self._shared.padding)
        reduction.commit()
        return Made(reduction.digest(), dict(zip(voters, shares, strict=True)))

    def _begin_reduction(self) -> Reduction:
        members = [self.members[node] for node in self._voters]
        aggregation = Aggregation(
            self.table,
            len(members),
            round_index=self.round,
            tally=self._shared.tally,
            memory=self._shared.memory,
            weights=self._weights(self._voters),
            mean_weights=self._mean_weights(self._voters),
        )
        self._reduction = Reduction(
            self._shared.pieces,
            aggregation,
            [member.row for member in members],
            attempt=self.result.attempt,
            frame_bytes=CHUNK_BYTES,
            phase=self.round,
        )
        return self._reduction

    def _reduced(self, reduction: Reduction, frames: list[bytes] | None, error: BaseException | None) -> None:
        self._busy = False
        if self._closed:
            return
        current = reduction is self._reduction  # another attempt may have read rows that were written again
        if error is not None and current:
            self._fail(f"the reducer failed in round {self.round + 1}: {error!r}")
            return
        if current:
            self.result.extend(frames or [])
        self._advance()
        self._settle()
