"""The result of a round as it is sent: frames that all receivers share, and the ring of the last results.

A result is readable while it is still being made. Frames of an attempt whose voters changed are dropped; only
the COMMIT makes a result valid.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.refusal import Refused
from protos.atoll_pb2 import Commit
from protos.wire import COMMIT, encode_frame

RING_ROUNDS: Final = 32  # replaying more votes than that costs more bytes than loading the weights
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
        self._agreement: dict[str, float] = {}
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def committed(self) -> bool:
        """Whether the result is valid."""
        return self._facts is not None

    @property
    def voters(self) -> tuple[str, ...]:
        """Whose contributions are in it; empty before the commit."""
        return tuple(self._facts.voters) if self._facts else ()

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

    def commit(
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
        """Make the result valid."""
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
        self._wake()

    def fail(self, error: Refused) -> None:
        """Tell all receivers that there will be no result."""
        self.error = error
        self._wake()

    def commit_frame(self, node: str, *, nbytes: int | None = None, digest: str = "") -> bytes:
        """The COMMIT frame for one receiver; ``nbytes`` and ``digest`` of what it was sent, if not of all."""
        if self._facts is None:
            raise RuntimeError(f"round {self.round} is not committed")
        facts = Commit()
        facts.CopyFrom(self._facts)
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
        self._results[result.round] = result
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
