"""The folder of a daemon's sockets: private, gone after a clean end, and swept up after any other."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

_PREFIX: Final = "atoll-swarm-"
_LOCK: Final = "lock"
_MAX_PATH: Final = 60  # a socket's path has 104 bytes at most, and its name up to 40
_YOUNG_SECONDS: Final = 60.0  # younger than this, it may be about to be locked


class SocketFolder:
    """A new folder that only this user can enter, locked until :meth:`remove` or the process's end."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        base = base if len(base) <= _MAX_PATH else "/tmp"
        _sweep(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(self.remove)

    def remove(self) -> None:
        """Delete it with whatever is in it. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
            atexit.unregister(self.remove)


def _sweep(base: Path) -> None:
    """Delete the folders of processes that were killed."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = folder.stat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _YOUNG_SECONDS:
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
