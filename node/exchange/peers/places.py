"""Places for strangers: a bounded number of streams whose callers have not shown yet who they are."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Places:
    """The one that has waited longest gives way to a new one.

    Who belongs here shows it at once, and needs a place for a moment; who does not cannot keep others out by
    taking places and waiting.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: dict[asyncio.Future[Any], None] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._tasks)

    async def hold(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What comes of ``work``, which holds a place meanwhile; ``None``: it had to give way."""
        if len(self._tasks) >= self._count:
            next(iter(self._tasks)).cancel()
            del self._tasks[next(iter(self._tasks))]
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        try:
            await asyncio.wait({task})
        finally:
            self._tasks.pop(task, None)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        return None if task.cancelled() else task.result()
