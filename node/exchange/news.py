"""What the rank that holds a node's session tells the node's other ranks about it.

Every rank of an island contributes on a connection of its own, in the name of one session. Only the leader
sees that session break, come back under another secret, or end; whatever changes, it publishes the whole of
what the others need, and they go by the latest that they know.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Protocol

from node.exchange.base import ExchangeError, RoundOrder
from node.exchange.trouble import RoundLost

MAX_NEWS_BYTES: Final = 1 << 16
MAX_FAILURE: Final = 1000  # characters


@dataclass(frozen=True)
class Opened:
    """A round as a stream of the session has opened it."""

    round: int
    epoch: int
    lease_start: int
    lease_count: int
    result_ready: bool
    topology: int = 0

    @classmethod
    def by(cls, order: RoundOrder) -> Opened:
        """By this order."""
        lease = order.lease_start, order.lease_count
        return cls(order.round, order.epoch, *lease, order.result_ready, order.topology)

    def takes(self, order: RoundOrder) -> bool:
        """Whether what was computed for ``order``, which an earlier stream has brought, may be sent.

        With other samples it must not be: somebody else has those of ``order``, and they would count twice.
        """
        lease = self.lease_start, self.lease_count
        return self.round == order.round and (
            self.result_ready or lease == (order.lease_start, order.lease_count)
        )


def went_on_without(order: RoundOrder, opened: Opened | None, whom: str = "its coordinator") -> str:
    """Why the work for ``order`` is lost to a node that was cut off from ``whom``, in words."""
    if opened is not None and opened.round == order.round:
        return (
            f"round {order.round + 1} is open to this node again, but for other samples: those that it had "
            f"were given to somebody else while it was cut off from {whom}"
        )
    return f"round {order.round + 1} went on without this node while it was cut off from {whom}"


@dataclass(frozen=True)
class SessionNews:
    """A session as its leader sees it.

    Attributes:
        secret: for the metadata of bulk calls.
        node: name of the node in the session.
        generation: of the stream: grows with every reconnect.
        connected: whether the stream stands.
        ordered: whether that stream has brought an order.
        opened: the round that this first order opens; ``None`` if it is of another kind.
        halted: the node has been told to leave before the run's end, or cannot go on.
        failure: why there will be no other stream; empty while there may be.
    """

    secret: str = field(default="", repr=False)
    node: str = ""
    generation: int = 0
    connected: bool = False
    ordered: bool = False
    opened: Opened | None = None
    halted: bool = False
    failure: str = ""

    def to_json(self) -> str:
        """For the way to other ranks."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> SessionNews:
        """Parse what :meth:`to_json` wrote.

        Raises:
            ValueError: anything else; the text says what.
        """
        if len(text) > MAX_NEWS_BYTES:
            raise ValueError(f"news of a session have at most {MAX_NEWS_BYTES} bytes, not {len(text)}")
        try:
            fields: Any = json.loads(text)
        except RecursionError:
            raise ValueError("news of a session are not nested so deeply") from None
        if not isinstance(fields, dict) or fields.keys() != _TYPES.keys():
            raise ValueError(f"news of a session have the fields {', '.join(_TYPES)}, and these have not")
        for name, kinds in _TYPES.items():
            if type(fields[name]) not in kinds:
                raise ValueError(f"{name} of a session cannot be of the type {type(fields[name]).__name__}")
        opened = fields.pop("opened")
        return cls(opened=None if opened is None else _opened(opened), **fields)


def _opened(values: dict[str, Any]) -> Opened:
    wanted = {
        "round": int,
        "epoch": int,
        "lease_start": int,
        "lease_count": int,
        "result_ready": bool,
        "topology": int,
    }
    if {name: type(value) for name, value in values.items()} != wanted:
        raise ValueError(f"this is no opened round: {str(values)[:80]}")
    return Opened(**values)


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "secret": (str,),
    "node": (str,),
    "generation": (int,),
    "connected": (bool,),
    "ordered": (bool,),
    "opened": (dict, type(None)),
    "halted": (bool,),
    "failure": (str,),
}

Publish = Callable[[SessionNews], None]  # does not block


class NewsSource(Protocol):
    """Where a rank that does not lead gets its news from."""

    def follow(self, on_news: Callable[[SessionNews], None], on_failure: Callable[[str], None]) -> None:
        """Call ``on_news`` with what is known now and whenever there is something new, and ``on_failure``,
        with the reason, once there can be nothing more; both from another thread. Returns at once."""
        ...

    def close(self) -> None:
        """Call them no more."""
        ...


class LaneSession:
    """The session of a node as one of its other ranks knows it; used in the network thread only.

    It stands for :class:`node.exchange.session.Session` where a contribution is made.
    """

    def __init__(self) -> None:
        self._news = SessionNews()
        self._changed = asyncio.Event()
        self.halted = asyncio.Event()

    @property
    def secret(self) -> str:
        """Of the present session; empty while none is known."""
        return self._news.secret

    @property
    def node(self) -> str:
        """Name of the node in the present session."""
        return self._news.node

    @property
    def generation(self) -> int:
        """Of the leader's present stream."""
        return self._news.generation

    @property
    def connected(self) -> bool:
        """Whether that stream stands."""
        return self._news.connected

    def take(self, news: SessionNews) -> None:
        """The leader has published ``news``."""
        self._news = news
        if news.halted:
            self.halted.set()
        self._changed.set()

    def fail(self, reason: str) -> None:
        """Nothing more will be heard of the leader."""
        self.take(replace(self._news, halted=True, connected=False, failure=self._news.failure or reason))

    async def confirmed(self, order: RoundOrder) -> RoundOrder:
        """``order``, if the stream that brought it is the present one; else see :meth:`offered_again`."""
        while self.generation < order.generation:
            await self._something_new()
        return order if order.generation == self.generation else await self.offered_again(order)

    async def offered_again(self, order: RoundOrder) -> RoundOrder:
        """Wait until a newer stream than that which brought ``order`` opens its round, for the same samples,
        or has its result.

        Raises:
            RoundLost: the coordinator has something else for this node.
            ExchangeError: the session has failed for good.
        """
        while self.generation <= order.generation or not self._news.ordered:
            await self._something_new()
        opened = self._news.opened
        if opened is None or not opened.takes(order):
            raise RoundLost(went_on_without(order, opened))
        return replace(
            order,
            epoch=opened.epoch,
            result_ready=opened.result_ready,
            topology=opened.topology,
            generation=self.generation,
        )

    async def superseded(self, order: RoundOrder) -> None:
        """See :class:`node.exchange.standing.Standing`."""
        while self.generation <= order.generation or not self._news.ordered:
            self._changed.clear()
            await self._changed.wait()

    async def _something_new(self) -> None:
        if self._news.failure:
            raise ExchangeError(self._news.failure)
        self._changed.clear()
        await self._changed.wait()
