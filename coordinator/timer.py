"""The coordinator's clock: one monotonic source for every deadline, replaceable by a virtual one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Alarm(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Forget it; harmless when it has already been made."""
        ...


class Timer(Protocol):
    """Monotonic seconds and calls in the future, made on the event loop's thread."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes backwards."""
        ...

    def call_at(self, when: float, callback: Callable[[], None]) -> Alarm:
        """Call ``callback`` once when :meth:`now` has reached ``when``."""
        ...


class LoopTimer:
    """``time.monotonic``, with calls made by the event loop (whose own clock may tick in milliseconds)."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()

    def now(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()

    def call_at(self, when: float, callback: Callable[[], None]) -> Alarm:
        """Schedule on the loop."""
        return self._loop.call_later(max(0.0, when - time.monotonic()), callback)
