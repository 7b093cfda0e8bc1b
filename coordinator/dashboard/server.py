"""The dashboard's server: a port and a thread of its own, and no work before somebody opens the page."""

from __future__ import annotations

import errno
import importlib.util
import ipaddress
import logging
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from coordinator.dashboard.feed import Feed
from coordinator.dashboard.guard import Guard
from coordinator.dashboard.snapshot import Camera
from protos import extras
from protos.address import Address

if TYPE_CHECKING:
    import asyncio

    from coordinator.access import Access
    from coordinator.dashboard.recorder import Recorder
    from coordinator.dashboard.web import Web
    from coordinator.hub import Hub

log = logging.getLogger(__name__)

PORT: Final = 4680
BACKLOG: Final = 64
CLOSE_SECONDS: Final = 5.0
EXTRA: Final = f"the dashboard needs more packages: {extras.hint('dashboard')}"

_serving = threading.Lock()  # NiceGUI knows one application a process


class DashboardError(OSError):
    """The dashboard cannot be served; the text names the address, the cause and what to do."""


def installed() -> bool:
    """Whether the packages of the extra ``dashboard`` are here."""
    return all(importlib.util.find_spec(name) is not None for name in ("nicegui", "uvicorn"))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens on ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class DashboardServer:
    """Listens at once; the page's packages are loaded when the first browser connects.

    Args:
        hub: of the run.
        recorder: that listens to it.
        loop: of the run; this is called on it.
        listen: where.
        access: knows who may give orders.
        exact: whether another port will not do.

    Attributes:
        address: where it listens, with the real port.

    Raises:
        DashboardError: the port is taken, or the address cannot be used.
    """

    def __init__(
        self,
        hub: Hub,
        recorder: Recorder,
        loop: asyncio.AbstractEventLoop,
        listen: Address,
        access: Access,
        *,
        exact: bool = True,
    ) -> None:
        self._feed = Feed(loop, Camera(hub, recorder).take)
        self._guard = Guard(access.admin, time.monotonic, access.still_admin)
        self._administration = hub.run.administration
        self._socket = _bound(listen, exact=exact)
        self.address = Address(listen.host, self._socket.getsockname()[1])
        self._wake, self._woken = socket.socketpair()
        self._closing = threading.Event()
        self._web: Web | None = None
        self._thread = threading.Thread(target=self._run, name="atoll-dashboard", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and end the thread; not on the run's loop, which it may wait for."""
        self._closing.set()
        self._feed.stop()
        self._wake.close()
        if self._web is not None:
            self._web.stop()
        self._thread.join(CLOSE_SECONDS)
        self._socket.close()
        self._woken.close()

    def _run(self) -> None:
        select.select([self._socket, self._woken], [], [])
        if self._closing.is_set():
            return
        if not _serving.acquire(blocking=False):
            log.error("the dashboard at %s: another one is served by this process already", self.address)
            return
        try:
            from coordinator.dashboard.web import Web

            self._web = Web(self._feed, self._guard, self._administration, self.address)
            if not self._closing.is_set():
                self._web.serve(self._socket)
        except BaseException:  # whatever it is, the run goes on without
            log.exception("the dashboard at %s has ended; the run goes on", self.address)
        finally:
            _serving.release()


def _bound(listen: Address, *, exact: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    ports = (listen.port,) if exact or not listen.port else (listen.port, 0)
    for port in ports:
        found = socket.socket(family, socket.SOCK_STREAM)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind((listen.host, port))
            found.listen(BACKLOG)
            return found
        except OSError as error:
            found.close()
            if port != ports[-1]:
                continue
            busy = error.errno == errno.EADDRINUSE
            cause = "the port is in use" if busy else error.strerror or os.strerror(error.errno or 0)
            raise DashboardError(
                f"cannot serve the dashboard on {listen}: {cause}; choose another address with --dashboard "
                "(port 0 takes a free one, 'off' serves none)"
            ) from error
    raise AssertionError("unreachable")
