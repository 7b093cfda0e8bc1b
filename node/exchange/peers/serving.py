"""Serving streams: the tasks of a carrier, and a handler's way from the first message to the stream's end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from node.exchange.peers.base import Handler, PeerStream
from node.exchange.retry import within
from node.exchange.trouble import Trouble

log = logging.getLogger(__name__)

DRAIN_SECONDS: Final = 10.0  # for a caller to end its direction after the handler has returned


class TaskSet:
    """Tasks that nobody waits for: held, for asyncio holds them weakly, and ended together.

    Attributes:
        closed: nothing is started any more.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        """Run ``work``, which raises nothing."""
        if self.closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel all of them and wait for their ends."""
        self.closed = True
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)


async def serve(stream: PeerStream, handler: Handler, drain: float = DRAIN_SECONDS) -> None:
    """Give ``stream`` to ``handler`` and end it after that.

    What the caller still sends is read, and dropped, for at most ``drain`` seconds, so that the handler's
    last words get through. A handler that fails breaks the stream.
    """
    try:
        await handler(stream)
        await stream.end()
        await within(drain, "the end of a stream", _drained(stream))
    except Trouble as trouble:
        log.debug("a stream of another node broke: %s", trouble)
    except Exception:
        log.exception("serving another node failed")
    finally:
        stream.cancel()


async def _drained(stream: PeerStream) -> None:
    while await stream.read() is not None:
        pass
