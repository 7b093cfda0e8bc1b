"""The shared state of a node whose ranks hold a part of it each: its digest, and its way through the leader.

The leader alone speaks with the coordinator. For an upload it collects what the others hold, after a download
it hands out what is theirs, both piece by piece: no rank ever holds more than its own part and one piece. And
both are apart from the network: a transfer that breaks off there leaves nobody waiting here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist

from node.exchange.base import ExchangeError
from node.exchange.tensor_bytes import LayoutError, Row, byte_view, fill, read_pieces, spans, total_bytes
from node.joint import disjoint, gathered
from node.ranks import Ranks
from node.state import SharedState, main_dtype
from protos.digests import combine


class Mail(Protocol):
    """How pieces of tensors go between the ranks of a node. Both wait; a RuntimeError says that the other is
    gone."""

    def send(self, data: torch.Tensor, rank: int) -> object:
        """Give ``data``, on the CPU, to ``rank``."""
        ...

    def receive(self, data: torch.Tensor, rank: int) -> object:
        """Fill ``data``, on the CPU, with what ``rank`` sends."""
        ...


class GroupMail:
    """By the default process group."""

    def send(self, data: torch.Tensor, rank: int) -> None:
        """See :class:`Mail`."""
        dist.send(data, rank)

    def receive(self, data: torch.Tensor, rank: int) -> None:
        """See :class:`Mail`."""
        dist.recv(data, rank)


class WholeState:
    """All of a node's shared state. Everything but the attributes is a collective of the node's ranks.

    Args:
        part: what this rank holds.
        ranks: of the node.
        mail: between them; by default that of the default process group, whose ranks they are.

    Attributes:
        part: what this rank holds.
        rows: of all tensors, in order.
        nbytes: of all tensors.
        dtype: that most of the elements have.

    Raises:
        LayoutError: two ranks hold a tensor of one name.
        ExchangeError: a rank is gone.
    """

    def __init__(self, part: SharedState, ranks: Ranks, mail: Mail | None = None) -> None:
        self.part = part
        self._ranks = ranks
        self._mail = mail or GroupMail()
        mine = [[row.name, row.dtype, list(row.shape)] for row in part.rows]
        held = gathered(ranks, "the tensors that each rank holds", mine)
        self._rows = sorted(
            (
                (rank, Row(name, dtype, tuple(shape)))
                for rank, rows in enumerate(held)
                for name, dtype, shape in rows
            ),
            key=lambda item: item[1].name,
        )
        for (_, one), (_, other) in zip(self._rows, self._rows[1:], strict=False):
            if one.name == other.name:
                raise LayoutError(f"two ranks of this node hold {one.name!r}: each tensor has one owner")
        self.rows = tuple(row for _, row in self._rows)
        self.nbytes = total_bytes(self.rows)
        self.dtype = main_dtype(self.rows)

    def digest(self) -> str:
        """The digest of the whole."""
        mine = self.part.digests()
        return combine(disjoint(gathered(self._ranks, "the digests of the shared state", mine)))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Bytes ``start`` to ``stop`` of all tensors, end to end, as (offset, bytes) in order.

        The leader gets them, one piece of a tensor in memory at a time; others give theirs, and get nothing.
        All ranks have to come to the end of it.
        """
        me = self._ranks.rank
        for rank, row, offset in self._overlapping(start, stop):
            low, high = max(0, start - offset), min(row.nbytes, stop - offset)
            if me == rank:
                for position, data in read_pieces(self.part.tensors[row.name], low, high):
                    if me:
                        self._between(self._mail.send, data, 0)
                    else:
                        yield offset + position, byte_view(data)
            elif not me:
                for position, end in spans(low, high):
                    data = torch.empty(end - position, dtype=torch.uint8)
                    self._between(self._mail.receive, data, rank)
                    yield offset + position, byte_view(data)

    def fill(self, read: Callable[[int, memoryview], object] | None) -> None:
        """Overwrite all tensors, one piece of one after the other.

        Args:
            read: on the leader: fills a buffer with the bytes from an offset on, of all tensors end to end.
                ``None`` on others.
        """
        me = self._ranks.rank
        for rank, row, offset in self._overlapping(0, self.nbytes):
            if me and me == rank:
                fill(self.part.tensors[row.name], lambda _, data: self._between(self._mail.receive, data, 0))
            elif not me:
                assert read is not None, "the leader reads"
                take = functools.partial(_read_at, read, offset)
                if rank == 0:
                    fill(self.part.tensors[row.name], take)
                    continue
                for position, end in spans(0, row.nbytes):
                    data = torch.empty(end - position, dtype=torch.uint8)
                    take(position, data)
                    self._between(self._mail.send, data, rank)

    def _overlapping(self, start: int, stop: int) -> Iterator[tuple[int, Row, int]]:
        """The tensors that have bytes there: (rank, row, offset of its first byte)."""
        offset = 0
        for rank, row in self._rows:
            if row.nbytes and offset < stop and offset + row.nbytes > start:
                yield rank, row, offset
            offset += row.nbytes

    def _between(self, move: Callable[[torch.Tensor, int], object], data: torch.Tensor, rank: int) -> None:
        try:
            move(data, rank)
        except RuntimeError as error:
            raise ExchangeError(
                f"handing on the shared state failed between the ranks of this node: {error}"
            ) from error


def _read_at(
    read: Callable[[int, memoryview], object], offset: int, position: int, data: torch.Tensor
) -> None:
    read(offset + position, byte_view(data))
