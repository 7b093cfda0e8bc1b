"""What the links of a node can carry, as far as its transfers have shown.

A transfer says little: it may be short enough to fit into the buffers on its way, and it may have waited for
the other side. So small and short ones do not count, and the best of the last ones does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from node.exchange.meter import Direction

LEAST_BYTES: Final = 1 << 20  # less fits into the buffers of sockets
LEAST_SECONDS: Final = 0.2
CUT_SECONDS: Final = 5.0  # a longer span counts in parts, so that a pause within it does not hide the rest
SPANS: Final = 16  # that are looked back on


class _Span:
    """Of one direction: from when something moves to when nothing does."""

    def __init__(self) -> None:
        self.moving = 0  # transfers
        self.started_at = 0.0
        self.nbytes = 0
        self.rates: deque[float] = deque(maxlen=SPANS)

    def restart(self, now: float) -> None:
        self.started_at, self.nbytes = now, 0

    def close(self, now: float) -> bool:
        """Let it count, if it is large and long enough."""
        seconds = now - self.started_at
        if self.nbytes < LEAST_BYTES or seconds < LEAST_SECONDS:
            return False
        self.rates.append(self.nbytes / seconds)
        return True


class Rates:
    """Estimates of uplink and downlink. Used in the network thread alone.

    Args:
        now: seconds on a monotonic clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._spans: dict[Direction, _Span] = {"up": _Span(), "down": _Span()}

    @property
    def uplink(self) -> float | None:
        """Bytes per second; ``None``: not known."""
        return max(self._spans["up"].rates, default=None)

    @property
    def downlink(self) -> float | None:
        """Bytes per second; ``None``: not known."""
        return max(self._spans["down"].rates, default=None)

    @contextmanager
    def moving(self, direction: Direction) -> Iterator[None]:
        """Meanwhile something moves in ``direction``, and all of it is there to be moved: a wait for what has
        still to be computed counts as a slow link.

        Transfers at the same time share the link: they are one span, from the beginning of the first to the
        end of the last.
        """
        span = self._spans[direction]
        if not span.moving:
            span.restart(self._now())
        span.moving += 1
        try:
            yield
        finally:
            span.moving -= 1
            if not span.moving:
                span.close(self._now())

    def add(self, direction: Direction, nbytes: int) -> None:
        """So many bytes have moved; they count while something is :meth:`moving`."""
        span = self._spans[direction]
        if not span.moving:
            return
        span.nbytes += nbytes
        now = self._now()
        if now - span.started_at >= CUT_SECONDS and span.close(now):
            span.restart(now)
