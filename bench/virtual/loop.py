"""An event loop whose time is virtual: it jumps to the next timer, so that runs are exact and take no time.

Nothing in it depends on the machine: the same coroutines with the same seeds take the same turns.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar

T = TypeVar("T")

START: Final = 1000.0  # seconds; a clock that begins with 0 would hide mistakes
TURN: Final = 1e-7  # seconds that a turn takes: who waits for less than a clock can tell goes on as well
TURNS: Final = 2_000_000  # of a loop
_INNERMOST: Final = 2  # frames of a task's stack that tell what it waits for


class Deadlock(RuntimeError):
    """Nobody can ever go on; the text names every task and where it waits."""


class OutOfTime(RuntimeError):
    """The virtual deadline has passed; the text names every task and where it waits."""


class _Clock:
    """Takes the place of a selector: there are no files, and waiting is a jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[object]:
        self._loop.jump(timeout)
        return []

    def close(self) -> None:
        """There is nothing to close."""


class VirtualLoop(base_events.BaseEventLoop):
    """See the module. ``deadline`` is the last moment, in its own seconds."""

    def __init__(self, deadline: float = float("inf")) -> None:
        super().__init__()
        self.deadline = deadline
        self._now = START
        self._turns = 0
        self._selector = _Clock(self)
        self._scheduled: list[asyncio.TimerHandle]

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def jump(self, seconds: float | None) -> None:
        """Let time pass until the next timer; ``None``: there is none.

        Raises:
            Deadlock, OutOfTime: see there.
        """
        if seconds is None:
            raise Deadlock(f"nothing will ever happen again; {self.waits()}")
        if seconds > 0:
            self._now = max(self._now, self._scheduled[0].when())  # a sum would miss it by a rounding
        else:
            self._now += TURN
        self._turns += 1
        if self._turns > TURNS:
            raise OutOfTime(f"it was not over after {TURNS:,} turns of the loop; {self.waits()}")
        if self._now > self.deadline:
            raise OutOfTime(f"it was not over at {self.deadline:g} s; {self.waits()}")

    def waits(self) -> str:
        """In words, what every task waits for."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        return "; ".join(f"{task.get_name()} waits in {_where(task)}" for task in tasks) or "no task is left"

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """At once, on this thread: threads have no virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _process_events(self, events: list[object]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody sleeps who had to be woken."""


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost lines of a suspended task, followed through what it awaits."""
    lines: list[str] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            lines.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return " > ".join(lines[-_INNERMOST:]) or "nothing"


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]], *, seconds: float = float("inf")) -> T:
    """Run ``main`` on a loop of its own, for ``seconds`` of virtual time at most.

    Raises:
        Deadlock, OutOfTime: it did not end.
    """
    loop = VirtualLoop(START + seconds)
    work = main(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.deadline = float("inf")
        loop.set_exception_handler(lambda _, context: None)
        for _ in range(8):  # what is cancelled may start something else on its way out
            left = asyncio.all_tasks(loop)
            if not left:
                break
            for task in left:
                task.cancel()
            for _ in range(16):
                loop.call_soon(lambda: None)
                loop.run_until_complete(asyncio.sleep(0))
        loop.close()
