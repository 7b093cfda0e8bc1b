"""A call of an exchange that goes on in a thread of its own while the caller computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

from node.exchange.network import LOOK_SECONDS

T = TypeVar("T")


class InFlight(Generic[T]):
    """Starts ``call`` at once; :meth:`result` waits for it.

    Whoever waits may be interrupted and never come back: the thread ends with the call, which ends when the
    exchange is closed, and does not keep the process alive.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._future: Future[T] = Future()
        self._call = call
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._future.set_result(self._call())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> T:
        """What the call returned, or raised; its deadline is the call's own."""
        while not self._future.done():
            wait([self._future], LOOK_SECONDS)
        return self._future.result()
