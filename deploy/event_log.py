"""Logs of events, the same for nodes and the coordinator: one JSON object a line, written and read.

``{"time": "2026-05-01T12:00:00.123Z", "who": "node-0", "event": "RoundDone", "round": 0, …}``
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeAlias, get_args

from coordinator import events as of_coordinator
from deploy.errors import UserError
from node import events as of_node

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EventsLost:
    """Lines that could not be written before this one, for example because the disk was full."""

    count: int


Event: TypeAlias = of_node.Event | of_coordinator.Event | EventsLost

KINDS: Final[Mapping[str, type[Any]]] = {
    kind.__name__: kind for kind in (*get_args(of_coordinator.Event), *get_args(of_node.Event), EventsLost)
}


class EventLog:
    """A listener that appends each event to a file and flushes it. NaN and infinities become ``null``.

    Whatever happens to the file later, nothing is raised: the trouble is told once, what could not be written
    is counted, and the next line is tried again. Safe to call from any thread; a context manager that closes
    the file.

    Args:
        path: the file; what is there already stays.
        who: writes it; a node that has joined is called by its identity within the run.
        keep: bytes after which the file is begun anew; the full one is kept beside it, as ``NAME.1.jsonl``,
            in the place of the one before. ``None``: it grows without limit.
        clock: seconds since 1970.
        warn: gets the text about trouble.

    Raises:
        UserError: the file cannot be opened for writing.
    """

    def __init__(
        self,
        path: Path,
        who: str,
        *,
        keep: int | None = None,
        clock: Callable[[], float] = time.time,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.who = who
        self._path = path
        self._keep = keep
        self._clock = clock
        self._warn = warn
        self._lock = threading.Lock()
        self._lost = 0
        self._warned = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = _ends_within_a_line(path)
            self._file: io.FileIO = path.open("ab", buffering=0)
        except OSError as error:
            raise UserError(f"events cannot be written to {path}: {error.strerror or error}") from error

    def __call__(self, event: Event) -> None:
        with self._lock:
            if self._file.closed:  # a notice of the network thread may come after the end
                return
            if isinstance(event, of_node.Joined):
                self.who = event.node
            if self._lost and not self._write(EventsLost(self._lost)):
                self._lost += 1
                return
            self._lost = 0 if self._write(event) else 1

    def _write(self, event: Event) -> bool:
        line = b"\n" * self._torn + self._line(event)
        try:
            if self._keep is not None and self._file.tell() + len(line) > self._keep:
                self._begin_anew()
                line = line.lstrip(b"\n")
            written = self._file.write(line) or 0  # 0: a pipe that is full and does not block
        except OSError as error:
            self._trouble(error.strerror or str(error))
            return False
        if written < len(line):
            self._torn = self._torn if written == 0 else line[written - 1 : written] != b"\n"
            self._trouble("only a part of a line could be written")
            return False
        self._torn = False
        return True

    def _begin_anew(self) -> None:
        """The full file makes room for a new one, to which everything is written from now on."""
        if self._path.exists():  # not the second time, after the new one could not be opened
            self._path.replace(self._path.with_suffix(f".1{self._path.suffix}"))
        fresh = self._path.open("ab", buffering=0)
        self._file.close()
        self._file, self._torn = fresh, False

    def _line(self, event: Event) -> bytes:
        at = datetime.datetime.fromtimestamp(self._clock(), datetime.timezone.utc)
        stamp = at.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
        values = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
        line = {"time": stamp, "who": self.who, "event": type(event).__name__, **values}
        try:
            text = json.dumps(line, allow_nan=False)
        except (TypeError, ValueError):  # a path, or a number that is not finite
            text = json.dumps(_plain(line), allow_nan=False)
        return text.encode() + b"\n"

    def _trouble(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"events are being lost, the run goes on: {self._path}: {reason}")

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            try:
                self._file.close()
            except OSError as problem:  # a network file system may say only now that it is full
                self._trouble(problem.strerror or str(problem))


def _ends_within_a_line(path: Path) -> bool:
    """Whether a process was killed while it wrote the last line."""
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, io.SEEK_END)
        return file.read(1) != b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


class EventReader:
    """Reads the JSON lines of an event log as they are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """The whole lines since the last call; none while the file is not there."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return [json.loads(line) for line in data.splitlines()]


@dataclass(frozen=True)
class Line:
    """One line of a log.

    Attributes:
        number: in its file, from 1.
        kind: the event's name.
        values: all that the line holds.
    """

    number: int
    kind: str
    values: Mapping[str, Any]

    @property
    def at(self) -> float:
        """Seconds since 1970; NaN if the line does not say."""
        try:
            text = str(self.values["time"]).replace("Z", "+00:00")
            return datetime.datetime.fromisoformat(text).timestamp()
        except (KeyError, ValueError):
            return math.nan

    @property
    def who(self) -> str:
        """Whose event it is; empty if the line does not say."""
        who = self.values.get("who", "")
        return who if isinstance(who, str) else ""

    def event(self) -> Event | None:
        """The event itself; ``None`` for one that this version does not know, or that lacks something."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return None
        known = {}
        for field in dataclasses.fields(kind):
            if field.name in self.values:
                known[field.name] = _revived(self.values[field.name], str(field.type))
        try:
            made: Event = kind(**known)
        except TypeError:
            return None
        return made


def _revived(value: Any, annotation: str) -> Any:
    if value is None and annotation == "float":
        return math.nan
    if isinstance(value, list):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return Path(value) if annotation == "Path" else value


def read_lines(path: Path, skipped: Callable[[str], None] = lambda text: None) -> Iterator[Line]:
    """The lines of a log in their order. A line that its writer could not finish is left out and told.

    Args:
        path: of the log.
        skipped: gets a sentence about every line that is left out.

    Raises:
        UserError: it is no log of events.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                values = json.loads(raw)
            except ValueError:
                whole = raw.strip(b"\0\r\n ")  # a machine that lost its power may leave zeros
                if not whole or whole.startswith(b"{"):
                    skipped(f"{path}: line {number} was never finished")
                    continue
                values = None
            if not isinstance(values, dict) or not isinstance(values.get("event"), str):
                raise UserError(
                    f"{path} is no log of events: line {number} is not an event as a JSON object; give a "
                    "file that 'atoll coordinator', 'atoll join' or 'atoll train' wrote, such as events.jsonl"
                )
            yield Line(number, values["event"], values)
