"""What a node makes of Ctrl-C and of SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Final

from node.ranks import Ranks
from node.worker import INTERRUPTED, Worker

__all__ = ["PoliteSignals", "reason_of"]

_TERMINATED: Final = "terminated by SIGTERM"


class PoliteSignals:
    """The first Ctrl-C, or SIGTERM, ends a wait at once, and a computation after its micro-step; the second
    ends anything.

    Of several ranks the leader takes them, and a computation ends after its round, as they leave and save
    together or not at all; the others wait for what it decides. torchrun also sends SIGTERM when one of them
    has failed: the leader then learns of that where it needs that rank.

    Attributes:
        first: what is to be raised once the worker has come to its end.
    """

    def __init__(self, stack: ExitStack, ranks: Ranks) -> None:
        self.first: BaseException | None = None
        self._worker: Worker | None = None
        self._ranks = ranks
        self._before: dict[int, Any] = {}
        stack.callback(self._end)
        if not ranks.rank:
            self._take(self._signalled)

    def _take(self, handler: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return  # whoever starts us has an arrangement of its own
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, handler)

    @contextmanager
    def wait_for(self, worker: Worker) -> Iterator[None]:
        """From now on it is this worker that may finish what it computes; after it nobody may."""
        self._worker = worker
        if self._ranks.rank:
            self._take(signal.SIG_IGN)
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        terminated = number == signal.SIGTERM and self._ranks.size == 1
        raised = SystemExit(128 + number) if terminated else KeyboardInterrupt()
        if self._worker is None or self._worker.waiting or self._worker.interrupted:
            raise raised
        self.first = raised
        self._worker.interrupt(reason_of(raised))


def reason_of(signalled: BaseException) -> str:
    """Why a node goes, in the words that the coordinator is told."""
    if not isinstance(signalled, KeyboardInterrupt):
        return _TERMINATED
    return str(signalled.args[0]) if signalled.args else INTERRUPTED
