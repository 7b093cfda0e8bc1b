"""A coordinator that has moved to another address is found again by what other nodes know of it."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from node.exchange.link import Link
from node.exchange.retry import Say, Timing
from node.exchange.trouble import Trouble

LOST_SECONDS: Final = 5.0  # without an answer before others are asked
_MAX_TRIED: Final = 8  # addresses, at once


class Whereabouts(Protocol):
    """Where nodes tell each other the address of the coordinator; the swarm's
    :class:`~node.exchange.swarm.presence.Presence` is one."""

    def coordinator_is(self, address: str) -> None:
        """This node has a session at ``address`` (HOST:PORT); empty: at none."""
        ...

    async def find_coordinator(self) -> tuple[str, ...]:
        """Addresses that other nodes have told, what was told last first.

        Raises:
            Trouble: nobody can be asked.
        """
        ...


class Follower:
    """Goes after the coordinator; used in the network thread.

    What others tell is a hint: an address is taken only if a coordinator answers there that takes this node's
    token and leads the same run.

    Args:
        link: to the coordinator; it is moved.
        told: what nodes tell each other.
        run_digest: of the run.
        timing: clock.
        say: receives a sentence when the coordinator has been found.
    """

    def __init__(self, link: Link, told: Whereabouts, run_digest: str, timing: Timing, say: Say) -> None:
        self._link, self._told, self._run_digest = link, told, run_digest
        self._timing, self._say = timing, say
        self._since: float | None = None  # when it was lost
        self._said = ""

    def reached(self) -> None:
        """The coordinator has said something in the present session."""
        self._since = None
        if self._said != self._link.address:
            self._said = self._link.address
            self._told.coordinator_is(self._said)

    async def lost(self) -> bool:
        """The coordinator cannot be reached: once that has lasted for :data:`LOST_SECONDS`, look for it.

        Returns:
            Whether the link goes to another address now.
        """
        now = self._timing.now()
        if self._since is None:
            self._since = now
        if now - self._since < LOST_SECONDS:
            return False
        if self._said:
            self._said = ""
            self._told.coordinator_is("")
        try:
            told = await self._told.find_coordinator()
        except Trouble:
            return False  # the swarm has its own troubles, and says so
        others = [address for address in told if address != self._link.address][:_MAX_TRIED]
        fits = await asyncio.gather(*map(self._fits, others))
        for address, fitting in zip(others, fits, strict=True):
            if fitting:
                before = self._link.address
                self._link.move(address)
                self._since = None
                self._say(f"the coordinator is at {address} now, no more at {before}, as other nodes know")
                return True
        return False

    async def _fits(self, address: str) -> bool:
        other = self._link.elsewhere(address)
        other.open()
        try:
            return (await other.get_run()).run_digest == self._run_digest
        except Trouble:
            return False
        finally:
            await other.close()
