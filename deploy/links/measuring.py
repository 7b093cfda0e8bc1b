"""What a link lets through, measured between two network namespaces with plain sockets."""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from deploy.links.commands import FRAME
from deploy.links.delay import hurry
from deploy.links.namespace import inside

SEGMENT: Final = 1448  # bytes that TCP carries in a full frame, with time stamps
_CHUNK: Final = 1 << 20
_SECONDS: Final = 30.0  # for any single step
_LAST_SECONDS: Final = 1.0  # for the last datagram
_LOOK_SECONDS: Final = 0.05  # between two looks of the echo whether it is over
_FRAME_OF_SEGMENT: Final = FRAME / SEGMENT


def rate(
    sender: str | None, receiver: str | None, address: str, *, seconds: float = 2.0, warm: float = 0.5
) -> float:
    """Bits per second of one TCP connection, reckoned as Ethernet frames, which is what a rate limits.

    Sender and receiver are real-time threads where that is allowed: it is the link that is measured, not how
    busy the machine is.

    Args:
        sender: namespace of the sender, by name or path; ``None`` for that of the caller.
        receiver: namespace of the receiver.
        address: of the receiver.
        seconds: how long to count at the receiver.
        warm: how long to wait before, until the connection has found its speed.

    Raises:
        OSError: no way between the two, or a namespace that is not there.
    """
    listener = inside(receiver, lambda: socket.create_server((address, 0)))
    with listener, inside(sender, lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as sending:
        with contextlib.suppress(OSError):  # others may need seconds to find a small rate
            sending.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        listener.settimeout(_SECONDS)
        sending.settimeout(_SECONDS)
        sending.connect(listener.getsockname())
        receiving, _ = listener.accept()
        receiving.settimeout(_SECONDS)
        # what still waits at the end is of no use; without a reset it would be sent on for seconds
        receiving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with ThreadPoolExecutor(2, "link-rate", initializer=hurry) as threads:
            pouring = threads.submit(_pour, sending)
            counted = threads.submit(_count, receiving, seconds, warm).result()
            pouring.result()
        return counted * 8 * _FRAME_OF_SEGMENT


def round_trips(
    asker: str | None, echoer: str | None, address: str, *, count: int = 20, interval: float = 0.05
) -> list[float]:
    """Seconds of UDP datagrams there and back, in the order sent; ``inf`` for those that got lost.

    Waits one second for the last of them. Threads and errors are those of :func:`rate`.
    """
    echoing = inside(echoer, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    asking = inside(asker, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    with echoing, asking, ThreadPoolExecutor(2, "link-echo", initializer=hurry) as threads:
        echoing.bind((address, 0))
        echoing.settimeout(_LOOK_SECONDS)
        asking.connect(echoing.getsockname())
        over = threading.Event()
        echo = threads.submit(_echo, echoing, over)
        try:
            return threads.submit(_ask, asking, count, interval).result()
        finally:
            over.set()
            echo.result()


def _ask(asking: socket.socket, count: int, interval: float) -> list[float]:
    times = [math.inf] * count
    sent: list[float] = []
    begin = time.perf_counter()
    while math.inf in times:
        now = time.perf_counter()
        if len(sent) < count and now >= begin + len(sent) * interval:
            sent.append(now)
            asking.send(struct.pack("=I", len(sent) - 1))
            continue
        until = begin + len(sent) * interval if len(sent) < count else sent[-1] + _LAST_SECONDS
        if now >= until:
            break
        asking.settimeout(until - now)
        with contextlib.suppress(TimeoutError):
            number = struct.unpack("=I", asking.recv(4))[0]
            times[number] = time.perf_counter() - sent[number]
    return times


def _pour(sending: socket.socket) -> None:
    chunk = memoryview(bytes(_CHUNK))
    with contextlib.suppress(OSError):  # the receiver has seen enough, and says so by a reset
        while True:
            sending.send(chunk)


def _count(receiving: socket.socket, seconds: float, warm: float) -> float:
    """Bytes per second, from the first bytes after the warming to the last within the time."""
    buffer = bytearray(_CHUNK)
    begin = time.perf_counter() + warm
    first: float | None = None
    count = 0
    with receiving:
        while True:
            received = receiving.recv_into(buffer)
            now = time.perf_counter()
            if not received:
                raise OSError("the sender has closed the connection")
            if first is None:
                first = now if now >= begin else None
                continue
            count += received
            if now >= first + seconds:
                return count / (now - first)


def _echo(echoing: socket.socket, over: threading.Event) -> None:
    while not over.is_set():
        with contextlib.suppress(TimeoutError):
            echoing.sendto(*echoing.recvfrom(4))
