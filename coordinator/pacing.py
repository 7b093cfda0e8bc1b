"""Background streams, of snapshots and past results, give way to the rounds that are running."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from coordinator.exchange import Exchange
    from coordinator.run import Run

SHARE: Final = 0.05  # of the bytes of a round that is being exchanged
BURST_BYTES: Final = 4 << 20  # that may be saved up of that share
POLL_SECONDS: Final = 0.05  # between two looks at the rounds
LOOK_SECONDS: Final = 0.02  # for which a look holds, whoever asks
QUIET_SECONDS: Final = 0.5  # without a message: nothing is being exchanged, as far as one stream goes
BLOCKED_SECONDS: Final = 5.0  # the same for a receiver of a committed result, whose link may be thin


class Pacer:
    """Shares a coordinator's links between rounds and background streams.

    As long as nothing of a round moves, background streams run free. Meanwhile they send at most
    :data:`SHARE` of what the round moves, and each of them a message every ``patience``: they never starve,
    also where a round is never at rest.

    Args:
        now: seconds on the coordinator's clock.
        exchanging: whether a round's contributions or results are moving.
        moved: bytes of all streams so far, these included.
        patience: seconds.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        exchanging: Callable[[], bool],
        moved: Callable[[], int],
        patience: float,
    ) -> None:
        self.now = now
        self._exchanging = exchanging
        self._moved = moved
        self._patience = patience
        self._looked_at = float("-inf")
        self._busy = False
        self._credit = 0.0
        self._sent = 0  # by background streams
        self._mark = 0  # bytes of everything else at the last look

    def flow(self) -> Flow:
        """For a new background stream."""
        return Flow(self)

    def pause(self, last: float, nbytes: int) -> float:
        """Seconds after which a stream that has sent its last message at ``last`` may ask again; 0: it sends
        the next one, of ``nbytes``, now."""
        now = self.now()
        self._look(now)
        if self._busy:
            left = last + self._patience - now
            if self._credit < nbytes and left > 0:
                return min(POLL_SECONDS, left)
            self._credit = max(0.0, self._credit - nbytes)
        self._sent += nbytes
        return 0.0

    def _look(self, now: float) -> None:
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        others = self._moved() - self._sent
        busy = self._exchanging()
        if busy and self._busy:
            self._credit = min(self._credit + SHARE * max(0, others - self._mark), BURST_BYTES)
        elif busy:
            self._credit = 0.0
        self._busy, self._mark = busy, others


class Flow:
    """One background stream's place in the pacing."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self._last = pacer.now()

    def pause(self, nbytes: int) -> float:
        """Seconds to wait before asking again; 0: a message of ``nbytes`` is sent now."""
        pause = self._pacer.pause(self._last, nbytes)
        if not pause:
            self._last = self._pacer.now()
        return pause


def exchanging(run: Run) -> bool:
    """Whether contributions or results are moving at this moment."""
    now = run.now()
    return any(_moving(exchange, now) for node in run.registry.nodes.values() for exchange in node.exchanges)


def _moving(exchange: Exchange, now: float) -> bool:
    if exchange.served or exchange.refusal is not None:
        return False
    delivering = exchange.result is not None and exchange.result.committed
    return now - exchange.progress_at < (BLOCKED_SECONDS if delivering else QUIET_SECONDS)
