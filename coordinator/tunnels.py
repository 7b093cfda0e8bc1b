"""Tunnels: streams between nodes that cannot reach each other, through the coordinator, which reaches both.

A node calls another one; that is told a secret key on its session, and comes with it. From then on the
messages of each go to the other, a few at a time, so that whoever is slow slows the other one down and does
not fill the coordinator's memory. What they say is none of its business. A tunnel ends with either node's
session.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from coordinator.nodes import Node
from protos.atoll_pb2 import CoordinatorMessage
from protos.atoll_pb2 import Tunnel as TunnelOrder
from protos.refusal import TUNNEL, Code, Refused
from protos.wire import MAX_MESSAGE_BYTES, PEER_END


@dataclass(frozen=True)
class TunnelLimits:
    """What tunnels may take."""

    answer: float = 10.0  # seconds for the node that is called to come
    queued: int = 2  # messages in each direction of a tunnel
    of_a_node: int = 256  # tunnels that it has called for, or is called to
    of_a_pair: int = 128  # tunnels that one node has called another one to


LIMITS: Final = TunnelLimits()


class _Direction:
    """Messages one way: one end feeds them, the other one takes them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._messages: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._refusal: Refused | None = None
        self.ended = False  # the last message has been fed
        self.passed = False  # and taken

    async def feed(self, message: bytes) -> None:
        await self._until(lambda: len(self._messages) < self._limit)
        self._messages.append(message)
        self.ended = message == PEER_END
        self._changed.set()

    async def take(self) -> bytes:
        await self._until(lambda: bool(self._messages))
        message = self._messages.popleft()
        self.passed = message == PEER_END
        self._changed.set()
        return message

    async def finished(self) -> None:
        """Wait until the last message has been fed."""
        await self._until(lambda: self.ended)

    def refuse(self, refusal: Refused) -> None:
        self._refusal = refusal
        self._messages.clear()
        self._changed.set()

    async def _until(self, holds: Callable[[], bool]) -> None:
        while self._refusal is None and not holds():
            self._changed.clear()
            await self._changed.wait()
        if self._refusal is not None:
            raise self._refusal


class Tunnel:
    """Two ends, and what is on its way between them.

    Attributes:
        caller, target: the nodes.
        key: what the target has to show.
        answered: it has come.
        ends: of the caller, and of the target.
    """

    def __init__(self, caller: Node, target: Node, limits: TunnelLimits, forget: Callable[[], None]) -> None:
        self.caller, self.target = caller, target
        self.key = secrets.token_hex(16)
        self.answered = asyncio.Event()
        self.refusal: Refused | None = None
        self._limits = limits
        self._forget = forget
        self._directions = there, back = _Direction(limits.queued), _Direction(limits.queued)
        self.ends = TunnelEnd(self, caller, there, back), TunnelEnd(self, target, back, there)

    async def joined(self) -> None:
        """Wait until the target has come; see :meth:`TunnelEnd.joined`."""
        try:
            await asyncio.wait_for(self.answered.wait(), self._limits.answer)
        except asyncio.TimeoutError:
            late = f"{self.target.node} did not come to the tunnel within {self._limits.answer:g} s"
            self.refuse(late, "DEADLINE_EXCEEDED")
        if self.refusal is not None:
            raise self.refusal

    def left(self, node: Node, *, reason: str) -> None:
        """A node gives it up."""
        self.refuse(f"the tunnel from {self.caller.node} to {self.target.node} is over: {node.node} {reason}")

    def refuse(self, text: str, code: Code = "ABORTED") -> None:
        """It is over, whatever is on its way."""
        if self.refusal is not None:
            return
        self.refusal = Refused("", text, code)
        self.answered.set()
        for direction in self._directions:
            direction.refuse(self.refusal)
        for end in self.ends:
            if end.on_close is not None:
                end.on_close()
        self._forget()

    def close_once_over(self) -> None:
        """Both nodes may have left, with all that was said."""
        if all(direction.passed for direction in self._directions):
            self._forget()


class TunnelEnd:
    """One node's end of a tunnel, for the stream that the node has open to the coordinator.

    Attributes:
        on_close: set by the transport: break off a write that the node holds up.
    """

    def __init__(self, tunnel: Tunnel, node: Node, up: _Direction, down: _Direction) -> None:
        self._tunnel = tunnel
        self._node = node
        self._up, self._down = up, down
        self.on_close: Callable[[], None] | None = None

    @property
    def refusal(self) -> Refused | None:
        """Why the tunnel came to a bad end."""
        return self._tunnel.refusal

    async def joined(self) -> None:
        """Wait until both nodes are there.

        Raises:
            Refused: the one that was called has not come in time, or one of them has gone.
        """
        await self._tunnel.joined()

    async def feed(self, message: bytes) -> None:
        """Pass a message of this node on; waits while the other node does not read.

        Raises:
            Refused: the tunnel is no more: perhaps because of this message, which is too long or follows the
                last one.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            self._tunnel.left(self._node, reason=f"sent a message of {len(message)} bytes")
        elif self._up.ended:
            self._tunnel.left(self._node, reason="sent a message behind its last one")
        await self._up.feed(message)

    def hung_up(self) -> None:
        """The node sends no more: if it has not sent its last message, the tunnel is broken."""
        if not self._up.ended:
            self._tunnel.left(self._node, reason="broke off")

    async def next(self) -> bytes | None:
        """The next message for this node; ``None`` once both sides' last ones have gone through here.

        Raises:
            Refused: the tunnel is no more.
        """
        if not self._down.passed:
            return await self._down.take()
        await self._up.finished()
        return None

    def close(self) -> None:
        """The node's stream is over, and the tunnel with it unless all has been said."""
        if self._down.passed and self._up.ended:
            self._tunnel.close_once_over()
        else:
            self._tunnel.left(self._node, reason="broke off")


class Tunnels:
    """The tunnels of a run. Lives on the hub's event loop.

    Attributes:
        opened: how many there have been that both nodes came to.
    """

    def __init__(self, limits: TunnelLimits = LIMITS) -> None:
        self._limits = limits
        self._tunnels: dict[str, Tunnel] = {}  # by key
        self.opened = 0

    def __len__(self) -> int:
        return len(self._tunnels)

    def call(self, caller: Node, target: Node | None, name: str) -> TunnelEnd:
        """``caller`` calls ``target``, the node ``name`` if there is one.

        Raises:
            Refused: one of them has no session, or too many tunnels, or the target does not read its orders.
        """
        if target is None or not target.in_session or not caller.in_session or target is caller:
            raise Refused(TUNNEL, f"{caller.node} cannot call {name!r}: no other node of that name is here")
        for node in (caller, target):
            if sum(node in (tunnel.caller, tunnel.target) for tunnel in self._tunnels.values()) >= (
                self._limits.of_a_node
            ):
                raise _too_many(f"{node.node} has {self._limits.of_a_node} tunnels")
        alike = [
            tunnel for tunnel in self._tunnels.values() if (tunnel.caller, tunnel.target) == (caller, target)
        ]
        if len(alike) >= self._limits.of_a_pair:
            raise _too_many(f"{caller.node} has {self._limits.of_a_pair} tunnels to {target.node}")
        tunnel = Tunnel(caller, target, self._limits, lambda: self._forget(tunnel))
        if not target.send(CoordinatorMessage(tunnel=TunnelOrder(key=tunnel.key, caller=caller.node))):
            raise Refused(TUNNEL, f"{target.node} does not read its orders", "UNAVAILABLE")
        self._tunnels[tunnel.key] = tunnel
        return tunnel.ends[0]

    def answer(self, node: Node, key: str) -> TunnelEnd:
        """``node`` comes to the tunnel whose key it was told.

        Raises:
            Refused: there is none (any more) by that key for that node.
        """
        tunnel = self._tunnels.get(key)
        if tunnel is None or tunnel.target is not node or tunnel.answered.is_set():
            raise Refused(TUNNEL, f"no tunnel with this key waits for {node.node}", "NOT_FOUND")
        tunnel.answered.set()
        self.opened += 1
        return tunnel.ends[1]

    def drop(self, node: Node) -> None:
        """The node's session has ended."""
        for tunnel in list(self._tunnels.values()):
            if node in (tunnel.caller, tunnel.target):
                tunnel.left(node, reason="is in the run no more")

    def _forget(self, tunnel: Tunnel) -> None:
        self._tunnels.pop(tunnel.key, None)


def _too_many(what: str) -> Refused:
    return Refused(TUNNEL, f"{what} open: no more at a time", "RESOURCE_EXHAUSTED")
