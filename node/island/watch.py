"""Names the transfer that does not end on a GPU, where no call of the program waits for it.

NCCL's collectives are waited for by streams. When one passes its deadline, NCCL's own watchdog ends the
process, with a message that knows an operation and its number only. So a thread looks at the transfers that
the compute stream waits for, and reports the oldest shortly before that.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

LOOK_SECONDS: Final = 1.0


class _Pending(NamedTuple):
    done: Callable[[], bool]
    end: float
    describe: Callable[[], str]


class Watch:
    """Transfers under way, in the order in which they end.

    Args:
        report: is given the text of one that is late.
        clock: monotonic seconds.
        threaded: look every second from a thread of its own; otherwise the caller does (:meth:`look`).
    """

    def __init__(
        self,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        threaded: bool = True,
    ) -> None:
        self._report, self._clock, self._threaded = report, clock, threaded
        self._pending: deque[_Pending] = deque()
        self._some = threading.Semaphore(0)
        self._started = False

    def begin(self, done: Callable[[], bool], seconds: float, describe: Callable[[], str]) -> None:
        """Watch a transfer.

        Args:
            done: whether it has ended.
            seconds: that it may take in all. It is late when nine tenths have passed, so that the report
                comes before the process is ended.
            describe: called for the report of one that is late.
        """
        self._pending.append(_Pending(done, self._clock() + 0.9 * seconds, describe))
        if self._threaded:
            self._some.release()
            if not self._started:
                self._started = True
                threading.Thread(target=self._serve, name="island-watch", daemon=True).start()

    def look(self) -> int:
        """Forget what has ended, and what is reported now; returns how many are left."""
        while self._pending and (self._pending[0].done() or self._late(self._pending[0])):
            self._pending.popleft()
        return len(self._pending)

    def _late(self, oldest: _Pending) -> bool:
        late = self._clock() >= oldest.end
        if late:
            self._report(oldest.describe())
        return late

    def _serve(self) -> None:
        while self._some.acquire():  # asleep while nothing is under way
            while self.look():
                time.sleep(LOOK_SECONDS)


WATCH: Final = Watch(lambda text: print(text, file=sys.stderr, flush=True))
