"""Frames that many readers share while they are still being made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protos.wire import RESTART, encode_frame


class FrameLog:
    """The frames of one attempt, in order, and who waits for more.

    Attributes:
        attempt: rises when frames that readers may have seen become void.
        frames: of this attempt.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.frames: list[bytes] = []
        self._waiters: list[asyncio.Future[None]] = []

    def restart(self) -> None:
        """Void all frames: the next ones belong to a new attempt."""
        if self.frames:
            self.attempt += 1
            self.frames = []
            self.nudge()

    def extend(self, frames: Sequence[bytes]) -> None:
        """Publish frames of the current attempt."""
        if frames:
            self.frames.extend(frames)
            self.nudge()

    def changed(self) -> asyncio.Future[None]:
        """A future that is done at the next change."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def nudge(self) -> None:
        """Let all readers look again."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class FrameReader:
    """One reader of a log, at its own pace."""

    def __init__(self, log: FrameLog) -> None:
        self._log = log
        self._attempt = 0
        self._cursor = 0

    def next(self) -> bytes | None:
        """The next frame if there is one now; RESTART where those before it have become void."""
        log = self._log
        if log.attempt != self._attempt:
            self._attempt, self._cursor = log.attempt, 0
            return encode_frame(RESTART, attempt=log.attempt)
        if self._cursor == len(log.frames):
            return None
        self._cursor += 1
        return log.frames[self._cursor - 1]
