"""The result of a round as it is sent: frames that all receivers share, and the ring of the last results.

A result is readable while it is still being made. Frames of an attempt whose voters changed are dropped; only
the COMMIT makes a result valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from coordinator.journal import Kept
from protos.atoll_pb2 import Commit, SliceDigest
from protos.frame_log import FrameLog
from protos.refusal import Refused
from protos.ring import RoundRing
from protos.wire import CHUNK, CHUNK_BYTES, COMMIT, PREFIX_BYTES, encode_frame


class Result(FrameLog):
    """The frames of one round's result, growing until :meth:`commit`.

    Attributes:
        attempt: rises when frames that receivers may have seen become void.
        frames: CHUNK frames of this attempt, in order; none of a result that lies at nodes.
        holders: of such a result, nodes from whom it can be had.
    """

    def __init__(self, round_index: int, epoch: int) -> None:
        super().__init__()
        self.round = round_index
        self.epoch = epoch
        self.error: Refused | None = None
        self.holders: Callable[[], Iterable[str]] = tuple
        self._facts: Commit | None = None
        self._announced = False
        self._agreement: dict[str, float] = {}

    @property
    def committed(self) -> bool:
        """Whether the result is valid, and receivers are told so."""
        return self._announced

    @property
    def settled(self) -> bool:
        """Whether nothing of it changes any more."""
        return self._facts is not None

    @property
    def voters(self) -> tuple[str, ...]:
        """Whose contributions are in it; empty before they are settled."""
        return tuple(self._facts.voters) if self._facts else ()

    @property
    def facts(self) -> Commit:
        """What :meth:`settle` was told; ``counted`` and ``agreement`` are each receiver's own."""
        if self._facts is None:
            raise RuntimeError(f"round {self.round} is not settled")
        return self._facts

    @property
    def payload(self) -> list[memoryview]:
        """The result in pieces, end to end."""
        return [memoryview(frame)[PREFIX_BYTES:] for frame in self.frames]

    @property
    def nbytes(self) -> int:
        """Memory of the frames, or of the result at each of the nodes where it lies: they keep as many."""
        if self._facts is not None and self._facts.slices:
            return self._facts.nbytes
        return sum(map(len, self.frames))

    def settle(
        self,
        voters: Sequence[str],
        weights: Sequence[int],
        *,
        casting: int,
        nbytes: int,
        digest: str,
        reason: str,
        agreement: Mapping[str, float],
        slices: Sequence[SliceDigest] = (),
    ) -> None:
        """Nothing of the result changes any more; :meth:`commit` makes it valid. ``slices``: of a result that
        lies at nodes."""
        self._facts = Commit(
            round=self.round,
            epoch=self.epoch,
            voters=voters,
            weights=weights,
            casting=casting,
            nbytes=nbytes,
            payload_digest=digest,
            reason=reason,
            slices=slices,
        )
        self._agreement = dict(agreement)

    def commit(self) -> None:
        """Make the settled result valid: receivers are given the COMMIT."""
        self._announced = self._facts is not None
        self.nudge()

    @classmethod
    def of(cls, kept: Kept) -> Result:
        """A committed result out of the journal."""
        record = kept.record
        result = cls(record.round, record.epoch)
        payload = memoryview(kept.payload)
        result.extend(
            [
                encode_frame(CHUNK, payload[start : start + CHUNK_BYTES], offset=start)
                for start in range(0, len(payload), CHUNK_BYTES)
            ]
        )
        result.settle(
            record.voters,
            record.weights,
            casting=record.casting,
            nbytes=record.nbytes,
            digest=record.digest,
            reason=record.reason,
            agreement=dict(zip(record.voters, record.agreement, strict=True)),
            slices=[
                SliceDigest(out_start=s.start, out_end=s.end, digest=s.digest, reducer=s.reducer)
                for s in record.slices
            ],
        )
        result.commit()
        return result

    def fail(self, error: Refused) -> None:
        """Tell all receivers that there will be no result."""
        self.error = error
        self.nudge()

    def commit_frame(self, node: str, *, nbytes: int | None = None, digest: str = "") -> bytes:
        """The COMMIT frame for one receiver; ``nbytes`` and ``digest`` of what it was sent, if not of all."""
        facts = self.commit_of(node)
        if nbytes is not None:
            facts.nbytes, facts.payload_digest = nbytes, digest
        return encode_frame(COMMIT, facts.SerializeToString(), attempt=self.attempt)

    def commit_of(self, node: str) -> Commit:
        """What one receiver is told."""
        facts = Commit()
        facts.CopyFrom(self.facts)
        if facts.slices:
            facts.nbytes, facts.payload_digest = 0, ""
            facts.holders.extend(self.holders())
        facts.counted = node in facts.voters
        facts.agreement = self._agreement.get(node, float("nan"))
        return facts

    def agreement(self) -> dict[str, float]:
        """Each voter's share of bits that equal the result."""
        return dict(self._agreement)


ResultRing: TypeAlias = RoundRing[Result]
