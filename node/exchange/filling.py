"""A payload that is still being written, front to back, while its beginning is already on its way."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future


class Withdrawn(Exception):
    """What was being filled turned out to be of no use; the text is the reason."""


class Filling:
    """How far a payload has been written, and how that ended.

    One thread writes (:meth:`advance`, then :meth:`finish` in any case, also after an error: whoever sends
    the payload waits for it); any number of threads and event loops read. Bytes that are final are never
    written again before the round is over.

    Args:
        nbytes: of the whole payload.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"a payload cannot have {nbytes} bytes")
        self.nbytes = nbytes
        self._final = 0
        self._usable: bool | None = None
        self._reason = ""
        self._lock = threading.Lock()
        self._waiting: list[tuple[int, Future[None]]] = []

    # ----------------------------------------------------------------------------------- the writer

    def advance(self, nbytes: int) -> None:
        """The first ``nbytes`` bytes are final; never fewer than before.

        Raises:
            ValueError: fewer than before, or more than the payload has.
            RuntimeError: it has been finished.
        """
        with self._lock:
            if self._usable is not None:
                raise RuntimeError("a payload that has been finished grows no more")
            if not self._final <= nbytes <= self.nbytes:
                raise ValueError(
                    f"{nbytes} bytes cannot be final: {self._final} of {self.nbytes} have been before"
                )
            self._final = nbytes
        self._wake()

    def finish(self, usable: bool, reason: str = "") -> None:
        """Nothing more comes. Of the calls only the first counts.

        Args:
            usable: the whole payload is final and may be sent; else the node abstains.
            reason: why it is not usable.
        """
        with self._lock:
            if self._usable is not None:
                return
            self._usable, self._reason = usable, reason
            if usable:
                self._final = self.nbytes
        self._wake()

    # ----------------------------------------------------------------------------------- its readers

    @property
    def final(self) -> int:
        """How many bytes are final."""
        return self._final

    @property
    def finished(self) -> bool:
        """Whether :meth:`finish` has been called."""
        return self._usable is not None

    async def until(self, nbytes: int) -> int:
        """Wait until so many bytes are final (more than it has: never), or it has been finished; returns how
        many are.

        Raises:
            Withdrawn: it has been finished and is not usable.
        """
        future = self._future(nbytes)
        if future is not None:
            await asyncio.wrap_future(future)
        if self._usable is False:
            raise Withdrawn(self._reason)
        return self._final

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for the end in a thread: whether the payload is usable.

        Raises:
            concurrent.futures.TimeoutError: it did not come in ``seconds``.
        """
        future = self._future(self.nbytes + 1)
        if future is not None:
            try:
                future.result(seconds)
            except BaseException:
                future.cancel()
                raise
        return bool(self._usable)

    @property
    def reason(self) -> str:
        """Why it is not usable."""
        return self._reason

    def _future(self, nbytes: int) -> Future[None] | None:
        """What ends with the wait for ``nbytes`` bytes; ``None`` if there is nothing to wait for."""
        with self._lock:
            if self._usable is not None or self._final >= nbytes:
                return None
            future: Future[None] = Future()
            self._waiting.append((nbytes, future))
            return future

    def _wake(self) -> None:
        with self._lock:
            over = self._usable is not None
            due = [future for nbytes, future in self._waiting if over or self._final >= nbytes]
            self._waiting = [
                (nbytes, future)
                for nbytes, future in self._waiting
                if not over and self._final < nbytes and not future.cancelled()
            ]
        for future in due:
            if future.set_running_or_notify_cancel():
                future.set_result(None)
