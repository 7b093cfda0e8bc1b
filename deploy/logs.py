"""What a process keeps of a run by itself: its rounds as CSV, its events as JSON lines.

Whatever is wrong with the folder or the disk is told once and does not touch the training.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, TypeAlias

from deploy.errors import UserError
from deploy.event_log import Event, EventLog
from deploy.options import OFF
from node.events import Started

Listening: TypeAlias = AbstractContextManager[Callable[[Event], None]]

PARENT: Final = Path("atoll-logs")
ROUNDS: Final = "rounds.csv"
EVENTS: Final = "events.jsonl"
KEPT_BYTES: Final = 64 * 1024 * 1024  # of events, twice: one file that is full and one that fills
_HELD: Final = 1000  # events before the folder has a name


@dataclass(frozen=True)
class LogFolder:
    """Where the logs of a process go.

    Attributes:
        own: a folder that the process has anyway: of its checkpoints, or its journal.
        parent: ``None``: ``own`` if there is one, else a new folder in :data:`PARENT`;
            :data:`~deploy.options.OFF`: nowhere; else a new folder in this one.
    """

    own: Path | None = None
    parent: str | None = None

    def make(self, name: str) -> Path:
        """The folder, made. A new one is called ``name``, or ``name-2`` and so on if that is there: no two
        processes share it.

        Raises:
            OSError: it cannot be made.
        """
        if self.own is not None and self.parent is None:
            self.own.mkdir(parents=True, exist_ok=True)
            return self.own
        parent = Path(self.parent or PARENT)
        parent.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^\w.-]", "_", name).lstrip(".") or "_"
        number = 1
        while True:
            folder = parent / (name if number == 1 else f"{name}-{number}")
            try:
                folder.mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder


class KeptLogs:
    """A listener that writes the logs; a context manager that closes them and says where they are.

    The folder is made by :meth:`open`, or by a node's :class:`~node.events.Started`: events before that are
    held, and a process that does not get so far leaves nothing. Safe to call from any thread.

    Args:
        folder: where to.
        who: writes them: ``coordinator``, or the name of a node.
        say: gets the sentences for the user.
        rounds: makes what writes the CSV file at a path; ``None``: no such file.
        events: whether to write the events.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        folder: LogFolder,
        who: str,
        say: Callable[[str], None],
        *,
        rounds: Callable[[Path], Listening] | None,
        events: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._who, self._say, self._clock = folder, who, say, clock
        self._rounds, self._events = rounds, events
        self._lock = threading.RLock()
        self._held: deque[tuple[float, Event]] = deque(maxlen=_HELD)
        self._at: float | None = None  # when the event happened that is written now, if that was before
        self._stack = ExitStack()
        self._listeners: list[Callable[[Event], None]] = []
        self._opened = False
        self._where = ""

    def open(self, run: str) -> None:
        """Make folder and files; ``run`` is the name of the run."""
        with self._lock:
            self._opened = True
            if self._folder.parent != OFF and (self._rounds or self._events):
                try:
                    self._open(f"{run}-{self._who}")
                except (OSError, UserError) as error:
                    why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
                    self._say(
                        f"no logs are kept, the run goes on: {why}; give --log-dir DIR, or --log-dir off"
                    )
                    self._close()
            for at, event in self._held:
                self._at = at
                self._tell(event)
            self._at = None
            self._held.clear()

    def _open(self, name: str) -> None:
        folder = self._folder.make(name)
        names = []
        if self._rounds is not None:
            self._listeners.append(self._stack.enter_context(self._rounds(folder / ROUNDS)))
            names.append(ROUNDS)
        if self._events:
            log = EventLog(folder / EVENTS, self._who, keep=KEPT_BYTES, clock=self._time)
            self._listeners.append(self._stack.enter_context(log))
            names.append(EVENTS)
        self._where = f"logs are in {folder}: {', '.join(names)}"

    def _time(self) -> float:
        return self._clock() if self._at is None else self._at

    def __call__(self, event: Event) -> None:
        with self._lock:
            if not self._opened and isinstance(event, Started):
                self.open(event.run)
            if self._opened:
                self._tell(event)
            else:
                self._held.append((self._clock(), event))

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    def _close(self) -> None:
        self._listeners.clear()
        self._stack.close()

    def __enter__(self) -> KeptLogs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._close()
        if self._where:
            self._say(self._where)
