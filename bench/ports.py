"""Ports for servers that are told beforehand where to listen."""

from __future__ import annotations

import random
import socket
from typing import Final

_RANGE: Final = (20_000, 30_000)  # systems give ports above to whoever asks for any
_TRIES: Final = 100


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody listens on now.

    Nobody gets it who asks the system for any port: it stays free until its server comes up, and while that
    is started again.

    Raises:
        OSError: none was found.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for left in reversed(range(_TRIES)):
        port = random.SystemRandom().randrange(*_RANGE)  # two processes do not draw the same
        with socket.socket(family) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                if not left:
                    raise
            else:
                return port
    raise AssertionError("unreachable")
