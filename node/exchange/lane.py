"""The lane exchange: how a rank that does not lead its island takes part in the node's rounds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

import torch

from node.exchange.base import ExchangeError, ReplayOrder, RoundOrder, RoundResult
from node.exchange.contributor import Contributor
from node.exchange.filling import Filling
from node.exchange.lanes.follower import FollowerRounds
from node.exchange.lanes.place import LeaderPlace
from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.network import process_network
from node.exchange.news import LaneSession, NewsSource, SessionNews
from node.exchange.replay import results
from node.exchange.retry import Say, Timing
from protos.buckets import TableSchedule
from protos.invite import Invite
from protos.tls import PINNED, ClientTls

T = TypeVar("T")

_SLACK_SECONDS = 5.0  # of a facade's deadline over the deadlines inside


class LaneExchange:
    """Implements :class:`node.exchange.base.Lane` over gRPC, on a connection of its own, in the name of the
    session that the leader holds.

    Args:
        invite: the leader's.
        news: of the leader's session.
        tables: of the run, round by round.
        lane: the part of them that this rank carries; it may be empty.
        weight: of the node's votes, as the leader has claimed it.
        say: receives sentences about what is waited for and what was refused; called from the network thread.
        meter: counts the bytes of this lane.
        limits: deadlines.
        timing: clock, sleep and randomness of retries.
        tls: what this node brings beside the invite.
        leader: where the leader takes this lane in rounds whose slices travel between nodes; ``None``: there
            are no such rounds.
        rank: of this process, for the leader.

    Attributes:
        meter: the byte counters.
    """

    def __init__(
        self,
        invite: Invite,
        news: NewsSource,
        tables: TableSchedule,
        lane: TableSchedule,
        *,
        weight: int = 1,
        say: Say = lambda text: None,
        meter: Meter | None = None,
        limits: Limits | None = None,
        timing: Timing | None = None,
        tls: ClientTls = PINNED,
        leader: LeaderPlace | None = None,
        rank: int = 1,
    ) -> None:
        self.meter = meter or Meter()
        self._limits = limits or Limits()
        self._link = Link(invite, self.meter, self._limits, tls)
        self._news = news
        self._closed = False
        self._network = process_network().open()

        async def build() -> tuple[LaneSession, Contributor, FollowerRounds | None]:
            self._link.open()
            session = LaneSession()
            peers = None if leader is None else FollowerRounds(leader, rank, self._limits)
            contributor = Contributor(
                self._link,
                session,
                tables=tables,
                lane=lane,
                weight=weight,
                timing=timing or Timing(),
                say=say,
                peers=peers,
            )
            return session, contributor, peers

        self._session, self._contributor, self._peers = self._network.call(
            build(), self._limits.call, "opening the channel of a lane"
        )
        news.follow(self._take, self._fail)

    def _take(self, news: SessionNews) -> None:
        self._soon(lambda: self._session.take(news))

    def _fail(self, reason: str) -> None:
        self._soon(lambda: self._session.fail(reason))

    def _soon(self, action: Callable[[], None]) -> None:
        if not self._closed:
            self._network.soon(action)

    def _call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        if self._closed:
            work.close()
            raise ExchangeError(f"{what} is not possible any more: the lane has been closed")
        return self._network.call(work, seconds, what)

    def reduce(
        self,
        order: RoundOrder,
        payload: torch.Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        """See :class:`node.exchange.base.Lane`. Broken connections are retried with the same payload.

        Raises:
            RoundLost: the round went on without this node, or the leader's session has ended.
            ExchangeError: refused even as an abstention, or the coordinator is gone for good.
        """
        self._contributor.check(order, payload, filling)
        return self._call(
            self._contributor.reduce(order, payload, abstain_reason, filling),
            self._limits.round + self._limits.reconnect + _SLACK_SECONDS,
            f"round {order.round + 1}",
        )

    def replay(self, order: ReplayOrder) -> Generator[RoundResult, None, None]:
        """See :class:`node.exchange.base.Lane`.

        Raises:
            TransferError: a result is not to be had; those before it have been handed out.
            Trouble: a result is damaged.
        """
        return results(self._contributor.replay(order), self._call, self._limits.transfer)

    def bytes_counted(self) -> tuple[int, int]:
        """See :class:`node.exchange.base.Lane`."""
        return self.meter.total("up"), self.meter.total("down")

    def close(self, reason: str) -> None:
        """End all calls and the thread; the leader says goodbye. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._news.close()
        try:
            with contextlib.suppress(ExchangeError):
                self._network.call(self._close(), self._limits.leave + _SLACK_SECONDS, "closing a lane")
        finally:
            self._network.close()

    async def _close(self) -> None:
        self._contributor.cancel()
        if self._peers is not None:
            await self._peers.close()
        await self._link.close()
