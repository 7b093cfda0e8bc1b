"""The journal in a folder on disk.

Everything is written by one thread, in the order of the calls. A round goes to the disk in the order
reducer's memory, result, row: the row is what makes the others count, so whatever ends the process, or the
machine, in between leaves a round that is either whole or not there. Rosters, digests and the like are
transactions of their own that the next round's makes durable; they outlast the process at once.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

from coordinator.journal import (
    AdminRecord,
    Done,
    JournalError,
    Kept,
    Loaded,
    Post,
    Recovered,
    RosterRecord,
    RoundRecord,
    StartRecord,
)
from coordinator.journal_errors import explained
from coordinator.journal_folder import JournalFolder
from coordinator.ranges import Ranges
from coordinator.segments import SegmentError
from optim.mean import F32

log = logging.getLogger(__name__)

KEPT_ROUNDS: Final = 32  # the last results that are never dropped


class FileJournal:
    """A journal on disk; see :class:`coordinator.journal.Journal` for its methods.

    Results are kept up to ``keep_bytes`` of the folder: beyond that the oldest segments go, whole, as far as
    they hold only rounds before the mark of :meth:`forget`, from which on a newcomer may need them. Where
    that is not enough, rounds behind the mark go as well once results take twice ``keep_bytes``: whoever
    needs them then loads a later state. The last 32 rounds always stay. Rows are never dropped: the account
    of the samples is complete.

    After an error of the disk nothing is written any more: every commit is answered with that error.

    Args:
        folder: the open folder; its owner closes it after this journal.
        post: calls a function with arguments on the event loop, from any thread, such as
            ``loop.call_soon_threadsafe``; a RuntimeError of it says that the loop has closed.
    """

    def __init__(self, folder: JournalFolder, post: Post) -> None:
        self.recovered: Recovered | None = folder.recovered
        self.administration: AdminRecord = folder.administration
        self._folder = folder
        self._post = post
        self._kept = folder.kept
        self._begun = folder.recovered is not None
        self._next = 0 if folder.recovered is None else folder.recovered.round
        self._error: JournalError | None = None  # of the thread
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    # ---------------------------------------------------------------------------------- the loop's side

    def begin(self, start: StartRecord) -> None:
        """See :class:`Journal`."""
        self._begun, self._next, self._kept = True, start.round, Ranges()
        self._write(lambda: self._begin(start))

    def administer(self, record: AdminRecord) -> None:
        """See :class:`Journal`."""
        self.administration = record
        self._record(lambda: self._folder.tables.put_administration(record), durable=True)

    def roster(self, record: RosterRecord) -> None:
        """See :class:`Journal`."""
        self._record(lambda: self._folder.tables.put_roster(record))

    def commit(
        self, record: RoundRecord, payload: Sequence[memoryview], memory: Mapping[str, F32] | None, done: Done
    ) -> None:
        """See :class:`Journal`.

        Raises:
            ValueError: it is not the next round, or the payload is not of ``record.nbytes``.
        """
        self._check(record, payload)
        self._next = record.round + 1
        kept = self._kept

        def finished(error: JournalError | None) -> None:
            if error is None and not record.slices:
                kept.add(record.round, record.round + 1)
            done(error)

        self._write(lambda: self._commit(record, payload, memory), finished)
        self._write(lambda: self._retain(record.round + 1, kept))

    def agreed(self, round_index: int, digest: str) -> None:
        """See :class:`Journal`."""
        self._record(lambda: self._folder.tables.put_digest(round_index, digest))

    def first_kept(self, end: int) -> int:
        """See :class:`Journal`."""
        return self._kept.unbroken(end)

    def load(self, round_index: int, done: Loaded) -> None:
        """See :class:`Journal`."""
        kept = self._kept
        self._thread.submit(lambda: self._call(done, self._load(round_index, kept)))

    def forget(self, round_index: int) -> None:
        """See :class:`Journal`."""
        self._write(lambda: self._forget(round_index))

    def skipped(self, round_index: int, samples: int) -> None:
        """See :class:`Journal`.

        Raises:
            ValueError: the journal is as far as that.
        """
        first = self._next
        if not self._begun or round_index <= first:
            raise ValueError(f"round {round_index} is not ahead of the journal, whose next is {first}")
        self._next = round_index
        self._record(lambda: self._folder.tables.put_skip(first, round_index, samples), durable=True)

    def close(self) -> None:
        """See :class:`Journal`; blocks until all is written."""
        self._thread.shutdown(wait=True)

    def _check(self, record: RoundRecord, payload: Sequence[memoryview]) -> None:
        if not self._begun or record.round != self._next:
            raise ValueError(f"round {record.round} is not the next of the journal, {self._next}")
        nbytes = sum(piece.nbytes for piece in payload)
        expected = 0 if record.slices else record.nbytes
        if nbytes != expected:
            raise ValueError(f"the result of round {record.round} has {nbytes} bytes here, not {expected}")

    # -------------------------------------------------------------------------------- the thread's side

    def _write(
        self, work: Callable[[], None], finished: Callable[[JournalError | None], None] | None = None
    ) -> None:
        """Do ``work`` on the thread unless something failed before; then call ``finished`` on the loop."""

        def job() -> None:
            if self._error is None:
                self._error = self._attempt(work)
            if finished is not None:
                self._call(finished, self._error)

        self._thread.submit(job)

    def _record(self, work: Callable[[], None], *, durable: bool = False) -> None:
        """Do ``work`` as a transaction on the thread."""

        def transaction() -> None:
            with self._folder.tables.transaction(durable=durable):
                work()

        self._write(transaction)

    def _attempt(self, work: Callable[[], None]) -> JournalError | None:
        try:
            work()
        except (OSError, sqlite3.Error) as error:
            problem = explained(self._folder.path, error)
        except Exception as error:
            log.exception("the journal has failed")
            problem = JournalError(f"the journal in {self._folder.path} has failed: {error!r}")
        else:
            return None
        log.error("%s", problem)
        return problem

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has closed: nobody waits any more
            self._post(function, *arguments)

    def _begin(self, start: StartRecord) -> None:
        folder = self._folder
        with folder.tables.transaction(durable=True):
            folder.tables.begin(start)
        folder.forget, folder.ended = 0, False
        folder.segments.clear()
        folder.memories.keep(frozenset())

    def _commit(
        self, record: RoundRecord, payload: Sequence[memoryview], memory: Mapping[str, F32] | None
    ) -> None:
        folder, tables = self._folder, self._folder.tables
        digest = folder.memories.store(record.round, memory) if memory else ""
        place = folder.segments.append(record.round, payload) if payload else None
        with tables.transaction(durable=True):
            tables.put_round(record, place)
            if memory:
                tables.put_memory(record.round, digest)
        if memory:
            folder.memories.keep(frozenset(index for index, _ in tables.memories()))

    def _retain(self, following: int, kept: Ranges) -> None:
        """Drop the oldest results, see the class."""
        folder, segments = self._folder, self._folder.segments
        while segments.total > folder.keep_bytes and len(segments.sizes) > 1:
            oldest = next(iter(segments.sizes))
            records = folder.tables.records_of(oldest)
            last = records[-1][0] if records else -1
            if last >= following - KEPT_ROUNDS:
                return
            if last >= folder.forget and segments.total <= 2 * folder.keep_bytes:
                return
            with folder.tables.transaction(durable=True):
                folder.tables.drop_segment(oldest)
            segments.drop(oldest)
            if records:
                self._call(kept.remove, records[0][0], last + 1)

    def _forget(self, round_index: int) -> None:
        folder = self._folder
        if round_index > folder.forget:
            folder.forget = round_index
            with folder.tables.transaction(durable=False):
                folder.tables.set_meta("forget", str(round_index))

    def _load(self, round_index: int, kept: Ranges) -> Kept | None:
        tables = self._folder.tables
        try:
            row = tables.round(round_index)
            if row is None or (row.place is None and row.record.nbytes and not row.record.slices):
                return None
            if row.place is None:
                return Kept(row.record, b"")
            return Kept(row.record, self._folder.segments.read(round_index, row.place))
        except SegmentError as error:
            log.warning("the result of round %d is damaged: %s", round_index + 1, error)
            self._call(kept.remove, round_index, round_index + 1)
            if self._error is None:
                self._error = self._attempt(lambda: self._lose(round_index))
        except Exception as error:  # whoever asked is answered in any case
            log.warning("the result of round %d cannot be read: %s", round_index + 1, error)
        return None

    def _lose(self, round_index: int) -> None:
        with self._folder.tables.transaction(durable=True):
            self._folder.tables.lose((round_index,))
