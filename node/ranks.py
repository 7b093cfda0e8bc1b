"""The ranks of a node: one process, or the processes of an island, which do everything together."""

from __future__ import annotations

from typing import Protocol

from node.exchange.base import ExchangeError, Order


class RankError(ExchangeError):
    """The ranks of a node have lost each other, or differ in what they do; the text says who, and where."""


class Ranks(Protocol):
    """What the worker's loop needs of the other ranks of its node.

    Everything but the attributes and :meth:`close` is a collective: all ranks call it, in the same order.
    Each wait has a deadline; a rank that is gone or late makes the others raise
    :class:`RankError`, which names it and what was waited for.

    Attributes:
        rank: of this process, from 0. Rank 0 leads: it alone speaks with the coordinator.
        size: how many there are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def share(self, order: Order | None) -> Order:
        """The leader's next order, on all ranks; ``None`` is given by those that do not lead."""
        ...

    def agree(self, ok: bool) -> bool:
        """Whether all ranks say ``ok``."""
        ...

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        """What every rank gave, by rank; ``what`` it is, for errors."""
        ...

    def close(self, reason: str) -> None:
        """Leave. Ranks that still wait for an order of the leader end with the leader's ``reason``; safe to
        call twice."""
        ...


class Alone:
    """A node of one process."""

    rank = 0
    size = 1

    def share(self, order: Order | None) -> Order:
        """The order itself."""
        assert order is not None, "a rank that is alone leads"
        return order

    def agree(self, ok: bool) -> bool:
        """``ok``."""
        return ok

    def gather(self, what: str, mine: bytes) -> list[bytes]:
        """``mine`` alone."""
        return [mine]

    def close(self, reason: str) -> None:
        """Nothing to leave."""
