"""Queues of netfilter (NFQUEUE) over netlink: packets wait in the kernel, only their numbers come here.

Message formats: linux/netfilter/nfnetlink_queue.h of the kernel.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

_NETFILTER: Final = 12  # netlink family
_SUBSYSTEM: Final = 3 << 8
_PACKET: Final = struct.pack("=H", _SUBSYSTEM | 0)
_VERDICT: Final = _SUBSYSTEM | 1
_CONFIG: Final = _SUBSYSTEM | 2
_BATCH: Final = _SUBSYSTEM | 3
_REQUEST, _ACK = 1, 4
_DROP, _ACCEPT = 0, 1
_BIND, _COPY_META = 1, 1
_ATTR_COMMAND, _ATTR_COPY, _ATTR_LENGTH, _ATTR_MASK, _ATTR_FLAGS = 1, 2, 3, 4, 5
_FAIL_OPEN, _GSO = 1, 4
_VERDICT_HEADER: Final = 2
_SO_RCVBUFFORCE, _SOL_NETLINK, _NO_ENOBUFS = 33, 270, 5
_READS: Final = 256  # packets at once, so that due ones do not wait for a flood
MOST: Final = 200_000  # packets in a queue; what comes on top passes at once


class Queue:
    """A queue of packets that wait for a verdict.

    Raises ``OSError`` if the number is taken, the kernel has no such queues, or we may not use them.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
        try:
            self._configure()
        except BaseException:
            self.socket.close()
            raise

    def _configure(self) -> None:
        self.socket.bind((0, 0))
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
        except PermissionError:  # in a container
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self.socket.setsockopt(_SOL_NETLINK, _NO_ENOBUFS, 1)
        flags = struct.pack(">I", _FAIL_OPEN | _GSO)
        for body in (
            _attribute(_ATTR_COMMAND, struct.pack(">BBH", _BIND, 0, 0)),
            _attribute(_ATTR_COPY, struct.pack(">IB", 0, _COPY_META)),
            _attribute(_ATTR_LENGTH, struct.pack(">I", MOST)),
            _attribute(_ATTR_FLAGS, flags) + _attribute(_ATTR_MASK, flags),
        ):
            self.socket.send(_message(_CONFIG, self.number, body, _REQUEST | _ACK))
            number = -struct.unpack_from("=i", self.socket.recv(4096), 16)[0]
            if number:
                raise OSError(number, f"queue {self.number} of netfilter: {os.strerror(number)}")
        self.socket.setblocking(False)

    def fileno(self) -> int:
        """Of its socket, for ``select``."""
        return self.socket.fileno()

    def read(self) -> list[bytes]:
        """The numbers of packets that have come, in order, at most 256."""
        numbers: list[bytes] = []
        receive = self.socket.recv
        try:
            for _ in range(_READS):
                message = receive(4096)
                if message[4:6] == _PACKET:  # else an answer to a verdict that came too late
                    # after the headers (16 and 4 bytes) the first attribute (4) is the packet's own header
                    numbers.append(message[24:28])
        except BlockingIOError:
            pass
        return numbers

    def free(self, number: bytes) -> None:
        """Let the packet of that number pass, and all that came before it."""
        self._say(_BATCH, _ACCEPT, number)

    def drop(self, number: bytes) -> None:
        """Drop one packet."""
        self._say(_VERDICT, _DROP, number)

    def close(self) -> None:
        """Give the queue up; packets that still wait in it are lost."""
        self.socket.close()

    def _say(self, kind: int, verdict: int, number: bytes) -> None:
        body = _attribute(_VERDICT_HEADER, struct.pack(">I", verdict) + number)
        self.socket.send(_message(kind, self.number, body, _REQUEST))


def _attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content + b"\0" * (-len(content) % 4)


def _message(kind: int, queue: int, body: bytes, flags: int) -> bytes:
    content = struct.pack(">BBH", 0, 0, queue) + body
    return struct.pack("=IHHII", 16 + len(content), kind, flags, 0, 0) + content
