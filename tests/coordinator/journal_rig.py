"""Journals on disk for tests: an event loop of sorts, records that differ, a disk that fills up."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import shutil
import tempfile
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from coordinator.journal import (
    Journal,
    JournalError,
    Kept,
    NodeRecord,
    Recovered,
    RosterRecord,
    RoundRecord,
    StartRecord,
)
from coordinator.journal_file import FileJournal
from coordinator.journal_folder import JournalFolder

DEADLINE = 60.0
START = StartRecord(0, "0" * 32, 0, "d" * 64, 4096)
RUN_TOML = "[run]\nname = 'reef'\n"


class Desk:
    """Takes the callbacks of a journal's thread, and calls them where a test waits for something."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[..., object], tuple[Any, ...]]] = queue.SimpleQueue()

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        self._calls.put((function, arguments))

    def run(self, answers: list[Any], count: int = 1) -> Any:
        """Call what comes in until there are ``count`` answers; returns the last."""
        while len(answers) < count:
            function, arguments = self._calls.get(timeout=DEADLINE)
            function(*arguments)
        return answers[-1]

    def rest(self) -> None:
        """Call what has come in."""
        while not self._calls.empty():
            function, arguments = self._calls.get_nowait()
            function(*arguments)


class WholeJournal(FileJournal):
    """A journal and its folder, which is closed with it."""

    def close(self) -> None:
        super().close()
        self._folder.close()


def open_journal(folder: Path, desk: Desk, **choices: Any) -> FileJournal:
    facts = {"run_digest": "run", "table_digest": "tables", "run_toml": RUN_TOML, **choices}
    return WholeJournal(JournalFolder.open(folder, **facts), desk.post)


def payload(round_index: int, nbytes: int = 100) -> bytes:
    return np.random.default_rng(round_index).bytes(nbytes)


def round_record(round_index: int, data: bytes, **fields: Any) -> RoundRecord:
    """Round ``r`` trains 8 samples of each of two nodes, from ``16 r`` on."""
    facts: dict[str, Any] = {
        "round": round_index,
        "epoch": 3,
        "voters": ("a", "b"),
        "weights": (1, 2),
        "casting": round_index % 2,
        "nbytes": len(data),
        "digest": xxhash.xxh3_128(data).hexdigest() if data else "",
        "reason": f"all voted in round {round_index}",
        "agreement": (0.75, 1.0),
        "trained": (("a", 16 * round_index, 8), ("b", 16 * round_index + 8, 8)),
        "frontier": 16 * (round_index + 1),
        "returned": (),
        "at": 1e9 + round_index,
    }
    return RoundRecord(**{**facts, **fields})


def roster(epoch: int, *nodes: str) -> RosterRecord:
    members = tuple(NodeRecord(node, f"{node}-name", f"{index:064x}") for index, node in enumerate(nodes))
    return RosterRecord(epoch, members, len(nodes))


def commit(
    journal: Journal, desk: Desk, round_index: int, data: bytes | None = None, **fields: Any
) -> JournalError | None:
    """Commit a round and wait; the error that the journal gives."""
    data = payload(round_index) if data is None else data
    memory = fields.pop("memory", None)
    answers: list[JournalError | None] = []
    half = len(data) // 2
    pieces = [memoryview(data)[:half], memoryview(data)[half:]]
    journal.commit(round_record(round_index, data, **fields), pieces, memory, answers.append)
    return desk.run(answers)


def load(journal: Journal, desk: Desk, round_index: int) -> Kept | None:
    answers: list[Kept | None] = []
    journal.load(round_index, answers.append)
    return desk.run(answers)


def filled(folder: Path, desk: Desk, rounds: int, **choices: Any) -> FileJournal:
    """A journal with a start, a roster and some rounds."""
    journal = open_journal(folder, desk, **choices)
    journal.begin(START)
    journal.roster(roster(3, "a", "b"))
    for index in range(rounds):
        assert commit(journal, desk, index) is None
    return journal


def reopened(folder: Path, desk: Desk, **choices: Any) -> tuple[FileJournal, Recovered]:
    journal = open_journal(folder, desk, **choices)
    assert journal.recovered is not None
    return journal, journal.recovered


class Disk:
    """Opens files that take ``room`` bytes together; what would pass that is cut, then writing fails."""

    def __init__(self, room: int, code: int = errno.ENOSPC) -> None:
        self.room = room
        self.code = code

    def open(self, path: Path) -> FileIO:
        return _SmallFile(path, self)


class _SmallFile(FileIO):
    def __init__(self, path: Path, disk: Disk) -> None:
        super().__init__(path, "ab")
        self._disk = disk

    def write(self, data: Any) -> int:
        if not self._disk.room:
            raise OSError(self._disk.code, os.strerror(self._disk.code), str(self.name))
        written = super().write(memoryview(data)[: self._disk.room])
        self._disk.room -= written
        return written


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of a folder as it lies there."""
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(shutil.copytree(folder, Path(scratch) / "journal"))
