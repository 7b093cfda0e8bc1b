"""The result of a round as it is sent: frames that all receivers share, and the ring of the last results.

A result is readable while it is still being made. Frames of an attempt whose voters changed are dropped; only
the COMMIT makes a result valid.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.journal import Kept
from coordinator.refusal import Refused
from protos.atoll_pb2 import Commit
from protos.wire import CHUNK, CHUNK_BYTES, COMMIT, PREFIX_BYTES, encode_frame

RING_ROUNDS: Final = 32
RING_BYTES: Final = 256 << 20


class Result:
    """The frames of one round's result, growing until :meth:`commit`.

    Attributes:
        attempt: rises when frames that receivers may have seen become void.
        frames: CHUNK frames of this attempt, in order.
    """

    def __init__(self, round_index: int, epoch: int) -> None:
        self.round = round_index
        self.epoch = epoch
        self.attempt = 0
        self.frames: list[bytes] = []
        self.error: Refused | None = None
        self._facts: Commit | None = None
        self._announced = False
        self._agreement: dict[str, float] = {}
        self._waiters: list[asyncio.Future[None]] = []

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
        """Memory of the frames."""
        return sum(map(len, self.frames))

    def restart(self) -> None:
        """Void all frames: the next ones belong to a new attempt."""
        if self.frames:
            self.attempt += 1
            self.frames = []
            self._wake()

    def extend(self, frames: Sequence[bytes]) -> None:
        """Publish frames of the current attempt."""
        if frames:
            self.frames.extend(frames)
            self._wake()

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
    ) -> None:
        """Nothing of the result changes any more; :meth:`commit` makes it valid."""
        self._facts = Commit(
            round=self.round,
            epoch=self.epoch,
            voters=voters,
            weights=weights,
            casting=casting,
            nbytes=nbytes,
            payload_digest=digest,
            reason=reason,
        )
        self._agreement = dict(agreement)

    def commit(self) -> None:
        """Make the settled result valid: receivers are given the COMMIT."""
        self._announced = self._facts is not None
        self._wake()

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
        )
        result.commit()
        return result

    def fail(self, error: Refused) -> None:
        """Tell all receivers that there will be no result."""
        self.error = error
        self._wake()

    def commit_frame(self, node: str, *, nbytes: int | None = None, digest: str = "") -> bytes:
        """The COMMIT frame for one receiver; ``nbytes`` and ``digest`` of what it was sent, if not of all."""
        facts = Commit()
        facts.CopyFrom(self.facts)
        if nbytes is not None:
            facts.nbytes, facts.payload_digest = nbytes, digest
        facts.counted = node in facts.voters
        facts.agreement = self._agreement.get(node, float("nan"))
        return encode_frame(COMMIT, facts.SerializeToString(), attempt=self.attempt)

    def agreement(self) -> dict[str, float]:
        """Each voter's share of bits that equal the result."""
        return dict(self._agreement)

    def changed(self) -> asyncio.Future[None]:
        """A future that is done at the next change."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def nudge(self) -> None:
        """Let all receivers look again."""
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class ResultRing:
    """The last committed results, bounded by number and bytes; the newest is always kept."""

    def __init__(self, rounds: int = RING_ROUNDS, nbytes: int = RING_BYTES) -> None:
        self._rounds = rounds
        self._limit = nbytes
        self._held = 0
        self._results: OrderedDict[int, Result] = OrderedDict()

    def put(self, result: Result) -> None:
        """Keep a committed result and drop the oldest beyond the bounds."""
        newest = next(reversed(self._results), -1)
        self._results[result.round] = result
        if result.round < newest:  # out of the journal
            self._results = OrderedDict(sorted(self._results.items()))
        self._held += result.nbytes
        while len(self._results) > 1 and (len(self._results) > self._rounds or self._held > self._limit):
            _, oldest = self._results.popitem(last=False)
            self._held -= oldest.nbytes

    def get(self, round_index: int) -> Result | None:
        """The result of a round, if it is still kept."""
        return self._results.get(round_index)

    @property
    def oldest(self) -> int | None:
        """The first round that is still kept."""
        return next(iter(self._results), None)
