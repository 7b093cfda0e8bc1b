"""Key files: who a node is, kept from one process to the next, and held by one process at a time."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

MAX_BYTES: Final = 1 << 14

T = TypeVar("T")


class KeyFileError(RuntimeError):
    """A key file that cannot be used; the text says why, and what to do.

    Attributes:
        refusal: by which :mod:`deploy.errors` finds its exit code.
    """

    def __init__(self, text: str, refusal: str = "bad-identity") -> None:
        super().__init__(text)
        self.refusal = refusal


class KeyFile(Generic[T]):
    """A key file in use, from :func:`hold` until :meth:`release`.

    Attributes:
        path: of the key.
        key: what was read from it.
    """

    def __init__(self, path: Path, key: T, lock: int) -> None:
        self.path, self.key = path, key
        self._lock = lock

    def release(self) -> None:
        """Somebody else may use it. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def hold(path: Path, make: Callable[[], bytes], read: Callable[[bytes], T], *, what: str) -> KeyFile[T]:
    """Take the key at ``path``, which is made if there is none.

    Args:
        path: of the file.
        make: a new key.
        read: a key of what a file holds, at most :data:`MAX_BYTES`; may raise anything.
        what: uses such a key, as in "no key of a {what}".

    Raises:
        KeyFileError: another process uses it, others may read it, it is damaged, or it cannot be written.
    """
    try:
        lock = _locked(path, what)
        try:
            if not path.exists():
                _write(path, make())
            return KeyFile(path, _read(path, read, what), lock)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise KeyFileError(f"the key {path} cannot be used: {error.strerror or error}") from error


def _locked(path: Path, what: str) -> int:
    """A file of its own: the key's is only read, and may lie where nothing can be locked."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 20).decode("ascii", "replace").strip()
        os.close(lock)
        raise KeyFileError(
            f"the key {path} is in use by another process{f' ({owner})' if owner.isdigit() else ''}: two "
            f"{what}s with one identity are cut off by the others; give every node a key of its own",
            "key-in-use",
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, b"%d" % os.getpid())
    return lock


def _write(path: Path, key: bytes) -> None:
    """Write a new key whole or not at all, and never so that others may read it."""
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600 from the start
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike a rename, never in the place of one that exists
    finally:
        os.unlink(draft)


def _read(path: Path, read: Callable[[bytes], T], what: str) -> T:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        data = file.read(MAX_BYTES + 1)
    if mode & 0o077:
        raise KeyFileError(f"the key {path} can be read by others (mode {mode:04o}): chmod 600 {path}")
    try:
        if not data or len(data) > MAX_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        return read(data)
    except Exception as error:  # whatever a parser raises
        raise KeyFileError(
            f"{path} is no key of a {what} ({str(error)[:100]}): bring back a copy, or remove the file, and "
            "the node gets a new identity"
        ) from error
