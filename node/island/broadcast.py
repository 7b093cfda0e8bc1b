"""Messages from the leader of an island to its other ranks, through the store that they met at.

While there is nothing to say, the leader says that it is there: whoever waits can wait for hours, and still
learns within a bounded time that nothing will come any more. Messages are text; nothing is unpickled.
"""

from __future__ import annotations

import queue
import threading
from datetime import timedelta
from typing import Final, Protocol

from node.exchange.base import ExchangeError
from node.island.deadline import cause
from node.ranks import RankError

BEAT_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 60.0
MAX_MESSAGE_BYTES: Final = 1 << 20
_CLOSE_SECONDS: Final = 5.0

_BEAT, _MESSAGE, _END = "b", "m", "e"  # first character


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str) -> None:
        """Keep ``value``."""

    def get(self, key: str) -> bytes:
        """A value that is there."""

    def add(self, key: str, amount: int) -> int:
        """Count, from 0 on; the new count."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Until all keys are there; raises RuntimeError when they are not in time."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""

    def delete_key(self, key: str) -> bool:
        """Forget a value; whether it was there."""


class Sender:
    """The leader's side. A thread of its own talks to the store, so that :meth:`send` never waits.

    Args:
        store: a connection for this sender alone.
        name: of the messages, in the store.
        readers: how many ranks read them; without any, nothing is sent.
        every: seconds between signs of life.
    """

    def __init__(self, store: Store, name: str, readers: int, *, every: float = BEAT_SECONDS) -> None:
        self._store, self._name, self._every = store, name, every
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failure = ""
        self._closed = False
        self._thread: threading.Thread | None = None
        if readers:
            self._thread = threading.Thread(target=self._run, name=f"atoll-send-{name}", daemon=True)
            self._thread.start()

    def send(self, text: str) -> None:
        """To every reader.

        Raises:
            ExchangeError: an earlier message did not get through, or this is closed.
            ValueError: it is too long.
        """
        if len(text) >= MAX_MESSAGE_BYTES:
            raise ValueError(f"a message between ranks has less than {MAX_MESSAGE_BYTES} bytes")
        if self._failure:
            raise ExchangeError(f"the other ranks of this node cannot be told anything: {self._failure}")
        if self._closed:
            raise ExchangeError("the other ranks of this node have been told that nothing more comes")
        if self._thread is not None:
            self._queue.put(_MESSAGE + text)

    def close(self, reason: str) -> None:
        """The last message: why nothing more comes. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(_END + reason[:1000])
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        number = 0
        try:
            while True:
                try:
                    message = self._queue.get(timeout=self._every)
                except queue.Empty:
                    message = _BEAT
                self._store.set(f"{self._name}/{number}", message)
                number += 1
                if message.startswith(_END):
                    return
        except RuntimeError as error:
            self._failure = cause(error)


class Receiver:
    """The side of one of the other ranks; one thread at a time.

    Args:
        store: a connection for this receiver alone: while it waits, no other call gets through.
        name: of the messages, in the store.
        readers: how many ranks read them; the last one removes what it has read.
        silence: seconds without a sign of life after which the leader counts as gone.
    """

    def __init__(self, store: Store, name: str, readers: int, *, silence: float = SILENCE_SECONDS) -> None:
        self._store, self._name, self._readers, self._silence = store, name, readers, silence
        self._number = 0
        self._closed = threading.Event()

    def receive(self, what: str) -> str:
        """The next message; waits for it as long as the leader gives signs of life.

        Args:
            what: is waited for.

        Raises:
            ExchangeError: the leader has ended, with its reason; this was closed.
            RankError: the leader, or the store, is gone.
        """
        while not self._closed.is_set():
            message = self._next(what)
            if message.startswith(_MESSAGE):
                return message[1:]
            if message.startswith(_END):
                raise ExchangeError(f"{what} will not come: rank 0 has ended ({message[1:]})")
        raise ExchangeError(f"{what} is not waited for any more: this rank is leaving")

    def close(self, reason: str = "") -> None:
        """End :meth:`receive` with the leader's next sign of life; nobody asks for the reason."""
        self._closed.set()

    def _next(self, what: str) -> str:
        key = f"{self._name}/{self._number}"
        try:
            self._store.wait([key], timedelta(seconds=self._silence))
            message = self._store.get(key)
            if self._store.add(f"{key}/read", 1) == self._readers:
                self._store.delete_key(key)
                self._store.delete_key(f"{key}/read")
        except RuntimeError as error:
            raise RankError(
                f"{what} will not come: rank 0, or the store of the ranks, gives no sign of life "
                f"({cause(error)}; the limit is {self._silence:g} s): look at the log of rank 0"
            ) from error
        if len(message) > MAX_MESSAGE_BYTES:
            raise RankError(f"{what} has {len(message)} bytes, more than a message between ranks can have")
        self._number += 1
        return message.decode()
