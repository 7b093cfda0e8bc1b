"""The folder of a journal: who may use it, what lies in it, and what a coordinator finds that comes again.

lock              held as long as a coordinator uses the folder; names its process
journal.sqlite    rosters, rounds, leases, digests, see coordinator.journal_tables
results/          payloads of the results, see coordinator.segments
reducer/          what the reducer carries on, see coordinator.memory_files
snapshots/        states that newcomers load, not the journal's
run.toml          the run file
tokens.json       digests of the tokens of all invites, see coordinator.token_file
where.json        how nodes reach the coordinator, for further invites
swarm-secret      what the nodes of the run share in the swarm (read by the owner alone)
certificate.pem   by which the coordinator proves who it is, and its key (likewise)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import socket
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from coordinator.journal import AdminRecord, JournalError, Recovered, RosterRecord
from coordinator.journal_errors import OTHER_FOLDER, damaged, explained
from coordinator.journal_tables import FORMAT, Tables
from coordinator.memory_files import MemoryFiles
from coordinator.ranges import Ranges, in_words
from coordinator.segments import (
    ROLL_BYTES,
    Opener,
    Place,
    SegmentError,
    Segments,
    file_name,
    open_append,
    sync_folder,
)
from coordinator.token_file import FILE as TOKENS
from coordinator.token_file import LOCK as TOKENS_LOCK
from coordinator.whole_file import write_whole
from protos.units import format_bytes

log = logging.getLogger(__name__)

DATABASE: Final = "journal.sqlite"
RESULTS: Final = "results"
REDUCER: Final = "reducer"
SNAPSHOTS: Final = "snapshots"
LOCK: Final = "lock"
RUN_FILE: Final = "run.toml"
CERTIFICATE: Final = "certificate.pem"
SWARM_SECRET: Final = "swarm-secret"
RECENT_DIGESTS: Final = 512
KEEP_BYTES: Final = 10 * 10**9  # of results
_SECRETS: Final = (SWARM_SECRET, TOKENS, CERTIFICATE)
_OURS: Final = (
    *(RESULTS, REDUCER, SNAPSHOTS, LOCK, TOKENS_LOCK),
    *_SECRETS,
    *(f"{name}.partial" for name in _SECRETS),
)


class JournalFolder:
    """An open folder: this process has its lock. Also a context manager.

    Attributes:
        path: of the folder.
        tables, segments, memories: what lies in it.
        keep_bytes: how much of results is kept, see :class:`coordinator.journal_file.FileJournal`.
        kept: rounds whose results can be loaded.
        recovered: what was found; ``None``: the run has not begun.
        administration: the administrator's orders that were found.
        forget: results before this round may go.
        ended: whether the run is done and every node knew it.
    """

    def __init__(self, path: Path, keep_bytes: int, opener: Opener) -> None:
        self.path = path
        self.keep_bytes = keep_bytes
        self._lock = _locked(path)
        try:
            _refuse_strange(path)
            for name in (RESULTS, REDUCER):
                (path / name).mkdir(exist_ok=True)
            with _reported(path):
                self.tables = Tables(path / DATABASE)
        except BaseException:
            self._lock.close()
            raise
        roll = max(1, min(ROLL_BYTES, keep_bytes // 8))
        self.segments = Segments(path / RESULTS, roll_bytes=roll, opener=opener)
        self.memories = MemoryFiles(path / REDUCER)
        self.kept = Ranges()
        self.recovered: Recovered | None = None
        self.administration = AdminRecord()
        self.forget = 0
        self.ended = False

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        run_digest: str,
        table_digest: str,
        run_toml: str,
        keep_bytes: int = KEEP_BYTES,
        opener: Opener = open_append,
    ) -> JournalFolder:
        """Open the journal of a run, or make one; blocks while it is checked and mended.

        Args:
            folder: its folder; made if it is not there.
            run_digest, table_digest: of the run file and of what travels: a folder holds one run.
            run_toml: the run file, for people.
            keep_bytes: how much of results is kept.
            opener: opens a segment for appending.

        Raises:
            JournalError: another coordinator uses it, it holds another run or is of a newer format, it is
                damaged, or it is no journal.
            OSError: the folder cannot be used.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise JournalError(f"{folder} is a file: a journal is a folder, {OTHER_FOLDER}") from None
        opened = cls(folder, keep_bytes, opener)
        try:
            with _reported(folder):
                opened._identify(run_digest, table_digest, run_toml)
                opened._recover()
        except BaseException:
            opened.close()
            raise
        return opened

    @property
    def snapshots(self) -> Path:
        """Where snapshots are kept."""
        return self.path / SNAPSHOTS

    def swarm_secret(self) -> str:
        """What the nodes of the run share in the swarm; made the first time."""
        path = self.path / SWARM_SECRET
        try:
            kept = path.read_text().strip()
        except FileNotFoundError:
            kept = ""
        if not kept:
            kept = secrets.token_urlsafe(24)
            write_whole(path, f"{kept}\n", 0o600)
        return kept

    def mark_ended(self) -> None:
        """The run is done and every node has left: nothing is to be done with this journal any more."""
        with _reported(self.path), self.tables.transaction(durable=True):
            self.tables.set_meta("ended", "1")
        self.ended = True

    def close(self) -> None:
        """Let go of all files and of the lock; harmless twice."""
        self.segments.close()
        with contextlib.suppress(sqlite3.Error):
            self.tables.close()
        self._lock.close()

    def __enter__(self) -> JournalFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------- opening

    def _identify(self, run_digest: str, table_digest: str, run_toml: str) -> None:
        tables = self.tables
        if not tables.created:
            tables.create({"format": str(FORMAT), "run": run_digest, "tables": table_digest})
            write_whole(self.path / RUN_FILE, run_toml, 0o644)
            sync_folder(self.path)
            return
        meta = tables.meta()
        if int(meta.get("format", 0)) > FORMAT:
            raise JournalError(
                f"the journal in {self.path} has format {meta['format']}, written by a newer Atoll than "
                f"this, which knows format {FORMAT}: update Atoll, or {OTHER_FOLDER}"
            )
        if meta.get("run") != run_digest:
            raise JournalError(
                f"the journal in {self.path} is of another run, that of {self.path / RUN_FILE}: "
                f"{OTHER_FOLDER}, or start the coordinator with that run file to go on with it"
            )
        if meta.get("tables") != table_digest:
            raise JournalError(
                f"the journal in {self.path} is of this run file, but this Atoll lays results out otherwise "
                f"than the one that wrote it: go on with that version of Atoll, or {OTHER_FOLDER}"
            )
        if problem := tables.problem():
            raise damaged(self.path, problem)
        self.forget = int(meta.get("forget", 0))
        self.ended = "ended" in meta
        tables.upgrade()

    def _recover(self) -> None:
        notes = self._mend_results()
        self.kept = Ranges(self.tables.kept())
        self.administration = self.tables.administration()
        start, stored = self.tables.start(), self.tables.memories()
        self.memories.keep(frozenset(round_index for round_index, _ in stored))
        if start is None:
            return
        index, skips = self.tables.last_round(), self.tables.skips()
        row = None if index is None else self.tables.round(index)
        last = None if row is None else row.record
        rounds, samples = [start.round], [start.samples]
        if last is not None:
            rounds.append(last.round + 1)
            samples.append(last.frontier)
        following = max(rounds + [end for _, end, _ in skips])
        memory = self.memories.load(*stored[0]) if stored else {}
        if memory is None:
            notes.append(
                f"the reducer's memory after round {stored[0][0] + 1} is damaged: it starts afresh, and what "
                "encoding lost in that round is not made up for"
            )
        self.recovered = Recovered(
            start=start,
            round=following,
            last=last if last is not None and last.round + 1 == following else None,
            roster=next(self.tables.rosters(), RosterRecord(0, (), 0)),
            trained=self.tables.trained(),
            samples=max(samples + [behind for _, _, behind in skips]),
            digests=dict(self.tables.digests(following - RECENT_DIGESTS)),
            memory=memory or {},
            notes=tuple(notes),
        )

    def _mend_results(self) -> list[str]:
        """Bring segments and rows together again; returns what was found, in words.

        Of the newest segment every record is read, of the others only the sizes: what is damaged there is
        found when it is loaded.
        """
        segments, ends, notes = self.segments, self.tables.segment_ends(), []
        for segment in [number for number in segments.sizes if number not in ends]:
            notes += _cut(segment, segments.sizes[segment])
            segments.drop(segment)
        lost: list[int] = []
        for segment, end in ends.items():
            size, records = segments.sizes.get(segment, 0), self.tables.records_of(segment)
            if segment == max(ends):
                damaged = {index for index, place in records if not self._readable(index, place)}
                whole = max((place.end for index, place in records if index not in damaged), default=0)
                lost += damaged
                if size > whole:
                    notes += _cut(segment, size - whole)
                    segments.cut(segment, whole)
            elif size < end:
                lost += [index for index, place in records if place.end > size]
        if lost:
            with self.tables.transaction(durable=True):
                self.tables.lose(lost)
            rounds = f"round{'s' * (len(lost) > 1)} {in_words(Ranges((index, index + 1) for index in lost))}"
            notes.append(f"damaged results: {rounds}; who has not got them loads a later state")
        return notes

    def _readable(self, index: int, place: Place) -> bool:
        try:
            self.segments.read(index, place)
        except SegmentError as error:
            log.debug("%s", error)
            return False
        return True


def _cut(segment: int, nbytes: int) -> list[str]:
    """That bytes were removed: what a coordinator wrote last before it was killed, or what is damaged."""
    if not nbytes:
        return []
    return [f"{format_bytes(nbytes)} that are no whole result were cut from {RESULTS}/{file_name(segment)}"]


@contextlib.contextmanager
def _reported(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise explained(folder, error) from error


def _locked(folder: Path) -> IO[str]:
    """Take the lock and write this process into it."""
    file = open(folder / LOCK, "a+", encoding="utf-8")  # noqa: SIM115 - the lock lasts as long as it is open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read(200).strip() or "of which it is not known which"
        file.close()
        raise JournalError(
            f"the journal in {folder} is in use by another coordinator, {holder}: stop that one first, or "
            f"{OTHER_FOLDER}"
        ) from None
    except OSError as error:
        file.close()
        raise JournalError(
            f"{folder / LOCK} cannot be locked: {error.strerror or error}; put the journal on a disk of this "
            "machine with --journal"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def _refuse_strange(folder: Path) -> None:
    """Raise :class:`JournalError` for a folder with other things in it, and no journal."""
    if (folder / DATABASE).exists():
        return
    strange = sorted({path.name for path in folder.iterdir()} - set(_OURS))
    if strange:
        raise JournalError(
            f"{folder} is no journal, it holds {strange[0]!r}: name an empty or a new folder with --journal"
        )
