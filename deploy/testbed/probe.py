"""Probes of a link before it is used: short TCP transfers each way, and datagrams there and back.

Whoever probes opens its connections at the link's far end, so that a site behind NAT can be probed, too.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from deploy.errors import UserError
from deploy.links import measuring
from deploy.links.commands import FRAME
from deploy.links.delay import hurry
from deploy.links.measuring import SEGMENT
from deploy.testbed.namespace import Namespace

WINDOW: Final = 0.3  # seconds over which a rate is taken
LONGEST: Final = 10  # windows of a transfer
ALIKE: Final = 3  # windows in a row, which show a steady transfer if they are
SAME: Final = 0.08  # so near to each other
STREAMS: Final = 4  # connections of a transfer: one alone takes seconds to fill a long fast link
PINGS: Final = 20
PING_SECONDS: Final = 0.02  # between two
LOSS_PINGS: Final = 500
LOSS_PING_SECONDS: Final = 0.002
DEADLINE: Final = 15.0  # for a connection to come about
_BLOCK: Final = 1 << 18


class ProbeError(UserError):
    """A link that cannot be probed, or that is not what was asked for."""


@dataclass(frozen=True)
class Rtt:
    """Round trips in seconds, and how many of the datagrams came back."""

    least: float
    median: float
    sent: int
    back: int


@dataclass(frozen=True)
class Reading:
    """What a link was found to carry: bits per second with all headers, as its shape counts them."""

    up: float
    down: float
    rtt: Rtt


def rate(
    near: Namespace,
    far: Namespace,
    address: str,
    *,
    up: bool,
    delay: float = 0.0,
    windows: int = LONGEST,
) -> float:
    """Bits per second over a link, headers included.

    Args:
        near: where ``address`` is.
        far: the other end, which connects.
        up: whether ``far`` sends; else it receives.
        delay: seconds of a round trip, which the first windows are lost to.
        windows: that it takes at most, of :data:`WINDOW` seconds.

    Raises:
        ProbeError: nothing comes through.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(near.call(lambda: socket.create_server((address, 0))))
        pairs = [_connected(stack, server, far) for _ in range(STREAMS)]
        senders = [pair[0] if up else pair[1] for pair in pairs]
        receivers = [pair[1] if up else pair[0] for pair in pairs]
        over = threading.Event()
        threads = [threading.Thread(target=_pour, args=(sender, over), daemon=True) for sender in senders]
        for thread in threads:
            thread.start()
        try:
            counted = _counted(receivers, delay, windows)
        finally:
            over.set()
            for sender in senders:
                with contextlib.suppress(OSError):
                    sender.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()
    if not counted:
        raise ProbeError(f"nothing came through the link to {address}")
    return 8 * steady(counted) * FRAME / SEGMENT


def _connected(
    stack: contextlib.ExitStack, server: socket.socket, far: Namespace
) -> tuple[socket.socket, socket.socket]:
    address = server.getsockname()
    try:
        client = stack.enter_context(far.call(lambda: socket.create_connection(address, DEADLINE)))
        server.settimeout(DEADLINE)
        peer = stack.enter_context(server.accept()[0])
    except OSError as error:
        raise ProbeError(f"no connection to {address[0]} through the link: {error}") from error
    for one in (client, peer):
        one.settimeout(DEADLINE)
        # The usual choice of senders, where the system's is another: bbr probes below the rate at times.
        with contextlib.suppress(OSError, AttributeError):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    return client, peer


def _pour(sender: socket.socket, over: threading.Event) -> None:
    hurry()
    block = memoryview(bytes(_BLOCK))
    with contextlib.suppress(OSError):
        while not over.is_set():
            sender.send(block)


def _counted(receivers: Sequence[socket.socket], delay: float, windows: int) -> list[float]:
    """Bytes per second in each window, until they are steady."""
    buffer, rates = bytearray(_BLOCK), list[float]()
    for receiver in receivers:
        receiver.setblocking(False)
    begun = time.monotonic()
    mark, total = begun, 0
    while len(rates) < windows:
        ready, _, _ = select.select(receivers, [], [], WINDOW)
        for receiver in ready:
            with contextlib.suppress(BlockingIOError):
                total += receiver.recv_into(buffer)
        now = time.monotonic()
        if now - mark >= WINDOW:
            if now - begun > WINDOW / 2 + 2 * delay:
                rates.append(total / (now - mark))
            mark, total = now, 0
            if alike(rates[-ALIKE:]):
                break
    return rates if any(rates) else []


def steady(rates: Sequence[float]) -> float:
    """The mean of the last windows if these are alike, else the median of all.

    A transfer starts slowly, and one that another process holds up for a moment makes up for it later:
    neither the highest nor the mean of all would be the link's rate.
    """
    last = rates[-ALIKE:]
    return sum(last) / len(last) if alike(last) else statistics.median(rates)


def alike(rates: Sequence[float]) -> bool:
    """Whether so many windows in a row show a steady transfer."""
    return len(rates) == ALIKE and max(rates) - min(rates) <= SAME * max(rates)


def round_trips(near: Namespace, far: Namespace, address: str, *, lossy: bool = False) -> Rtt:
    """Send datagrams from ``far`` to ``near`` and back, more of them where some get lost.

    Raises:
        ProbeError: none comes back.
    """
    count, pause = (LOSS_PINGS, LOSS_PING_SECONDS) if lossy else (PINGS, PING_SECONDS)
    times = measuring.round_trips(far.path, near.path, address, count=count, interval=pause)
    back = [seconds for seconds in times if math.isfinite(seconds)]
    if not back:
        raise ProbeError(f"none of {count} datagrams to {address} came back")
    return Rtt(min(back), statistics.median(back), count, len(back))


def parallel(works: Sequence[Callable[[], None]]) -> None:
    """Do several things at once; the first that fails is raised once all have ended."""
    problems: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
