"""The file of a run's tokens: read by a running coordinator, changed by whoever owns its folder."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from coordinator.tokens import TokenBook, TokenError
from coordinator.whole_file import write_whole

FILE: Final = "tokens.json"
LOCK: Final = "tokens.lock"
MAX_BYTES: Final = 4 << 20
LOCK_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 0.05


class TokenFile:
    """The book in a folder.

    Args:
        folder: of the coordinator.

    Attributes:
        book: as last read; empty while there is no file.

    Raises:
        TokenError: it is damaged, or others may change it.
        OSError: it cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self._lock = folder / LOCK
        self.book = TokenBook()
        self._seen: tuple[int, ...] | None = None
        self.look()

    def look(self) -> bool:
        """Read it again if it has changed; whether the book is another one. What was read before stays if
        that fails.

        Raises:
            TokenError, OSError: as above.
        """
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            seen, book = None, TokenBook()
        else:
            seen = (status.st_ino, status.st_mtime_ns, status.st_size)
            book = self.book if seen == self._seen else self._read(status)
        if seen == self._seen:
            return False
        changed, self.book, self._seen = book != self.book, book, seen
        return changed

    def edit(
        self,
        change: Callable[[TokenBook], TokenBook],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> TokenBook:
        """Change the book; of several who do so at once, each sees what the one before has written.

        Raises:
            TokenError: from ``change``; or the file is damaged, or somebody else changes it for too long.
            OSError: it cannot be written.
        """
        with self._alone(now, sleep):
            self.look()
            changed = change(self.book)
            if changed != self.book:
                write_whole(self.path, json.dumps(changed.to_json(), indent=1) + "\n", 0o600)
                self.look()
        return self.book

    def _read(self, status: os.stat_result) -> TokenBook:
        if status.st_mode & 0o022:
            raise TokenError(f"others may write {self.path}, and let themselves in: chmod 600 {self.path}")
        try:
            if status.st_size > MAX_BYTES:
                raise TokenError(f"it has {status.st_size} bytes")
            return TokenBook.from_json(json.loads(self.path.read_text(encoding="utf-8")))
        except (TokenError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise TokenError(
                f"the tokens in {self.path} cannot be read ({str(error)[:200]}): bring back a copy, or "
                "remove the file; all invites are void then"
            ) from None

    @contextlib.contextmanager
    def _alone(self, now: Callable[[], float], sleep: Callable[[float], None]) -> Iterator[None]:
        end = now() + LOCK_SECONDS
        handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if now() >= end:
                        raise TokenError(
                            f"somebody else changes the tokens in {self.path} for too long: try again"
                        ) from None
                    sleep(_RETRY_SECONDS)
            yield
        finally:
            os.close(handle)
