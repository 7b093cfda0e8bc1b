"""How far a node is with the rounds that it catches up with, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from node.events import Listener, Notice, Replayed

PROGRESS_SECONDS: Final = 5.0  # between two notices


class ReplayProgress:
    """Of one replay.

    Args:
        first: the first round that is applied.
        end: the one behind the last.
        clock: seconds.
        on_event: is told.
    """

    def __init__(self, first: int, end: int, clock: Callable[[], float], on_event: Listener) -> None:
        self._first, self._end = first, end
        self._clock, self._on_event = clock, on_event
        self._done = self._nbytes = 0
        self._began = self._told = clock()

    def applied(self, nbytes: int) -> None:
        """The next round has been applied; its result had so many bytes."""
        self._done += 1
        self._nbytes += nbytes
        now, left = self._clock(), self._end - self._first - self._done
        if left and now - self._told >= PROGRESS_SECONDS:
            self._told = now
            seconds = left * (now - self._began) / self._done
            self._on_event(
                Notice(
                    f"catching up: {self._done} of {self._end - self._first} rounds are applied, the others "
                    f"take about {seconds:.0f} s"
                )
            )

    def end(self) -> None:
        """All have been applied."""
        self._on_event(Replayed(self._first, self._done, self._nbytes, self._clock() - self._began))
