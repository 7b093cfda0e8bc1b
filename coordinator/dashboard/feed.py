"""The feed: snapshots from the run's loop to readers on other threads, and their orders back."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

from coordinator.administration import Answer
from coordinator.dashboard.snapshot import Snapshot

log = logging.getLogger(__name__)

SECONDS: Final = 1.0  # between two snapshots while somebody looks
OVER: Final = Answer(False, "the coordinator is ending")


class Feed:
    """Makes snapshots while it has readers; without any it costs the run nothing.

    Args:
        loop: of the run.
        take: makes a snapshot, on that loop.
        seconds: between two.

    Attributes:
        latest: the newest snapshot, readable from any thread; ``None`` before the first.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, take: Callable[[], Snapshot], seconds: float = SECONDS
    ) -> None:
        self.latest: Snapshot | None = None
        self._loop = loop
        self._take = take
        self._seconds = seconds
        self._lock = threading.Lock()
        self._readers = 0
        self._timer: asyncio.TimerHandle | None = None
        self._failed = False

    # -------------------------------------------------------------------------------------- from any thread

    def open(self) -> None:
        """One more reader."""
        with self._lock:
            self._readers += 1
            first = self._readers == 1
        if first:
            self._post(self._begin)

    def close(self) -> None:
        """One reader less."""
        with self._lock:
            self._readers -= 1

    def order(self, action: Callable[[], Answer]) -> Future[Answer]:
        """Carry out an administrator's order on the run's loop; the answer of a run that ends meanwhile says
        so."""
        answer: Future[Answer] = Future()

        def carry_out() -> None:
            try:
                answer.set_result(action())
            except Exception as error:
                log.exception("an order of the dashboard")
                answer.set_result(Answer(False, f"a defect of the coordinator: {error!r}; please report it"))
            self._look()

        if not self._post(carry_out):
            answer.set_result(OVER)
        return answer

    def _post(self, action: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # it has closed
            return False
        return True

    def stop(self) -> None:
        """Make no more snapshots."""
        with self._lock:
            self._readers = 0
        self._post(self._end)

    # ------------------------------------------------------------------------------------ on the run's loop

    def _begin(self) -> None:
        if self._timer is None:
            self._tick()

    def _tick(self) -> None:
        self._timer = None
        if self._readers > 0:
            self._look()
            self._timer = self._loop.call_later(self._seconds, self._tick)

    def _look(self) -> None:
        try:
            self.latest = self._take()
        except Exception:  # whoever looks on must not disturb the run
            if not self._failed:
                log.exception("the dashboard cannot show the run")
            self._failed = True

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
