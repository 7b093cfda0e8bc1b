"""News of the leader's session, on their way through the store of the island's ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Final

from node.exchange.base import ExchangeError
from node.exchange.news import SessionNews
from node.island.broadcast import Receiver, Sender

_CLOSE_SECONDS: Final = 5.0


class StoreNews:
    """Implements :class:`node.exchange.news.NewsSource`.

    Args:
        ends: the sender on the leader, the receiver on another rank.
    """

    def __init__(self, ends: Sender | Receiver) -> None:
        self._ends = ends
        self._thread: threading.Thread | None = None

    def publish(self, news: SessionNews) -> None:
        """For the leader's :class:`~node.exchange.hub.HubExchange`; does not block.

        News that do not get through are no error here: the other ranks end by themselves then.
        """
        assert isinstance(self._ends, Sender), "only the leader has news of the session"
        with contextlib.suppress(ExchangeError):
            self._ends.send(news.to_json())

    def follow(self, on_news: Callable[[SessionNews], None], on_failure: Callable[[str], None]) -> None:
        """See :class:`node.exchange.news.NewsSource`; for one follower a process."""
        receiver = self._ends
        assert isinstance(receiver, Receiver) and self._thread is None, (
            "followed once, by ranks that do not lead"
        )

        def run() -> None:
            try:
                while True:
                    on_news(SessionNews.from_json(receiver.receive("news of the node's session")))
            except (ExchangeError, ValueError) as error:
                on_failure(str(error))

        self._thread = threading.Thread(target=run, name="atoll-session-news", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing more is reported. The thread ends with the leader's next sign of life; it is waited for, as
        it must not be within the store when the interpreter ends."""
        if isinstance(self._ends, Receiver):
            self._ends.close()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
