"""A thread for CPU work, so that the event loop is never blocked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coordinator.reducing import Pool

log = logging.getLogger(__name__)

Done = Callable[["list[bytes] | None", "BaseException | None"], None]


class ThreadPool:
    """One worker thread: jobs run in the order of their submission. Kernels release the GIL."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reducer")

    def submit(self, work: Callable[[], list[bytes]], done: Done) -> Future[list[bytes]]:
        """Run ``work``, then call ``done(outcome, error)`` on the loop; dropped if the loop has closed."""

        def finished(future: Future[list[bytes]]) -> None:
            if future.cancelled():  # the pool has been closed
                return
            error = future.exception()
            outcome = None if error else future.result()
            with suppress(RuntimeError):  # the loop has closed: nobody waits any more
                self._loop.call_soon_threadsafe(done, outcome, error)

        future = self._executor.submit(work)
        future.add_done_callback(finished)
        return future

    def close(self) -> None:
        """Wait for the running job and end the thread."""
        self._executor.shutdown(wait=True, cancel_futures=True)


def in_pool(pool: Pool, work: Callable[[], list[bytes]]) -> asyncio.Future[list[bytes]]:
    """The outcome of ``work``, which runs in the pool even if nobody waits for it any more."""
    future: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()

    def done(outcome: list[bytes] | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(outcome or [])

    pool.submit(work, done)
    return future


def in_background(pool: Pool, work: Callable[[], None]) -> None:
    """Do ``work`` in the pool for nobody: if it fails, that is logged."""

    def job() -> list[bytes]:
        work()
        return []

    def done(_: list[bytes] | None, error: BaseException | None) -> None:
        if error is not None:
            log.warning("%s", error)

    pool.submit(job, done)
