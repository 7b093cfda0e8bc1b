"""Rates of what passes the links, from their counters over the last seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from deploy.testbed.network import Counters, Network
from deploy.testbed.view import Flow

WINDOW_SECONDS: Final = 2.0
LOOK_SECONDS: Final = 0.5  # between two looks at the counters


class Flows:
    """Looks at the counters of all links now and then; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seen: deque[tuple[float, dict[str, Counters]]] = deque()

    def add(self, network: Network) -> None:
        """Look, if the last look is old enough."""
        now = self._clock()
        if self._seen and now - self._seen[-1][0] < LOOK_SECONDS:
            return
        self._seen.append((now, network.counters()))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()

    def flow(self, network: Network, name: str) -> Flow:
        """Of one link."""
        if not self._seen:
            return Flow(network.state(name), 0, 0, 0.0, 0.0)
        (begin, first), (end, last) = self._seen[0], self._seen[-1]
        moved, seconds = last[name].since(first[name]), max(end - begin, 1e-9)
        return Flow(
            network.state(name),
            last[name].sent,
            last[name].received,
            8 * moved.sent / seconds,
            8 * moved.received / seconds,
        )
