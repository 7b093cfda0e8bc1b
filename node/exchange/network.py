"""The network thread: the one thread of a process that runs an event loop, and how others call into it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from node.exchange.base import ExchangeError
from protos.allocator import keep_freed_memory

T = TypeVar("T")

_START_SECONDS: Final = 10.0
LOOK_SECONDS: Final = 1.0  # a signal that comes just before a wait is only seen after it
_STOP_SECONDS: Final = 5.0


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where it is installed (not on Windows), else asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class NetworkThread:
    """An event loop in a daemon thread that runs while it has users.

    The loop is stopped with its last user but never closed: grpc.aio may still deliver to it from the
    completion queue that all loops of a process share.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        keep_freed_memory()
        self._loop = new_event_loop()
        self._loop.set_exception_handler(_quiet)
        self._lock = threading.Lock()
        self._users = 0
        self._thread: threading.Thread | None = None

    def open(self) -> NetworkThread:
        """Add a user; the first one starts the thread.

        Raises:
            ExchangeError: it did not start.
        """
        with self._lock:
            if not self._users:
                running = threading.Event()
                self._loop.call_soon(running.set)
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
                if not running.wait(_START_SECONDS):
                    raise ExchangeError(
                        f"the network thread did not start in {_START_SECONDS:g} s: the host is overloaded"
                    )
            self._users += 1
        return self

    def close(self) -> None:
        """Remove a user; the last one cancels whatever still runs and ends the thread."""
        with self._lock:
            self._users -= 1
            if not self._users and self._thread is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_STOP_SECONDS)
                self._thread = None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks, timeout=_STOP_SECONDS))

    def call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        """Run ``work`` in the network thread and wait for it here; Ctrl-C ends the wait and the work.

        Raises:
            ExchangeError: it took longer than ``seconds`` (the text names ``what``), or was cancelled.
            Exception: whatever ``work`` raises.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        deadline = time.monotonic() + seconds
        try:
            while (left := deadline - time.monotonic()) > LOOK_SECONDS:
                concurrent.futures.wait([future], LOOK_SECONDS)
                if future.done():
                    break
            return future.result(max(0.0, left))
        except concurrent.futures.TimeoutError:
            if future.done() and not future.cancelled():
                raise  # raised by the work itself
            raise ExchangeError(f"{what} took longer than {seconds:.3g} s") from None
        except concurrent.futures.CancelledError:
            raise ExchangeError(f"{what} was cut short: the exchange has been closed") from None
        finally:
            future.cancel()

    def soon(self, action: Callable[[], object]) -> None:
        """Run ``action`` in the network thread without waiting."""
        with contextlib.suppress(RuntimeError):  # at interpreter exit
            self._loop.call_soon_threadsafe(action)


@functools.lru_cache(maxsize=1)
def process_network() -> NetworkThread:
    """The process's own: grpc.aio wants one loop a process."""
    return NetworkThread("atoll-network")


def _quiet(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # grpc.aio wakes every loop of the process for an event of one; the loop that comes second reads nothing
    # and gets BlockingIOError, which is harmless (grpc issue 42357).
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
