"""Identity: the key file that a node's peer id comes from, held by one process at a time."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from node.exchange.swarm.library import hivemind
from node.exchange.swarm.phases import SwarmTrouble
from node.exchange.trouble import Kind

_MAX_BYTES: Final = 1 << 14
_RSA: Final = 0  # libp2p's number of that kind of key


class Identity:
    """A key file in use, from :func:`hold` until :meth:`release`.

    Attributes:
        path: of the key.
        peer: its peer id.
    """

    def __init__(self, path: Path, peer: str, lock: int) -> None:
        self.path, self.peer = path, peer
        self._lock = lock

    def release(self) -> None:
        """Somebody else may use it. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def hold(path: Path) -> Identity:
    """Take the key at ``path``, which is made if there is none; blocks for tenths of a second then.

    Raises:
        SwarmTrouble: another process uses it, others may read it, it is damaged, or it cannot be written.
    """
    try:
        lock = _locked(path)
        try:
            if not path.exists():
                _make(path)
            return Identity(path, _peer(path), lock)
        except BaseException:
            os.close(lock)
            raise
    except OSError as error:
        raise _trouble(f"the key {path} cannot be used: {error.strerror or error}") from error


def _locked(path: Path) -> int:
    """A file of its own: the key's is only read, and may lie where nothing can be locked."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(lock, 20).decode("ascii", "replace").strip()
        os.close(lock)
        raise _trouble(
            f"the key {path} is in use by another process{f' ({owner})' if owner.isdigit() else ''}: two "
            "peers with one identity are cut off by the others; give every node a key of its own"
        ) from None
    os.ftruncate(lock, 0)
    os.write(lock, b"%d" % os.getpid())
    return lock


def _make(path: Path) -> None:
    """Write a new key whole or not at all, and never so that others may read it."""
    library = hivemind()
    key = library.PrivateKeyFile(key_type=_RSA, data=library.RSAPrivateKey().to_bytes())
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600 from the start
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(key.SerializeToString())
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike a rename, never in the place of one that exists
    finally:
        os.unlink(draft)


def _peer(path: Path) -> str:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        data = file.read(_MAX_BYTES + 1)
    if mode & 0o077:
        raise _trouble(f"the key {path} can be read by others (mode {mode:04o}): chmod 600 {path}")
    try:
        if not data or len(data) > _MAX_BYTES:
            raise ValueError(f"it has {len(data)} bytes")
        return str(hivemind().PeerID.from_identity(data).to_base58())
    except Exception as error:  # whatever a parser raises
        raise _trouble(
            f"{path} is no key of a peer ({str(error)[:100]}): bring back a copy, or remove the file, and "
            "the node gets a new identity"
        ) from error


def _trouble(text: str) -> SwarmTrouble:
    return SwarmTrouble("identity", text, Kind.REFUSED)
