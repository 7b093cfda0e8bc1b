"""A round in flight, whose members deliver what a test has them deliver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from coordinator.active_round import ActiveRound
from coordinator.contribution import Contribution
from coordinator.journal import Done
from coordinator.member import Member
from coordinator.open_round import Opening, OpenRound
from coordinator.reducing import Pool, Reducing
from coordinator.rounds import Policy, State, Verdict
from optim.aggregate import ReducerMemory, casting_voter
from optim.bits import tally
from optim.reduction import Slab
from protos.atoll_pb2 import ContributionHeader
from protos.buckets import BucketTable
from protos.lane_layout import LaneLayout
from protos.wire import CHUNK, decode_frame, encode_frame
from tests.coordinator.contribution_rig import end_frame, random_payload, slow_tally, voted_table
from tests.coordinator.coordinator_rig import InlinePool, VirtualTimer

BIG_PIECE = 192 << 10  # more than is reduced inline with two voters
POLICY = Policy(deadline=10.0, start_timeout=60.0, quorum=0.6)


class Case:
    def __init__(
        self,
        members: int = 3,
        *,
        table: BucketTable | None = None,
        pool: Pool | None = None,
        lagging: Sequence[int] = (),
        piece: int = 64,
        round_index: int = 5,
        tally: Any = tally,
        memory: ReducerMemory | None = None,
        keep: Callable[[OpenRound, Done], None] = lambda active, done: done(None),
    ) -> None:
        self.table = table or voted_table(8)
        self.timer = VirtualTimer()
        self.closed: list[Verdict] = []
        rows = Slab(self.table.nbytes).rows(members)
        self.payloads = [random_payload(i, self.table) for i in range(members)]
        opening = Opening(
            round_index,
            2,
            [
                Member(f"n{i}", 1, row, State.LAGGING if i in lagging else State.EXPECTED)
                for i, row in enumerate(rows)
            ],
            policy=POLICY,
            table=self.table,
            timer=self.timer,
            on_close=lambda active, verdict: self.closed.append(verdict),
            keep=keep,
        )
        reducing = Reducing.of(
            self.table,
            memory=memory or ReducerMemory(),
            tally=tally,
            pool=pool or InlinePool(),
            piece_bytes=piece,
        )
        self.round = ActiveRound(opening, reducing)
        self.round.begin()

    def begin(self, i: int) -> Contribution:
        header = ContributionHeader(
            round=5, epoch=2, table_digest=self.table.digest, nbytes=self.table.nbytes, weight=1
        )
        contribution = self.round.accept(f"n{i}", header, LaneLayout(self.table))
        assert contribution is not None
        return contribution

    def upload(self, i: int, contribution: Contribution, stop: int, payload: bytes | None = None) -> None:
        body = (payload or self.payloads[i])[contribution.received : stop]
        frame = encode_frame(CHUNK, body, offset=contribution.received)
        contribution.feed(decode_frame(frame))
        self.round.delivered(f"n{i}", contribution)

    def finish(self, i: int, contribution: Contribution, payload: bytes | None = None) -> None:
        if contribution.received < self.table.nbytes:
            self.upload(i, contribution, self.table.nbytes, payload)
        contribution.feed(decode_frame(end_frame(payload or self.payloads[i])))
        self.round.delivered(f"n{i}", contribution)

    def deliver(self, *nodes: int) -> None:
        for i in nodes:
            self.finish(i, self.begin(i))

    def abstain(self, i: int) -> None:
        header = ContributionHeader(epoch=2, abstain=True)
        assert self.round.accept(f"n{i}", header, LaneLayout(self.table)) is None

    def result(self) -> bytes:
        return b"".join(bytes(decode_frame(frame).body) for frame in self.round.result.frames)

    def published(self) -> list[int]:
        """Bytes of each frame."""
        return [len(decode_frame(frame).body) for frame in self.round.result.frames]

    def expected(self, *voters: int, payloads: Sequence[bytes] | None = None) -> bytes:
        votes = [np.frombuffer((payloads or self.payloads)[i], np.uint8) for i in voters]
        return slow_tally(votes, casting=casting_voter(self.round.round, len(voters))).tobytes()


def big() -> BucketTable:
    return voted_table(2 * BIG_PIECE // 64)
