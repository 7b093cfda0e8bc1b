"""Ranks of one node that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from node.checkpoint import CheckpointError
from node.exchange.base import ExchangeError, Order
from node.ranks import Ranks

T = TypeVar("T")

DEADLINE = 100.0


class Virtual:
    """Ranks that are threads of this process."""

    def __init__(self, rank: int, barrier: threading.Barrier, board: dict[int, bytes]) -> None:
        self.rank, self.size = rank, barrier.parties
        self._barrier, self._board = barrier, board

    def share(self, order: Order | None) -> Order:
        raise AssertionError("a checkpoint needs no orders")

    def agree(self, ok: bool) -> bool:
        return all(answer == b"1" for answer in self.gather("agreement", b"1" if ok else b"0"))

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        try:
            self._board[self.rank] = mine
            self._barrier.wait(DEADLINE)
            found = [self._board[rank] for rank in range(self.size)]
            self._barrier.wait(DEADLINE)
        except threading.BrokenBarrierError:
            raise ExchangeError(f"a rank is gone: waited for {what}") from None
        return found


def on_all(size: int, action: Callable[[Ranks], T]) -> list[T | Exception]:
    """What ``action`` returned or raised on each rank."""
    barrier, board = threading.Barrier(size), {}

    def run(rank: int) -> T | Exception:
        try:
            return action(Virtual(rank, barrier, board))
        except (CheckpointError, ExchangeError) as error:
            return error
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
