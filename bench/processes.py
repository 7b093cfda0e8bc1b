"""Helper processes of a bench: started by spawn, handed over by a queue, ended with the bench."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

START_SECONDS: Final = 120.0


@contextlib.contextmanager
def started(context: Any, target: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Run ``target(*arguments, queue)`` in a process; yields the first thing it puts into the queue."""
    queue = context.Queue()
    process = context.Process(target=target, args=(*arguments, queue), daemon=True)
    process.start()
    try:
        yield queue.get(timeout=START_SECONDS)
    finally:
        end([process])


def end(processes: Sequence[Any]) -> None:
    """Give every process a moment to end by itself, then end it."""
    for process in processes:
        process.join(0.5)
        if process.is_alive():
            process.terminate()
        process.join(10)
