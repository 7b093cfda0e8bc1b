"""The ranks of an island: orders travel through the store that the ranks met at, answers through gloo."""

from __future__ import annotations

import contextlib
import os
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from node.exchange.base import Order
from node.exchange.order_json import order_from_json, order_to_json
from node.island.broadcast import BEAT_SECONDS, SILENCE_SECONDS, Receiver, Sender, Store
from node.island.deadline import cause, word_of
from node.island.session_news import StoreNews
from node.ranks import RankError

ENVIRONMENT: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # of torchrun
MAX_ANSWER_BYTES: Final = 64 << 20
SLICE_SECONDS: Final = 0.5  # of a wait, so that an interrupt gets through


class Gatherer(Protocol):
    """What is used of a process group."""

    def allgather(self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor]) -> dist.Work:
        """Tensors of all ranks, by rank."""


class IslandRanks:
    """Implements :class:`node.ranks.Ranks` for the processes of an island.

    An order is waited for as long as the leader gives signs of life; everything else is over after
    ``seconds``. Used by one thread.

    Args:
        rank: of this process.
        size: how many there are.
        connect: opens another connection to the store of the ranks, which holds nothing of another island.
        group: gloo, of all ranks, for nothing else than this; ``None`` for a single rank.
        seconds: that a rank waits for the answers of the others: more than a round, with all that can delay
            it, may take.
        silence: seconds without a sign of life after which the leader counts as gone.
        beat: seconds between signs of life.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connect: Callable[[], Store],
        group: Gatherer | None,
        *,
        seconds: float,
        silence: float = SILENCE_SECONDS,
        beat: float = BEAT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank, self.size = rank, size
        self._store, self._group = connect(), group
        self._seconds, self._clock = seconds, clock
        self._connect, self._silence, self._beat = connect, silence, beat
        self._ends: list[Sender | Receiver] = []
        self._orders = self._end("order")

    @classmethod
    def from_environment(cls, *, device: torch.device | str = "cpu", seconds: float) -> IslandRanks:
        """Form the island that torchrun has started.

        Makes the default process group (gloo for the CPU; for CUDA NCCL as well, on device LOCAL_RANK) unless
        there is one, and another one, of gloo, for what the ranks tell each other.

        Args:
            device: where the model is.
            seconds: see the class; also the timeout of both groups' collectives.

        Raises:
            RankError: a variable is missing, or not all ranks came in time.
        """
        missing = [name for name in ENVIRONMENT if name not in os.environ]
        if missing:
            raise RankError(
                f"the environment does not say which rank this is ({', '.join(missing)} is missing): start "
                "the ranks of an island with torchrun"
            )
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        timeout = timedelta(seconds=seconds)
        cuda = torch.device(device).type == "cuda"

        def connect() -> Store:
            client = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
            store: Store = dist.PrefixStore(f"atoll/ranks/{start}", client)  # type: ignore[attr-defined]
            return store

        try:
            if cuda:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            if not dist.is_initialized():
                dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout)
            return cls(rank, size, connect, dist.new_group(backend="gloo", timeout=timeout), seconds=seconds)
        except (RuntimeError, ValueError) as error:
            raise RankError(f"rank {rank} of {size} has not met the others: {error}") from error

    @cached_property
    def news(self) -> StoreNews:
        """News of the leader's session: ``publish`` is for its :class:`~node.exchange.hub.HubExchange`, the
        whole is for the :class:`~node.exchange.lane.LaneExchange` of another rank.

        All ranks take it, or none: whoever waits for news counts on the leader's signs of life.
        """
        return StoreNews(self._end("session"))

    def _end(self, name: str) -> Sender | Receiver:
        """This rank's side of the messages of one name."""
        readers, store = self.size - 1, self._connect()
        end: Sender | Receiver = (
            Sender(store, name, readers, every=self._beat)
            if self.rank == 0
            else Receiver(store, name, readers, silence=self._silence)
        )
        self._ends.append(end)
        return end

    # ----------------------------------------------------------------------------- together

    def share(self, order: Order | None) -> Order:
        """See :class:`node.ranks.Ranks`; there is no bound to the wait but the leader's life."""
        if (order is None) == (self.rank == 0):
            raise ValueError("rank 0 gives the order, and no other rank does")
        end = self._orders
        if order is not None and isinstance(end, Sender):
            end.send(order_to_json(order))
            return order
        assert isinstance(end, Receiver)
        try:
            return order_from_json(end.receive("the next order"))
        except ValueError as error:
            raise RankError(f"rank {self.rank} cannot read an order of rank 0: {error}") from error

    def agree(self, ok: bool) -> bool:
        """See :class:`node.ranks.Ranks`."""
        return all(self._numbers("an agreement", int(ok)))

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        """See :class:`node.ranks.Ranks`.

        Raises:
            RankError: a rank is gone or late, asks for something else, or gives more than 64 MiB.
        """
        sizes = self._numbers(what, len(mine))
        longest = max(sizes)
        if longest > MAX_ANSWER_BYTES:
            raise RankError(
                f"rank {sizes.index(longest)} gives {longest} bytes for {what}; at most "
                f"{MAX_ANSWER_BYTES} may travel between ranks"
            )
        if not longest:
            return [b""] * self.size
        row = torch.zeros(longest, dtype=torch.uint8)
        if mine:
            row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self._all(what, row)
        return [bytes(one[:size].numpy()) for one, size in zip(rows, sizes, strict=True)]

    def close(self, reason: str) -> None:
        """See :class:`node.ranks.Ranks`."""
        for end in self._ends:
            end.close(reason)
        if "news" in self.__dict__:
            self.news.close()

    def _numbers(self, what: str, mine: int) -> list[int]:
        """A number of every rank, all asked for the same."""
        mark = zlib.crc32(what.encode())
        answers = [row.tolist() for row in self._all(what, torch.tensor([mark, mine]))]
        other = [rank for rank, (theirs, _) in enumerate(answers) if theirs != mark]
        if other:
            raise RankError(
                f"rank {self.rank} is at {what}, rank {other[0]} at something else: the ranks of an "
                "island take the same steps, so all must have the same options and the same version"
            )
        return [number for _, number in answers]

    def _all(self, what: str, mine: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape and dtype."""
        if self._group is None:
            return [mine]
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        end = self._clock() + self._seconds
        try:
            work = self._group.allgather([rows], [mine])
            while not work.is_completed() and self._clock() < end:
                with contextlib.suppress(RuntimeError):  # not complete yet; or failed, which is raised below
                    work.wait(timedelta(seconds=SLICE_SECONDS))
            if not work.is_completed():
                raise RuntimeError(f"not complete after {self._seconds:g} s")
            work.wait()
        except RuntimeError as error:
            raise RankError(self._missing(what, error)) from error
        return rows

    def _missing(self, what: str, error: RuntimeError) -> str:
        first = cause(error)
        others = word_of(range(self.size), self.rank, f"{what}: {first}", self._store)
        return f"{what}: rank {self.rank} waits in vain for the other ranks of this node: {others} ({first})"
