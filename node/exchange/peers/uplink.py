"""What leaves a node first: its contributions, then what it has reduced."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

HOLD_SECONDS: Final = 0.1  # without a chunk of a contribution that has been taken


class Uplink:
    """Nobody can make a result before the last contribution to it has come: chunks of results that share the
    link with contributions make all of them late.

    A reducer that takes no contribution holds up no result for longer than :data:`HOLD_SECONDS`.
    """

    def __init__(self) -> None:
        self._sending = 0
        self._taken = 0  # chunks
        self._changed = asyncio.Event()

    @contextmanager
    def sending(self) -> Iterator[None]:
        """A contribution is on its way that waits for nothing but the link."""
        self._sending += 1
        try:
            yield
        finally:
            self._sending -= 1
            self.moved()
            self._changed.set()

    def moved(self) -> None:
        """A chunk of a contribution has been taken."""
        self._taken += 1

    async def turn(self) -> None:
        """Wait with a result's frame as long as contributions move."""
        loop = asyncio.get_running_loop()
        while self._sending:
            taken = self._taken
            self._changed.clear()
            timer = loop.call_later(HOLD_SECONDS, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
            if taken == self._taken:
                return
