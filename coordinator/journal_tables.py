"""The journal's database: which records it has, written and read back.

SQLite in WAL mode. A transaction is atomic, transactions are kept in their order, and a durable one makes all
before it durable. Samples that were trained are rows of their own, so that an audit can ask for them.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from coordinator.journal import (
    AdminRecord,
    ExpelledNode,
    NodeRecord,
    RosterRecord,
    RoundRecord,
    SliceRecord,
    StartRecord,
)
from coordinator.ranges import Range
from coordinator.segments import HEADER_BYTES, Place

FORMAT: Final = 2
KEPT_ROSTERS: Final = 4096
KEPT_MEMORIES: Final = 2  # the newest may be damaged by what ended the machine
BUSY_SECONDS: Final = 10.0

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE start (
    id INTEGER PRIMARY KEY CHECK (id = 0), round INTEGER NOT NULL, digest TEXT NOT NULL,
    samples INTEGER NOT NULL, data_digest TEXT NOT NULL, state_bytes INTEGER NOT NULL);
CREATE TABLE rosters (
    id INTEGER PRIMARY KEY AUTOINCREMENT, epoch INTEGER NOT NULL, members TEXT NOT NULL,
    numbers INTEGER NOT NULL);
CREATE TABLE rounds (
    round INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, voters TEXT NOT NULL, weights TEXT NOT NULL,
    casting INTEGER NOT NULL, nbytes INTEGER NOT NULL, digest TEXT NOT NULL, reason TEXT NOT NULL,
    agreement TEXT NOT NULL, frontier INTEGER NOT NULL, returned TEXT NOT NULL, at REAL NOT NULL,
    segment INTEGER, place INTEGER, lost INTEGER NOT NULL DEFAULT 0, slices TEXT NOT NULL DEFAULT '[]');
CREATE INDEX rounds_of_segment ON rounds (segment) WHERE segment IS NOT NULL;
CREATE TABLE leases (
    round INTEGER NOT NULL, slot INTEGER NOT NULL, node TEXT NOT NULL, start INTEGER NOT NULL,
    count INTEGER NOT NULL, PRIMARY KEY (round, slot)) WITHOUT ROWID;
CREATE TABLE digests (
    id INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER NOT NULL, digest TEXT NOT NULL,
    UNIQUE (round, digest));
CREATE TABLE skips (
    id INTEGER PRIMARY KEY AUTOINCREMENT, first INTEGER NOT NULL, round INTEGER NOT NULL,
    samples INTEGER NOT NULL);
CREATE TABLE memories (round INTEGER PRIMARY KEY, digest TEXT NOT NULL);
"""
_OF_A_RUN: Final = ("start", "rosters", "rounds", "leases", "digests", "skips", "memories")
_ROUND: Final = (
    "round, epoch, voters, weights, casting, nbytes, digest, reason, agreement, frontier, returned, at, "
    "segment, place, lost, slices"
)
_KEPT: Final = "(segment IS NOT NULL OR nbytes = 0)"


class Row:
    """A row of ``rounds``: its record, where the result lies (``None``: nowhere), and whether it was lost to
    damage rather than dropped."""

    def __init__(self, record: RoundRecord, place: Place | None, lost: bool) -> None:
        self.record = record
        self.place = place
        self.lost = lost


class Tables:
    """The database of a journal. Used by one thread at a time; every method may raise ``sqlite3.Error``."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self.path = path
        self._db = _reader(path) if read_only else _writer(path)
        self._columns = _ROUND
        found = {row[1] for row in self._db.execute("PRAGMA table_info(rounds)")}
        if found and "slices" not in found:  # written in format 1
            self._columns = _ROUND.replace("slices", "'[]'")

    @property
    def created(self) -> bool:
        """Whether there are any tables."""
        return bool(self._db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone())

    def create(self, meta: dict[str, str]) -> None:
        """Make the tables, all or none."""
        rows = ", ".join("(?, ?)" for _ in meta)
        with self.transaction(durable=True):
            for statement in _SCHEMA.split(";\n"):
                self._db.execute(statement)
            values = [text for item in meta.items() for text in item]
            self._db.execute(f"INSERT INTO meta VALUES {rows}", values)

    def upgrade(self) -> None:
        """Bring tables that were written in format 1 into the present one."""
        if self._columns == _ROUND:
            return
        with self.transaction(durable=True):
            self._db.execute("ALTER TABLE rounds ADD COLUMN slices TEXT NOT NULL DEFAULT '[]'")
            self.set_meta("format", str(FORMAT))
        self._columns = _ROUND

    def problem(self) -> str:
        """What is wrong with the file, in SQLite's words; empty if nothing."""
        answer = str(self._db.execute("PRAGMA quick_check(1)").fetchone()[0])
        return "" if answer == "ok" else answer

    @contextmanager
    def transaction(self, *, durable: bool) -> Iterator[None]:
        """All or nothing of what is written within; ``durable``: it is on the disk when this ends. Otherwise
        it outlasts the process, and the machine once a later one is durable."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def snapshot(self) -> None:
        """From now on all reading sees the same state."""
        self._db.execute("BEGIN")
        self._db.execute("SELECT count(*) FROM meta").fetchone()

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    # --------------------------------------------------------------------------------------------- writing

    def set_meta(self, key: str, value: str) -> None:
        """Note a fact about the journal."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def begin(self, start: StartRecord) -> None:
        """A run begins; all earlier records go."""
        for table in _OF_A_RUN:
            self._db.execute(f"DELETE FROM {table}")
        self._db.execute("DELETE FROM meta WHERE key IN ('forget', 'ended')")
        values = (start.round, start.digest, start.samples, start.data_digest, start.state_bytes)
        self._db.execute("INSERT INTO start VALUES (0, ?, ?, ?, ?, ?)", values)

    def put_roster(self, record: RosterRecord) -> None:
        """Add a roster; only the last ones are kept."""
        members = json.dumps([[member.node, member.name, member.secret] for member in record.members])
        cursor = self._db.execute(
            "INSERT INTO rosters (epoch, members, numbers) VALUES (?, ?, ?)",
            (record.epoch, members, record.numbers),
        )
        self._db.execute("DELETE FROM rosters WHERE id <= ?", ((cursor.lastrowid or 0) - KEPT_ROSTERS,))

    def put_administration(self, record: AdminRecord) -> None:
        """The administrator's orders, in place of earlier ones."""
        self.set_meta("administration", json.dumps(asdict(record)))

    def put_round(self, record: RoundRecord, place: Place | None) -> None:
        """Add a round and what it trained."""
        values = (
            record.round,
            record.epoch,
            json.dumps(record.voters),
            json.dumps(record.weights),
            record.casting,
            record.nbytes,
            record.digest,
            record.reason,
            json.dumps([None if math.isnan(share) else share for share in record.agreement]),
            record.frontier,
            json.dumps(record.returned),
            record.at,
            None if place is None else place.segment,
            None if place is None else place.offset,
            json.dumps([[part.start, part.end, part.digest.hex(), part.reducer] for part in record.slices]),
        )
        marks = ", ".join("?" * (len(values) - 1))
        self._db.execute(f"INSERT INTO rounds VALUES ({marks}, 0, ?)", values)
        self._db.executemany(
            "INSERT INTO leases VALUES (?, ?, ?, ?, ?)",
            [(record.round, slot, *lease) for slot, lease in enumerate(record.trained)],
        )

    def put_digest(self, round_index: int, digest: str) -> None:
        """The nodes agree on a state."""
        self._db.execute(
            "INSERT OR REPLACE INTO digests (round, digest) VALUES (?, ?)", (round_index, digest)
        )

    def put_skip(self, first: int, round_index: int, samples: int) -> None:
        """The rounds from ``first`` up to ``round_index`` are not in this journal."""
        self._db.execute(
            "INSERT INTO skips (first, round, samples) VALUES (?, ?, ?)", (first, round_index, samples)
        )

    def put_memory(self, round_index: int, digest: str) -> None:
        """The reducer's memory after a round has been stored; only the last ones are kept."""
        self._db.execute("INSERT OR REPLACE INTO memories VALUES (?, ?)", (round_index, digest))
        self._db.execute(
            "DELETE FROM memories WHERE round NOT IN "
            "(SELECT round FROM memories ORDER BY round DESC LIMIT ?)",
            (KEPT_MEMORIES,),
        )

    def drop_segment(self, segment: int) -> None:
        """The results in a segment are kept no longer."""
        self._db.execute("UPDATE rounds SET segment = NULL, place = NULL WHERE segment = ?", (segment,))

    def lose(self, rounds: Iterable[int]) -> None:
        """The results of these rounds are damaged."""
        self._db.executemany(
            "UPDATE rounds SET segment = NULL, place = NULL, lost = 1 WHERE round = ?",
            [(round_index,) for round_index in rounds],
        )

    # --------------------------------------------------------------------------------------------- reading

    def meta(self) -> dict[str, str]:
        """All facts about the journal."""
        return dict(self._db.execute("SELECT key, value FROM meta").fetchall())

    def start(self) -> StartRecord | None:
        """With which state the run has begun; ``None``: it has not."""
        row = self._db.execute(
            "SELECT round, digest, samples, data_digest, state_bytes FROM start"
        ).fetchone()
        return None if row is None else StartRecord(*row)

    def administration(self) -> AdminRecord:
        """The administrator's orders."""
        values = json.loads(self.meta().get("administration", "{}"))
        expelled = tuple(ExpelledNode(**one) for one in values.get("expelled", ()))
        return AdminRecord(values.get("paused", ""), expelled)

    def rosters(self) -> Iterator[RosterRecord]:
        """The rosters that are kept, newest first."""
        for epoch, members, numbers in self._db.execute(
            "SELECT epoch, members, numbers FROM rosters ORDER BY id DESC"
        ):
            yield RosterRecord(epoch, tuple(NodeRecord(*member) for member in json.loads(members)), numbers)

    def round(self, round_index: int) -> Row | None:
        """A round, if it is there."""
        values = self._db.execute(
            f"SELECT {self._columns} FROM rounds WHERE round = ?", (round_index,)
        ).fetchone()
        return None if values is None else self._row(values)

    def rounds(self) -> Iterator[Row]:
        """All rounds in order."""
        for values in self._db.execute(f"SELECT {self._columns} FROM rounds ORDER BY round"):
            yield self._row(values)

    def last_round(self) -> int | None:
        """The last round, if there is one."""
        row = self._db.execute("SELECT max(round) FROM rounds").fetchone()
        return None if row[0] is None else int(row[0])

    def trained(self) -> int:
        """Samples counted in all rounds."""
        return int(self._db.execute("SELECT coalesce(sum(count), 0) FROM leases").fetchone()[0])

    def digests(self, first: int = -1) -> Iterator[tuple[int, str]]:
        """(round, digest) in the order in which they were agreed, for the rounds from ``first`` on."""
        yield from self._db.execute(
            "SELECT round, digest FROM digests WHERE round >= ? ORDER BY id", (first,)
        )

    def skips(self) -> list[tuple[int, int, int]]:
        """(first, round, samples) of each :meth:`put_skip`."""
        return [
            (int(first), int(end), int(samples))
            for first, end, samples in self._db.execute("SELECT first, round, samples FROM skips ORDER BY id")
        ]

    def memories(self) -> list[tuple[int, str]]:
        """(round, digest) of the reducer's memories that are kept, newest first."""
        rows = self._db.execute("SELECT round, digest FROM memories ORDER BY round DESC").fetchall()
        return [(int(round_index), str(digest)) for round_index, digest in rows]

    def kept(self) -> list[Range]:
        """The rounds whose results can be loaded."""
        return [
            (int(first), int(last) + 1)
            for first, last in self._db.execute(
                "SELECT min(round), max(round) FROM (SELECT round, round - row_number() OVER "
                f"(ORDER BY round) AS island FROM rounds WHERE {_KEPT}) GROUP BY island ORDER BY 1"
            )
        ]

    def segment_ends(self) -> dict[int, int]:
        """Offset behind the last record of each segment that has any, oldest first."""
        rows = self._db.execute(
            "SELECT segment, max(place + nbytes) FROM rounds WHERE segment IS NOT NULL GROUP BY segment "
            "ORDER BY segment"
        )
        return {int(segment): int(end) + HEADER_BYTES for segment, end in rows}

    def records_of(self, segment: int) -> list[tuple[int, Place]]:
        """(round, place) of the records in a segment, in their order."""
        rows = self._db.execute(
            "SELECT round, place, nbytes FROM rounds WHERE segment = ? ORDER BY place", (segment,)
        )
        return [(int(index), Place(segment, int(offset), int(nbytes))) for index, offset, nbytes in rows]

    def _row(self, values: tuple[Any, ...]) -> Row:
        index, epoch, voters, weights, casting, nbytes, digest, reason, agreement, frontier, returned = (
            values[:11]
        )
        at, segment, offset, lost, slices = values[11:]
        leases = self._db.execute(
            "SELECT node, start, count FROM leases WHERE round = ? ORDER BY slot", (index,)
        )
        record = RoundRecord(
            round=index,
            epoch=epoch,
            voters=tuple(json.loads(voters)),
            weights=tuple(json.loads(weights)),
            casting=casting,
            nbytes=nbytes,
            digest=digest,
            reason=reason,
            agreement=tuple(math.nan if share is None else share for share in json.loads(agreement)),
            trained=tuple((str(node), int(start), int(count)) for node, start, count in leases),
            frontier=frontier,
            returned=tuple((int(start), int(count)) for start, count in json.loads(returned)),
            at=at,
            slices=tuple(
                SliceRecord(int(start), int(end), bytes.fromhex(digest), str(reducer))
                for start, end, digest, reducer in json.loads(slices)
            ),
        )
        place = None if segment is None else Place(segment, offset, nbytes)
        return Row(record, place, bool(lost))


def _writer(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA fullfsync = ON")  # where fsync only reaches the disk's cache
    except BaseException:
        db.close()
        raise
    return db


def _reader(path: Path) -> sqlite3.Connection:
    """Read while another process may write. Where the folder cannot be written to, a journal that was closed
    cleanly is read as it lies there."""
    uri = path.absolute().as_uri() + "?mode=ro"
    db = sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        db.close()
        if path.with_name(f"{path.name}-wal").exists():
            raise
        db = sqlite3.connect(f"{uri}&immutable=1", uri=True, isolation_level=None)
    return db
