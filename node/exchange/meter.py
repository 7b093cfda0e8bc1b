"""The meter: every byte a node sends or receives, by direction, kind and the other end.

Counted are gRPC messages as they enter and leave the transport: our own frame prefix, the body, and the 5
bytes that gRPC puts before every message. HTTP/2 frame headers (9 bytes per 16 KiB) and packet headers are
not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from protos import traffic
from protos.traffic import COORDINATOR, PREFIX_BYTES, Traffic

Direction = Literal["up", "down"]
Kind = Literal["contribution", "result", "control", "state"]

DIRECTIONS: Final[tuple[Direction, ...]] = ("up", "down")
KINDS: Final[tuple[Kind, ...]] = ("contribution", "result", "control", "state")
MESSAGE_PREFIX_BYTES: Final = PREFIX_BYTES

_DIRECTIONS: Final[dict[Direction, traffic.Direction]] = {"up": "sent", "down": "received"}


class Meter:
    """Totals since the node started. One thread adds; any thread may read.

    Args:
        on_bytes: called with every addition (direction, kind, bytes).

    Attributes:
        traffic: the same bytes by the other end.
    """

    def __init__(self, on_bytes: Callable[[Direction, Kind, int], None] | None = None) -> None:
        self.traffic = Traffic()
        self._bytes = {(direction, kind): 0 for direction in DIRECTIONS for kind in KINDS}
        self._listeners = [] if on_bytes is None else [on_bytes]

    def listen(self, on_bytes: Callable[[Direction, Kind, int], None]) -> None:
        """Call this with every addition, too."""
        self._listeners.append(on_bytes)

    def add(self, direction: Direction, kind: Kind, message_bytes: int, peer: str = COORDINATOR) -> None:
        """Count one message of ``message_bytes`` bytes, and its prefix, to or from ``peer``."""
        nbytes = message_bytes + MESSAGE_PREFIX_BYTES
        self.traffic.add(peer, _DIRECTIONS[direction], kind, message_bytes)
        self._bytes[direction, kind] += nbytes
        for listener in self._listeners:
            listener(direction, kind, nbytes)

    def total(self, direction: Direction) -> int:
        """Bytes of all kinds in one direction."""
        return sum(self._bytes[direction, kind] for kind in KINDS)

    def counts(self) -> dict[tuple[Direction, Kind], int]:
        """A copy of every counter."""
        return dict(self._bytes)
