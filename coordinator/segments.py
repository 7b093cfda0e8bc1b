"""Result payloads in append-only segment files, each record with a checksum.

A record is a header (magic, format, round, payload bytes, checksum; little-endian) and the payload. The
checksum, xxh3_128, covers header and payload: a record that has been moved, cut or overwritten is never taken
for another. Which records count is told elsewhere: the rows of the journal's database name their places.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import struct
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

ROLL_BYTES: Final = 64 << 20  # a segment that has reached this gets no further record
_FACTS: Final = struct.Struct("<4sIQQ")
_DIGEST_BYTES: Final = 16
HEADER_BYTES: Final = _FACTS.size + _DIGEST_BYTES
_MAGIC: Final = b"ATLR"
_FORMAT: Final = 1
_NAME: Final = re.compile(r"([0-9]{8,})\.seg")

Opener = Callable[[Path], FileIO]


class SegmentError(RuntimeError):
    """A record that is not there any more as it was written; the text names file, place and what is wrong."""


class Place(NamedTuple):
    """Where a record lies: number of the segment, offset of its header, bytes of its payload."""

    segment: int
    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        """Offset behind it."""
        return self.offset + HEADER_BYTES + self.nbytes


def file_name(segment: int) -> str:
    """Name of a segment's file."""
    return f"{segment:08d}.seg"


def sync(descriptor: int) -> None:
    """Wait until what has been written to a file is on the disk, also where fsync only reaches its cache."""
    full = getattr(fcntl, "F_FULLFSYNC", None)  # macOS
    if full is not None:
        with contextlib.suppress(OSError):  # file systems of other kinds do not know it
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def open_append(path: Path) -> FileIO:
    """Open a file, unbuffered, to write at its end."""
    return FileIO(path, "ab")


class Segments:
    """The segments of a folder. Used by one thread at a time.

    Args:
        folder: of the files; it exists.
        roll_bytes: see :data:`ROLL_BYTES`.
        opener: opens a segment for appending.

    Attributes:
        sizes: bytes of each segment, by number, oldest first.
    """

    def __init__(self, folder: Path, *, roll_bytes: int = ROLL_BYTES, opener: Opener = open_append) -> None:
        self.folder = folder
        self._roll = roll_bytes
        self._opener = opener
        self._file: FileIO | None = None  # the newest, once something has been appended
        found = [
            (int(match[1]), path.stat().st_size)
            for path in folder.iterdir()
            if (match := _NAME.fullmatch(path.name)) is not None
        ]
        self.sizes = dict(sorted(found))

    @property
    def total(self) -> int:
        """Bytes of all segments."""
        return sum(self.sizes.values())

    def path(self, segment: int) -> Path:
        """The file of a segment."""
        return self.folder / file_name(segment)

    def append(self, round_index: int, pieces: Sequence[memoryview]) -> Place:
        """Write a record; when this returns it is on the disk.

        Raises:
            OSError: it could not be written, or only in part: nothing may be appended afterwards.
        """
        nbytes = sum(piece.nbytes for piece in pieces)
        newest = next(reversed(self.sizes), 0)
        if newest not in self.sizes or self.sizes[newest] >= self._roll:
            newest += 1
            self._let_go()
            self._file = self._opener(self.path(newest))
            self.sizes[newest] = 0
            sync_folder(self.folder)
        elif self._file is None:
            self._file = self._opener(self.path(newest))
        assert self._file is not None
        facts = _FACTS.pack(_MAGIC, _FORMAT, round_index, nbytes)
        hasher = xxhash.xxh3_128(facts)
        for piece in pieces:
            hasher.update(piece)
        for buffer in (memoryview(facts + hasher.digest()), *pieces):
            _write_all(self._file, buffer)
        sync(self._file.fileno())
        place = Place(newest, self.sizes[newest], nbytes)
        self.sizes[newest] = place.end
        return place

    def read(self, round_index: int, place: Place) -> bytes:
        """The payload of a record, checked. See :func:`read_record`."""
        return read_record(self.folder, round_index, place)

    def cut(self, segment: int, size: int) -> None:
        """Drop what lies behind the first ``size`` bytes of a segment."""
        self._let_go()
        with open(self.path(segment), "rb+") as file:
            file.truncate(size)
            sync(file.fileno())
        self.sizes[segment] = size

    def drop(self, segment: int) -> None:
        """Remove a segment."""
        self._let_go()
        self.path(segment).unlink(missing_ok=True)
        del self.sizes[segment]

    def clear(self) -> None:
        """Remove all segments."""
        for segment in list(self.sizes):
            self.drop(segment)

    def close(self) -> None:
        """Close the file that is written to."""
        self._let_go()

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_record(folder: Path, round_index: int, place: Place) -> bytes:
    """The payload of the record of a round, checked.

    Raises:
        SegmentError: the file is gone or too short, or the record is another's or damaged.
        OSError: the file cannot be read.
    """
    path = folder / file_name(place.segment)
    where = f"{path} at byte {place.offset}"
    try:
        with open(path, "rb") as file:
            file.seek(place.offset)
            header, payload = file.read(HEADER_BYTES), file.read(place.nbytes)
    except FileNotFoundError:
        raise SegmentError(f"{path} is gone") from None
    if len(header) < HEADER_BYTES or len(payload) < place.nbytes:
        raise SegmentError(f"{where}: the file ends within the record")
    facts = header[: _FACTS.size]
    if facts != _FACTS.pack(_MAGIC, _FORMAT, round_index, place.nbytes):
        raise SegmentError(f"{where}: no record of round {round_index + 1} begins there")
    hasher = xxhash.xxh3_128(facts)
    hasher.update(payload)
    if hasher.digest() != header[_FACTS.size :]:
        raise SegmentError(f"{where}: the checksum of the record does not fit")
    return payload


def _write_all(file: FileIO, buffer: memoryview) -> None:
    rest = buffer.cast("B") if buffer.nbytes else buffer
    while rest.nbytes:
        written = file.write(rest)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        rest = rest[written:]
