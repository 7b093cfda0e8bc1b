"""Retry: trying again with growing pauses, for a bounded time, saying what is waited for."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from node.exchange.trouble import Kind, Trouble

T = TypeVar("T")

SAY_SECONDS: Final = 10.0  # between two sentences about one wait

Say = Callable[[str], None]


@dataclass(frozen=True)
class Backoff:
    """Pauses between attempts: exponential, with half of each drawn at random so that nodes spread out."""

    first: float = 0.5  # seconds
    factor: float = 2.0
    cap: float = 10.0  # seconds

    def pause(self, failures: int, uniform: float) -> float:
        """Seconds to wait after ``failures`` failures in a row (1, 2, ...), given a draw from [0, 1)."""
        full = min(self.cap, self.first * self.factor ** min(failures - 1, 60))
        return full * (0.5 + 0.5 * uniform)


@dataclass(frozen=True)
class Timing:
    """Clock, sleep and randomness of the network side, replaceable in tests."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    uniform: Callable[[], float] = random.random
    backoff: Backoff = field(default_factory=Backoff)


class Patience:
    """One span of waiting: counts failures, paces attempts, and ends after ``seconds``.

    Args:
        what: what is waited for, as in "waiting for {what}".
        seconds: how long in all, from the first failure on.
        timing: clock, sleep, randomness.
        say: receives a sentence before the first pause, and every :data:`SAY_SECONDS` from then on.
    """

    def __init__(self, what: str, seconds: float, timing: Timing, say: Say) -> None:
        self._what = what
        self._seconds = seconds
        self._timing = timing
        self._say = say
        self._failures = 0
        self._since = self._said = timing.now()

    def reset(self) -> None:
        """Something went well: the next failure starts a new span."""
        self._failures = 0

    async def endure(self, trouble: Trouble) -> None:
        """Pause before the next attempt.

        Raises:
            Trouble: ``trouble`` itself if trying again cannot help; one of its kind that tells how long was
                waited once the span is over.
        """
        if not trouble.passing:
            raise trouble
        if not self._failures:
            self._since = self._timing.now()
        self._failures += 1
        left = self._since + self._seconds - self._timing.now()
        if left <= 0:
            times = "once" if self._failures == 1 else f"{self._failures} times"
            raise Trouble(
                trouble.kind, f"gave up on {self._what} after {self._seconds:.3g} s, tried {times}: {trouble}"
            ) from trouble
        pause = min(self._timing.backoff.pause(self._failures, self._timing.uniform()), left)
        now = self._timing.now()
        if self._failures == 1 or now - self._said >= SAY_SECONDS:
            self._said = now
            self._say(
                f"waiting for {self._what}: {trouble}; trying again in {pause:.2g} s, {left:.0f} s left"
            )
        await self._timing.sleep(pause)


async def persist(attempt: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Repeat ``attempt`` until it succeeds or ``patience`` ends.

    Raises:
        Trouble: see :meth:`Patience.endure`.
    """
    while True:
        try:
            return await attempt()
        except Trouble as trouble:
            await patience.endure(trouble)


class Steps:
    """A deadline that has a name for each of many steps: like :func:`within` around each, with one timer for
    all of them.

    Attributes:
        over: raises Trouble of kind SILENT once a step has taken too long.

    Args:
        seconds: for a step.
        what: takes so long.
    """

    def __init__(self, seconds: float, what: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds, self._what = seconds, what
        self._since: float | None = None
        self._timer = self._loop.call_later(seconds, self._look)
        self.over: asyncio.Future[None] = self._loop.create_future()
        self.over.add_done_callback(_seen)

    def begin(self) -> None:
        """A step begins."""
        self._since = self._loop.time()

    def end(self) -> None:
        """It is done."""
        self._since = None

    def close(self) -> None:
        """There are no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        left = self._seconds - (0.0 if self._since is None else now - self._since)
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.over.set_exception(too_long(self._seconds, self._what))


def too_long(seconds: float, what: str) -> Trouble:
    """What has a deadline is over it."""
    return Trouble(Kind.SILENT, f"{what} took longer than {seconds:.3g} s")


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """``work`` with a deadline that has a name.

    Raises:
        Trouble: kind SILENT, once ``seconds`` are over.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_seen)  # a failure comes too late if the time is over, or this is cancelled
    try:
        # Before Python 3.12, wait_for() loses a cancellation that comes at the moment when the work ends.
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    if not done:
        raise too_long(seconds, what)
    return task.result()


async def ended(task: asyncio.Future[T]) -> None:
    """Cancel ``task``, and wait until it has come to its end; what that is does not matter."""
    task.add_done_callback(_seen)
    task.cancel()
    if not task.done():
        await asyncio.wait({task})


def _seen(task: asyncio.Future[T]) -> None:
    """Whatever it has come to, asyncio need not complain that nobody has asked."""
    if not task.cancelled():
        task.exception()
