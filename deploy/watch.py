"""Following a run until it ends: a view that stays in place on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.live import Live

from deploy.status import StatusError, plain
from deploy.table import present, progress_line, status_view
from protos import atoll_pb2 as pb

ENDED = ("done", "failed")
MISSES = 3  # unanswered looks in a row before the coordinator counts as gone


class Source(Protocol):
    """Where the status comes from."""

    def fetch(self) -> pb.StatusReply:
        """The current status; raises :class:`StatusError`."""
        ...


def changes(
    source: Source, every: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[pb.StatusReply]:
    """Statuses ``every`` seconds, the last one being that of a run that has ended.

    Raises:
        StatusError: the first look fails, or :data:`MISSES` in a row do.
    """
    reply, misses = source.fetch(), 0
    yield reply
    while reply.phase not in ENDED:
        sleep(every)
        try:
            reply, misses = source.fetch(), 0
        except StatusError:
            misses += 1
            if misses >= MISSES:
                raise
            continue
        yield reply


def follow(
    source: Source,
    console: Console,
    every: float,
    as_json: bool = False,
    sleep: Callable[[float], None] = time.sleep,
) -> pb.StatusReply:
    """Show the run until it ends and return its last status.

    Raises:
        StatusError: as :func:`changes`.
    """
    last = pb.StatusReply()
    live = console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False) if live else contextlib.nullcontext() as view:
        for reply in changes(source, every, sleep):
            if isinstance(view, Live):
                view.update(status_view(reply), refresh=True)
            elif as_json:
                console.out(json.dumps(plain(reply), allow_nan=False), highlight=False)
            elif (reply.round, reply.phase, present(reply)) != (last.round, last.phase, present(last)):
                console.out(progress_line(reply), highlight=False)
            last = reply
    return last
