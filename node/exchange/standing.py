"""What bulk calls need of the session in whose name they are made, whichever rank of the node makes them."""

from __future__ import annotations

import asyncio
from typing import Protocol

from node.exchange.base import RoundOrder


class Standing(Protocol):
    """The leader's own session, or what another rank knows of it.

    Attributes:
        halted: the node has been told to leave before the run's end, or cannot go on.
    """

    halted: asyncio.Event

    @property
    def secret(self) -> str:
        """For the metadata of bulk calls."""
        ...

    @property
    def node(self) -> str:
        """Name of the node in the present session."""
        ...

    @property
    def generation(self) -> int:
        """Of the present stream; grows with every reconnect."""
        ...

    @property
    def connected(self) -> bool:
        """Whether that stream stands."""
        ...

    async def confirmed(self, order: RoundOrder) -> RoundOrder:
        """The order as the present stream has it; raises :class:`RoundLost` if that has another one."""
        ...

    async def offered_again(self, order: RoundOrder) -> RoundOrder:
        """Wait for a newer stream to open the order's round; raises :class:`RoundLost` if it does not."""
        ...

    async def superseded(self, order: RoundOrder) -> None:
        """Wait for a newer stream than that which brought ``order``, and for its first order, which is not
        taken. Does not end if there is none."""
        ...
