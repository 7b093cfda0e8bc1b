"""Background streams, of snapshots and past results, give way to the rounds that are running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from coordinator.exchange import Exchange
    from coordinator.run import Run

SHARE: Final = 0.05  # of the bytes of a round that is being exchanged
KEEP_UP: Final = 1.5  # results that reach a node that replays them while a round is exchanged
BURST_BYTES: Final = 4 << 20  # that may be saved up of that share
POLL_SECONDS: Final = 0.05  # between two looks at the rounds
LOOK_SECONDS: Final = 0.02  # for which a look holds, whoever asks
QUIET_SECONDS: Final = 0.5  # without a message: nothing is being exchanged, as far as one stream goes
BLOCKED_SECONDS: Final = 5.0  # the same for a receiver of a committed result, whose link may be thin


class Pacer:
    """Shares a coordinator's links between rounds and background streams.

    As long as nothing of a round moves, background streams run free. Meanwhile they send at most
    :data:`SHARE` of what the round moves, and each of them a message every ``patience``: they never starve,
    also where a round is never at rest. There a node that replays results would fall behind for ever: the one
    that is nearest to its goal is sent more of them than rounds are added, and after it the next.

    Args:
        now: seconds on the coordinator's clock.
        exchanging: whether a round's contributions or results are moving.
        moved: bytes of all streams so far, these included.
        members: how many nodes send a contribution and receive a result in a round.
        patience: seconds.
    """

    def __init__(
        self,
        *,
        now: Callable[[], float],
        exchanging: Callable[[], bool],
        moved: Callable[[], int],
        members: Callable[[], int],
        patience: float,
    ) -> None:
        self.now = now
        self._exchanging = exchanging
        self._moved = moved
        self._members = members
        self._patience = patience
        self._replays: list[Flow] = []
        self._looked_at = float("-inf")
        self._busy = False
        self._credit = 0.0
        self._sent = 0  # by background streams
        self._mark = 0  # bytes of everything else at the last look

    @contextlib.contextmanager
    def flow(self, replayed: int | None = None) -> Iterator[Flow]:
        """For a background stream; of results, if it begins with that of a round ``replayed``."""
        flow = Flow(self, replayed)
        if replayed is not None:
            self._replays.append(flow)
        try:
            yield flow
        finally:
            if replayed is not None:
                self._replays.remove(flow)

    def pause(self, flow: Flow, nbytes: int) -> float:
        """Seconds after which a stream may ask again; 0: it sends the next message, of ``nbytes``, now."""
        now = self.now()
        self._look(now)
        if self._busy and not self._falls_behind(flow):
            left = flow.last + self._patience - now
            if self._credit < nbytes and left > 0:
                return min(POLL_SECONDS, left)
            self._credit = max(0.0, self._credit - nbytes)
        self._sent += nbytes
        return 0.0

    @property
    def others(self) -> int:
        """Bytes of everything else so far."""
        return self._moved() - self._sent

    def _falls_behind(self, flow: Flow) -> bool:
        """Whether the first of those who replay has been sent less than is added by the rounds."""
        if flow is not max(self._replays, key=lambda other: other.replayed or 0, default=None):
            return False
        each_way = (self.others - flow.began) / (2 * max(1, self._members()))
        return flow.sent < KEEP_UP * each_way

    def _look(self, now: float) -> None:
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        others = self.others
        busy = self._exchanging()
        if busy and self._busy:
            self._credit = min(self._credit + SHARE * max(0, others - self._mark), BURST_BYTES)
        elif busy:
            self._credit = 0.0
        self._busy, self._mark = busy, others


class Flow:
    """One background stream's place in the pacing.

    Attributes:
        replayed: the first round whose result it carries, ``None``: it carries something else.
        began: bytes of everything else at its beginning.
        last: when its last message was sent.
        sent: bytes so far.
    """

    def __init__(self, pacer: Pacer, replayed: int | None) -> None:
        self._pacer = pacer
        self.replayed = replayed
        self.began = pacer.others
        self.last = pacer.now()
        self.sent = 0

    def pause(self, nbytes: int) -> float:
        """Seconds to wait before asking again; 0: a message of ``nbytes`` is sent now."""
        pause = self._pacer.pause(self, nbytes)
        if not pause:
            self.last = self._pacer.now()
            self.sent += nbytes
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
