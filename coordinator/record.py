"""What the journal keeps of a round, made from what the run knows when the round closes."""

from __future__ import annotations

import math
from collections.abc import Mapping

from coordinator.journal import RoundRecord, SliceRecord
from coordinator.leases import Lease, LeaseBook
from coordinator.result import Result


def round_record(result: Result, trained: Mapping[str, Lease], leases: LeaseBook, at: float) -> RoundRecord:
    """The record of a settled ``result``.

    Args:
        result: of the round.
        trained: the lease of each voter.
        leases: as they are after the round.
        at: seconds since 1970.
    """
    facts, agreement = result.facts, result.agreement()
    return RoundRecord(
        round=result.round,
        epoch=result.epoch,
        voters=tuple(facts.voters),
        weights=tuple(facts.weights),
        casting=facts.casting,
        nbytes=facts.nbytes,
        digest=facts.payload_digest,
        reason=facts.reason,
        agreement=tuple(agreement.get(node, math.nan) for node in facts.voters),
        trained=tuple((node, lease.start, lease.count) for node, lease in trained.items()),
        frontier=leases.frontier,
        returned=tuple((lease.start, lease.count) for lease in leases.returned),
        at=at,
        slices=tuple(SliceRecord(s.out_start, s.out_end, s.digest, s.reducer) for s in facts.slices),
    )
