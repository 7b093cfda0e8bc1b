"""Rounds whose slices travel between nodes, as the contributions and replays of one rank see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from node.exchange.base import RoundOrder
from node.exchange.filling import Filling
from node.exchange.meter import Kind as Counted
from protos import atoll_pb2 as pb


class Between(Protocol):
    """Used in the network thread. A rank of several gives, and gets, the bytes of its own lane."""

    async def reduce(
        self,
        order: RoundOrder,
        payload: memoryview | None,
        filling: Filling | None,
        into: memoryview,
        reason: str,
        on_sent: Callable[[], None] = lambda: None,
    ) -> pb.Commit:
        """Contribute to a round, or abstain, and put its result in ``into``.

        Args:
            order: with a topology.
            payload: of the round; ``None``: abstain for ``reason``.
            filling: how far the payload has been written, if it is still being written.
            into: as many bytes as the result has.
            reason: see ``payload``.
            on_sent: called once the whole payload has been handed over.

        Returns:
            The commit; the result is whole, unless nobody has voted.

        Raises:
            Trouble: the round is not committed in time, or its result is not to be had (then
                :meth:`decided`); or what the coordinator has said makes no sense.
        """
        ...

    async def complete(self, commit: pb.Commit, into: memoryview, counted: Counted) -> None:
        """Put a committed result in ``into``, of which parts may be there already.

        Args:
            commit: with slices.
            into: the result.
            counted: what kind of bytes it is.

        Raises:
            Trouble: it is not to be had at present, or the commit is damaged.
        """
        ...

    def decided(self, round_index: int) -> bool:
        """Whether the result of a round comes by this way, whatever becomes of the session."""
        ...

    def rejoined(self) -> None:
        """Another stream of the session has opened the round in flight again."""
        ...
