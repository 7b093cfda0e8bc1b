"""Reading a journal without touching it, also while a coordinator writes to it."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import xxhash

from coordinator.audit import Ledger, Skip
from coordinator.journal import JournalError, RoundRecord
from coordinator.journal_errors import damaged
from coordinator.journal_folder import DATABASE, RESULTS
from coordinator.journal_tables import FORMAT, Tables
from coordinator.segments import SegmentError, read_record


class JournalReader:
    """The journal in a folder as it is when this is made. Also a context manager.

    Raises:
        JournalError: there is none, its run has not begun, its format is newer, or it is damaged; iterating
            over what is in it may raise it as well.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / DATABASE
        if not path.is_file():
            raise JournalError(f"{folder} is no journal: it holds no {DATABASE}")
        with self._reported():
            self._tables = Tables(path, read_only=True)
        try:
            with self._reported():
                self._tables.snapshot()
                found = self._tables.meta()
                start = self._tables.start()
            if int(found.get("format", 0)) > FORMAT:
                raise JournalError(
                    f"the journal in {folder} has format {found['format']}, this Atoll knows format "
                    f"{FORMAT}: update Atoll"
                )
            if start is None:
                raise JournalError(f"the run of the journal in {folder} has not begun: no round is in it")
        except BaseException:
            self._tables.close()
            raise
        self.start = start

    @property
    def ledger(self) -> Ledger:
        """What an audit reads."""
        return Ledger(
            start=self.start,
            rounds=self._rounds,
            skips=[Skip(*skip) for skip in self._tables.skips()],
            rosters=self._tables.rosters(),
            digests=self._tables.digests(),
            results=self._results(),
        )

    def close(self) -> None:
        """Let go of the files."""
        self._tables.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _rounds(self) -> Iterator[RoundRecord]:
        with self._reported():
            for row in self._tables.rounds():
                yield row.record

    def _results(self) -> Iterator[tuple[int, str | None]]:
        """Read every result that is kept: see :class:`coordinator.audit.Ledger`."""
        with self._reported():
            for row in self._tables.rounds():
                record = row.record
                if row.lost:
                    yield record.round, None
                if row.place is None:
                    continue
                try:
                    payload = read_record(self.folder / RESULTS, record.round, row.place)
                except (SegmentError, OSError) as error:
                    if self._dropped_since(record.round):
                        continue
                    yield record.round, str(error)
                    continue
                whole = xxhash.xxh3_128(payload).hexdigest() == record.digest
                yield record.round, "" if whole else f"its digest is not the {record.digest} of the commit"

    def _dropped_since(self, round_index: int) -> bool:
        """Whether the coordinator has dropped a result, or begun anew, since this reader was made."""
        tables = Tables(self.folder / DATABASE, read_only=True)
        try:
            row = tables.round(round_index)
            return row is None or (row.place is None and not row.lost)
        finally:
            tables.close()

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise JournalError(f"{self.folder / DATABASE} cannot be read: {error}") from error
        except (sqlite3.DatabaseError, ValueError) as error:
            raise damaged(self.folder, str(error)) from error
