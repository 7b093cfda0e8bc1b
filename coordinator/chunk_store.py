"""Where snapshots are kept: bytes that are written in any order, and a manifest that makes them count."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Protocol

Buffer = bytes | bytearray | memoryview

DATA: Final = "data"
MANIFEST: Final = "manifest"
PARTIAL: Final = "manifest.partial"


class ChunkStoreError(RuntimeError):
    """A snapshot cannot be stored or read; the text says where, why, and what to do."""


class StoredState(Protocol):
    """The bytes of one snapshot. Calls may take long and are made from one thread at a time.

    Attributes:
        snapshot: its name.
        nbytes: size of the state.
    """

    @property
    def snapshot(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def write(self, offset: int, data: Buffer) -> None:
        """Store ``data`` at ``offset``; only before :meth:`keep`."""
        ...

    def read(self, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes."""
        ...

    def keep(self, manifest: bytes) -> None:
        """All has been written: from now on it outlasts the process, or the machine."""
        ...

    def drop(self) -> None:
        """Forget it."""
        ...


class ChunkStore(Protocol):
    """Holds snapshots. Its methods raise :class:`ChunkStoreError`."""

    def create(self, snapshot: str, nbytes: int) -> StoredState:
        """Room for a snapshot of ``nbytes``."""
        ...

    def kept(self) -> list[tuple[StoredState, bytes]]:
        """Those that were kept before this store was opened, with their manifests."""
        ...


class MemoryChunkStore:
    """Keeps snapshots as long as this object lasts."""

    def __init__(self) -> None:
        self.states: dict[str, tuple[_MemoryState, bytes]] = {}

    def create(self, snapshot: str, nbytes: int) -> StoredState:
        """See :class:`ChunkStore`."""
        return _MemoryState(self, snapshot, nbytes)

    def kept(self) -> list[tuple[StoredState, bytes]]:
        """See :class:`ChunkStore`; what has been kept so far."""
        return list(self.states.values())


class _MemoryState:
    def __init__(self, store: MemoryChunkStore, snapshot: str, nbytes: int) -> None:
        self.snapshot = snapshot
        self.nbytes = nbytes
        self._store = store
        self._data = bytearray(nbytes)

    def write(self, offset: int, data: Buffer) -> None:
        self._data[offset : offset + len(data)] = data

    def read(self, offset: int, nbytes: int) -> bytes:
        return bytes(self._data[offset : offset + nbytes])

    def keep(self, manifest: bytes) -> None:
        self._store.states[self.snapshot] = self, manifest

    def drop(self) -> None:
        self._store.states.pop(self.snapshot, None)


class FileChunkStore:
    """Keeps snapshots in a folder of their own each: ``data`` and, once that is on the disk, ``manifest``.

    Opening it removes what an unfinished snapshot has left. The folder must be this process's alone.

    Raises:
        ChunkStoreError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with _telling("use", folder):
            folder.mkdir(parents=True, exist_ok=True)
            for path in sorted(folder.iterdir()):
                if path.is_dir() and not (path / MANIFEST).is_file():
                    shutil.rmtree(path)

    def create(self, snapshot: str, nbytes: int) -> StoredState:
        """See :class:`ChunkStore`; the disk space is reserved."""
        path = self._folder / snapshot
        with _telling("write", path):
            path.mkdir()
            _sync_folder(self._folder)
            try:
                return _FileState(path, nbytes, create=True)
            except OSError:
                shutil.rmtree(path, ignore_errors=True)
                raise

    def kept(self) -> list[tuple[StoredState, bytes]]:
        """See :class:`ChunkStore`."""
        found: list[tuple[StoredState, bytes]] = []
        with _telling("read", self._folder):
            for path in sorted(self._folder.iterdir()):
                data, manifest = path / DATA, path / MANIFEST
                if manifest.is_file():
                    nbytes = data.stat().st_size if data.is_file() else 0
                    found.append((_FileState(path, nbytes), manifest.read_bytes()))
        return found


class _FileState:
    def __init__(self, path: Path, nbytes: int, *, create: bool = False) -> None:
        self.snapshot = path.name
        self.nbytes = nbytes
        self._path = path
        self._file = -1  # open as long as it is written
        if create:
            self._file = os.open(path / DATA, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                _reserve(self._file, nbytes)
            except OSError:
                self._close()
                raise

    def write(self, offset: int, data: Buffer) -> None:
        with _telling("write", self._path):
            view = memoryview(data)
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count

    def read(self, offset: int, nbytes: int) -> bytes:
        with _telling("read", self._path), open(self._path / DATA, "rb", buffering=0) as file:
            parts = []
            while nbytes:
                part = os.pread(file.fileno(), nbytes, offset)
                if not part:
                    raise OSError(errno.EIO, f"{DATA} ends at byte {offset}")
                parts.append(part)
                nbytes, offset = nbytes - len(part), offset + len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)

    def keep(self, manifest: bytes) -> None:
        with _telling("write", self._path):
            os.fsync(self._file)
            self._close()
            with open(self._path / PARTIAL, "wb") as file:
                file.write(manifest)
                file.flush()
                os.fsync(file.fileno())
            os.replace(self._path / PARTIAL, self._path / MANIFEST)
            _sync_folder(self._path)

    def drop(self) -> None:
        self._close()
        with _telling("remove", self._path):
            with suppress(FileNotFoundError):  # first: without it the rest is a left-over
                os.unlink(self._path / MANIFEST)
            with suppress(FileNotFoundError):
                shutil.rmtree(self._path)

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _reserve(file: int, nbytes: int) -> None:
    """Give a file its size, and its space where the system can: better told now than after hours."""
    reserve: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if reserve is not None and nbytes:
        try:
            reserve(file, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(file, nbytes)


def _sync_folder(path: Path) -> None:
    """Make names in a folder outlast a crash."""
    folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _telling(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        advice = "check the folder and its disk"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free space there; the run goes on, and the next snapshot is tried again"
        cause = error.strerror or str(error)
        raise ChunkStoreError(f"cannot {what} the snapshot in {path}: {cause}; {advice}") from error
