"""Moments of a run: the events of all its processes, from their logs, by time."""

from __future__ import annotations

import datetime
import heapq
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator import events as of_coordinator
from deploy.errors import UserError
from deploy.event_log import Event, read_lines
from node import events as of_node

_BEGINNING: Final = (of_coordinator.RoundOpened, of_coordinator.RoundCommitted, of_node.RoundDone)
_END: Final = (of_coordinator.RoundCommitted, of_coordinator.NodeReported, of_node.RoundDone)


@dataclass(frozen=True)
class Moment:
    """An event: when (seconds since 1970) and whose."""

    at: float
    who: str
    event: Event


def read_moments(paths: Sequence[Path], note: Callable[[str], None]) -> list[Moment]:
    """The events of all logs by time; those of one log stay in its order.

    Args:
        paths: of the logs.
        note: gets sentences about lines and events that are left out.

    Raises:
        UserError: a file is no log of events, or of an older version.
        OSError: a file cannot be read.
    """
    return list(heapq.merge(*(_moments(path, note) for path in paths), key=lambda moment: moment.at))


def _moments(path: Path, note: Callable[[str], None]) -> Iterator[Moment]:
    unknown, newest = Counter[str](), -math.inf
    for line in read_lines(path, note):
        event = line.event()
        if event is None:
            unknown[line.kind] += 1
            continue
        if not math.isfinite(line.at):
            raise UserError(
                f"{path}: line {line.number} does not say when it was written; the process that wrote it has "
                "an older version of Atoll"
            )
        newest = max(newest, line.at)  # a clock may have been set back: the order of the file counts
        yield Moment(newest, line.who or path.stem, event)
    if unknown:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
        note(f"{path}: events that this version does not know are left out: {kinds}")


def cut(moments: Sequence[Moment], start: str | None, end: str | None) -> tuple[int, int]:
    """Where the wanted part begins and ends (exclusive).

    ``start`` and ``end`` are each a round, counted from 1, or a time (UTC): ``12:00:01``, of the day on which
    the logs begin, or ``2026-05-01T12:00:01``.

    Raises:
        UserError: that is neither, or nothing is in between.
    """
    first = 0 if start is None else _first(moments, start)
    last = len(moments) if end is None else _last(moments, end)
    if first >= last:
        known = [moment.event.round + 1 for moment in moments if isinstance(moment.event, _BEGINNING)]
        if not moments:
            raise UserError("there is nothing to show: the logs hold no events")
        rounds = f" and hold rounds {min(known)} to {max(known)}" if known else ""
        span = f"{utc(moments[0].at):%H:%M:%S} to {utc(moments[-1].at):%H:%M:%S}"
        raise UserError(f"there is nothing to show: the logs go from {span}{rounds}")
    return first, last


def _first(moments: Sequence[Moment], text: str) -> int:
    if text.isdecimal():
        wanted = (isinstance(m.event, _BEGINNING) and m.event.round + 1 >= int(text) for m in moments)
    else:
        at = _time(text, moments)
        wanted = (moment.at >= at for moment in moments)
    return next((index for index, found in enumerate(wanted) if found), len(moments))


def _last(moments: Sequence[Moment], text: str) -> int:
    if text.isdecimal():
        found = [i for i, m in enumerate(moments) if isinstance(m.event, _END) and m.event.round < int(text)]
        return found[-1] + 1 if found else 0
    at = _time(text, moments)
    return next((index for index, moment in enumerate(moments) if moment.at > at), len(moments))


def _time(text: str, moments: Iterable[Moment]) -> float:
    begin = next(iter(moments), None)
    day = f"{utc(begin.at):%Y-%m-%d}T" if begin and re.fullmatch(r"\d\d?:\d\d(:\d\d(\.\d+)?)?", text) else ""
    whole = re.sub(r"T(\d):", r"T0\1:", (day + text).strip().replace(" ", "T").removesuffix("Z"))
    whole = re.sub(r"\.(\d{1,6})\d*$", lambda digits: "." + digits[1].ljust(6, "0"), whole)
    try:
        return datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.timezone.utc).timestamp()
    except ValueError:
        raise UserError(
            f"{text!r} is neither a round nor a time: write for example 12, 12:00:01 or, in UTC as well, "
            "2026-05-01T12:00:01"
        ) from None


def utc(at: float) -> datetime.datetime:
    """Seconds since 1970 as a date."""
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc)
