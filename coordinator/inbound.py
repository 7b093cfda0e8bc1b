"""The TCP connections that have come in at a port, whichever library has accepted them.

gRPC does not tell of connections: one that stays silent has no call, and no call object tells whose it is.
The system knows them: they are open files of this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from coordinator.rates import origin

_FILES: Final = Path("/proc/self/fd")


@dataclass(frozen=True)
class Inbound:
    """One of them.

    Attributes:
        inode: of the socket: another connection has another one, though file numbers are used again.
        origin: whom it is counted as, see :func:`coordinator.rates.origin`.
        port: at the other end.
    """

    inode: int
    origin: str
    port: int


class Connections:
    """Finds them. Not thread-safe.

    Args:
        port: where they came in.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._known: dict[int, Inbound | None] = {}  # by inode; None: another socket than those

    def look(self) -> list[Inbound]:
        """Those that are open now, in no order; none where the system does not tell."""
        found: dict[int, Inbound | None] = {}
        for number, inode in _sockets():
            if inode not in self._known:
                self._known[inode] = _inspect(number, inode, self._port)
            found[inode] = self._known[inode]
        self._known = found
        return [connection for connection in found.values() if connection is not None]

    def cut(self, connections: Iterable[Inbound]) -> None:
        """End some; who has accepted them finds them closed."""
        inodes = {connection.inode for connection in connections}
        for number, inode in _sockets():
            if inode in inodes:
                with contextlib.suppress(OSError), _copy(number, inode) as found:
                    found.shutdown(socket.SHUT_RDWR)


def _sockets() -> list[tuple[int, int]]:
    """File number and inode of every open socket."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(_FILES):
            with contextlib.suppress(OSError):  # closed meanwhile
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.append((int(name), status.st_ino))
    return found


def _copy(number: int, inode: int) -> socket.socket:
    """The same socket under a number of its own: the other may be closed and mean something else any time.

    Raises:
        OSError: that has happened.
    """
    copy = os.dup(number)
    try:
        if os.fstat(copy).st_ino != inode:
            raise OSError(f"file {number} is another one now")
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _inspect(number: int, inode: int, port: int) -> Inbound | None:
    try:
        with _copy(number, inode) as found:
            if found.family not in (socket.AF_INET, socket.AF_INET6) or found.getsockname()[1] != port:
                return None
            host, far = found.getpeername()[:2]
    except OSError:  # listens, or is no more
        return None
    return Inbound(inode, origin(host), far)
