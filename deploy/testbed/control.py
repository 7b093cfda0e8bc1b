"""How another terminal reaches a test bed: one JSON object each way over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from deploy.errors import UserError

SECONDS: Final = 30.0  # for an answer; a link's shape is changed by a few commands
_ASKING_SECONDS: Final = 1.0  # for the rest of a request that has begun
_MOST: Final = 1 << 20
_WAITING: Final = 8

Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]  # raises UserError for what it refuses


class Desk:
    """Where a test bed takes requests, between two looks at its run. A context manager."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen(_WAITING)
        self._socket.setblocking(False)

    def serve(self, seconds: float, answer: Answer) -> None:
        """Wait so long for a request, and answer it and those behind it."""
        while select.select([self._socket], [], [], seconds)[0]:
            seconds = 0.0
            with contextlib.suppress(OSError):  # whoever asked has gone
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(_ASKING_SECONDS)
                    connection.sendall(_line(_answered(_read(connection), answer)))

    def close(self) -> None:
        """Take no more requests."""
        self._socket.close()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(path: Path, request: Mapping[str, Any], seconds: float = SECONDS) -> dict[str, Any]:
    """Ask a test bed and return its answer.

    Raises:
        UserError: nobody answers there, or the answer is a refusal.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            connection.connect(str(path))
            connection.sendall(_line(request))
            reply = json.loads(_read(connection))
    except (OSError, ValueError) as error:
        raise UserError(f"the test bed at {path} does not answer: {error}") from error
    if not isinstance(reply, dict) or not reply.get("ok"):
        text = reply.get("error") if isinstance(reply, dict) else None
        raise UserError(str(text or "the test bed has refused"))
    return reply


def _answered(text: bytes, answer: Answer) -> Mapping[str, Any]:
    try:
        request = json.loads(text)
        if not isinstance(request, dict):
            raise UserError("a request is a JSON object")
        return {"ok": True, **answer(request)}
    except (UserError, ValueError) as error:
        return {"ok": False, "error": str(error)}


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def _read(connection: socket.socket) -> bytes:
    """One line."""
    text = b""
    while not text.endswith(b"\n") and len(text) < _MOST:
        more = connection.recv(65536)
        if not more:
            break
        text += more
    return text
