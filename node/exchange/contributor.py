"""A rank's part in the rounds: its lane of the contribution goes up, its lane of the result comes down.

Connections break, sessions are joined again, coordinators restart: the same payload is sent until there is a
commit, or until the round is known to be lost.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import torch

from node.exchange.base import ReplayOrder, RoundOrder, RoundResult
from node.exchange.between import Between
from node.exchange.bulk import Contribution, contribute
from node.exchange.filling import Filling, Withdrawn
from node.exchange.link import Link
from node.exchange.replay import Replay, held_buckets
from node.exchange.result import round_result
from node.exchange.retry import Patience, Say, Timing, ended
from node.exchange.standing import Standing
from node.exchange.tensor_bytes import byte_view
from node.exchange.trouble import Kind, RoundLost, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable, TableSchedule


@dataclass
class _Work:
    """A rank's part in one round, from the first attempt to the commit.

    Attributes:
        order: the present one; a new stream of the session may bring another.
        memory: the payload; ``None``: the rank abstains for ``reason``.
        filling: how far the payload has been written.
        into: as many bytes as the result has.
        between: the round, while its slices travel between nodes.
        asked: it is decided, and the result is asked for like that of a round before.
        hidden: a stream has broken once without a reason.
    """

    order: RoundOrder
    memory: memoryview | None
    filling: Filling | None
    into: memoryview
    reason: str
    between: asyncio.Future[pb.Commit] | None = None
    asked: bool = False
    hidden: bool = False

    def abstain(self, reason: str) -> None:
        """There is nothing to contribute any more."""
        self.memory, self.reason = None, reason


class Contributor:
    """Used in the network thread, but for :meth:`check`.

    Args:
        link: opened.
        session: in whose name.
        tables: of the run.
        lane: the part of them that this rank carries; ``None``: all, in a stream that is not a part.
        weight: of the node's votes.
        timing: clock, sleep and randomness of retries.
        say: receives what is waited for and what was refused.
        peers: takes part in rounds whose slices travel between nodes; ``None``: there are none.

    Attributes:
        sent_at: when the last payload had been handed to the transport, in the clock's seconds.
        sending: whether a payload is on its way there.
    """

    def __init__(
        self,
        link: Link,
        session: Standing,
        *,
        tables: TableSchedule,
        lane: TableSchedule | None,
        weight: int,
        timing: Timing,
        say: Say,
        peers: Between | None = None,
    ) -> None:
        self._peers = peers
        self.sent_at, self.sending = math.nan, False
        self._link, self._session = link, session
        self._tables, self._lane, self._weight = tables, lane, weight
        self._timing, self._say = timing, say
        self._result = torch.empty((lane or tables).result_nbytes, dtype=torch.uint8)
        self._reducing: asyncio.Future[pb.Commit] | None = None
        self._sent_round, self._sent_as = -1, set[str]()  # the last payload: its round, our names in it

    def check(self, order: RoundOrder, payload: torch.Tensor | None, filling: Filling | None) -> None:
        """Raises ValueError for a payload that is not of the round's lane."""
        nbytes = self._part(order.round).nbytes
        if payload is not None and (payload.dtype is not torch.uint8 or payload.numel() != nbytes):
            raise ValueError(
                f"the payload of round {order.round + 1} must be uint8[{nbytes}], not "
                f"{payload.dtype}{list(payload.shape)}"
            )
        if payload is not None and filling is not None and filling.nbytes != nbytes:
            raise ValueError(
                f"the payload of round {order.round + 1} has {nbytes} bytes, its filling {filling.nbytes}"
            )

    async def reduce(
        self, order: RoundOrder, payload: torch.Tensor | None, reason: str, filling: Filling | None
    ) -> RoundResult:
        """See :class:`node.exchange.base.Lane`.

        Raises:
            RoundLost: the round went on without this node, which stays in the run.
            Trouble: refused even as an abstention, or the coordinator is gone for good.
        """
        memory = None if payload is None else byte_view(payload)
        if memory is not None or order.round != self._sent_round:
            self._sent_round, self._sent_as = order.round, set()
        part = self._part(order.round)
        self._link.traffic.compose(self._tables.of(order.round) if order.topology else part)
        result = self._result[: part.result_nbytes]
        work = _Work(order, memory, filling, byte_view(result), reason)
        commit = await self._unless_halted(work)
        return round_result(commit, result, counted=self._counted(commit))

    def replay(self, order: ReplayOrder) -> Replay:
        """The results of rounds that went on without this node."""
        return Replay(
            order,
            self._link,
            self._session,
            tables=self._tables,
            lane=self._lane,
            counted=self._was_counted,
            peers=self._peers,
            timing=self._timing,
            say=self._say,
        )

    def _was_counted(self, commit: pb.Commit) -> bool:
        """Of a round that has been decided meanwhile: whether what this process has sent for it counts."""
        return commit.round == self._sent_round and bool(self._sent_as) and self._counted(commit)

    def _counted(self, commit: pb.Commit) -> bool:
        """Whether what was sent last, which is of the same round, is in its result.

        A node that was cut off may have come back under another name; what it sent before counts as well.
        """
        before = self._sent_as - {self._session.node}
        return commit.counted or bool(before.intersection(commit.voters))

    def cancel(self) -> None:
        """End a :meth:`reduce` that goes on."""
        if self._reducing is not None:
            self._reducing.cancel()

    def _part(self, round_index: int) -> BucketTable:
        return (self._lane or self._tables).of(round_index)

    async def _unless_halted(self, work: _Work) -> pb.Commit:
        reducing = self._reducing = asyncio.ensure_future(self._contribute(work))
        halt = asyncio.ensure_future(self._session.halted.wait())
        try:
            await asyncio.wait({reducing, halt}, return_when=asyncio.FIRST_COMPLETED)
            if not reducing.done():
                raise RoundLost(
                    f"round {work.order.round + 1} was broken off: this node has been told to stop"
                )
            return await reducing
        finally:
            halt.cancel()
            await ended(reducing)  # nothing of it may touch the next round

    async def _contribute(self, work: _Work) -> pb.Commit:
        """Try until there is a commit, whatever breaks meanwhile."""
        patience = Patience(
            f"the commit of round {work.order.round + 1}",
            self._link.limits.reconnect,
            self._timing,
            self._say,
        )
        try:
            while True:
                work.order = await self._session.confirmed(work.order)
                if work.memory is not None:
                    self._sent_as.add(self._session.node)
                self.sending = work.memory is not None
                try:
                    if (commit := await self._attempt(work)) is not None:
                        return commit
                except Withdrawn as withdrawn:
                    work.abstain(str(withdrawn))
                except Trouble as trouble:
                    await self._answer(work, trouble, patience)
                finally:
                    self.sending = False
        finally:
            if work.between is not None:
                await ended(work.between)

    async def _attempt(self, work: _Work) -> pb.Commit | None:
        """The commit by the way that the order names; ``None``: another order has taken its place."""
        order = work.order
        if not order.topology or order.result_ready or work.asked:
            return await self._through_coordinator(work)
        if work.between is None or work.between.done():
            work.between = asyncio.ensure_future(
                self._peers_of(order).reduce(
                    order, work.memory, work.filling, work.into, work.reason, self._mark_sent
                )
            )
        newer = await self._opened_anew(order, work.between)
        if newer is None:
            return await work.between
        work.order = newer
        if not newer.topology or newer.result_ready:
            await ended(work.between)
        else:
            self._peers_of(newer).rejoined()
        return None

    async def _answer(self, work: _Work, trouble: Trouble, patience: Patience) -> None:
        """Make the next attempt another one, or wait for it.

        Raises:
            RoundLost: the session has something else for this node.
            Trouble: another attempt is of no use.
        """
        order = work.order
        work.asked = work.asked or self._decided(order)
        if not work.asked and self._cut_off(order, trouble):
            self._say(f"cut off in round {order.round + 1}: {trouble}")
            work.order = await self._session.offered_again(order)
        elif trouble.kind is Kind.REFUSED and work.memory is not None:
            self._say(
                f"the contribution to round {order.round + 1} was refused: {trouble}; fetching the result"
            )
            work.abstain("its contribution was refused")
        elif trouble.kind is Kind.HIDDEN and not work.hidden:
            work.hidden = True
        elif trouble.kind is Kind.HIDDEN:
            # Too late or refused. An abstention is so short that the answer gets through.
            work.abstain("its contribution was not taken")
            await patience.endure(trouble)
        else:
            await patience.endure(trouble)

    async def _through_coordinator(self, work: _Work) -> pb.Commit:
        """The commit from the coordinator, with the result, or with the names of those who have it."""
        # With a topology it is decided, and the coordinator takes no slices.
        memory = None if work.order.topology else work.memory
        filling = None if memory is None else work.filling
        contribution = Contribution(self._header(work.order, memory, work.reason), memory, filling)
        commit = await self._unless_superseded(
            work.order,
            contribute(self._link, self._session.secret, contribution, work.into, self._mark_sent),
        )
        if commit.slices:
            await self._peers_of(work.order).complete(commit, work.into, "state")
        return commit

    async def _unless_superseded(self, order: RoundOrder, call: Coroutine[Any, Any, pb.Commit]) -> pb.Commit:
        """What a call for ``order`` comes to, unless a newer stream of the session has orders meanwhile.

        The call belongs to a session that has ended then, or is about to: its own end need not be waited for,
        which on a connection that was lost unnoticed would not come before the deadline of the round.

        Raises:
            Trouble: kind BROKEN: there is a newer stream.
        """
        calling = asyncio.ensure_future(call)
        newer = asyncio.ensure_future(self._session.superseded(order))
        try:
            await asyncio.wait({calling, newer}, return_when=asyncio.FIRST_COMPLETED)
            if calling.done():
                return calling.result()
            raise Trouble(Kind.BROKEN, f"the session goes on in another stream to {self._link.address}")
        finally:
            newer.cancel()
            await ended(calling)

    async def _opened_anew(self, order: RoundOrder, between: asyncio.Future[pb.Commit]) -> RoundOrder | None:
        """Wait for the end of a round whose slices travel between nodes (``None``), or for a new stream of
        the session to open it again.

        Nothing of such a round depends on the session but the word of its commit: it goes on meanwhile.

        Raises:
            RoundLost: the new stream has something else for this node.
        """
        session = self._session
        again = asyncio.ensure_future(session.offered_again(order))
        pending: set[asyncio.Future[Any]] = {between, again}
        try:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if session.generation != order.generation:
                await asyncio.wait({again})  # its first order tells what it takes this node to have
            if not again.done():
                return None
            error = again.exception()
            if error is not None and not isinstance(error, RoundLost) and self._decided(order):
                return None  # the session is over, the result comes from elsewhere
            return again.result()
        finally:
            again.cancel()

    def _peers_of(self, order: RoundOrder) -> Between:
        if self._peers is None:
            raise Trouble(
                Kind.PROTOCOL,
                f"the slices of round {order.round + 1} travel between nodes, for which this one is not set "
                "up: install the same version of Atoll on the coordinator and on all nodes",
            )
        return self._peers

    def _decided(self, order: RoundOrder) -> bool:
        """Whether the round is one between nodes and known to be committed."""
        return bool(order.topology) and self._peers is not None and self._peers.decided(order.round)

    def _cut_off(self, order: RoundOrder, trouble: Trouble) -> bool:
        """Whether the stream that brought the order is gone, or soon will be, as the session is unknown."""
        session = self._session
        stale = session.generation != order.generation or not session.connected
        return stale or trouble.kind is Kind.SESSION_UNKNOWN

    def _mark_sent(self) -> None:
        self.sent_at, self.sending = self._timing.now(), False

    def _header(self, order: RoundOrder, memory: memoryview | None, reason: str) -> pb.ContributionHeader:
        table = self._tables.of(order.round)
        return pb.ContributionHeader(
            round=order.round,
            epoch=order.epoch,
            table_digest=table.digest,
            nbytes=0 if memory is None else len(memory),
            weight=self._weight,
            abstain=memory is None,
            reason=reason if memory is None else "",
            part=self._lane is not None,
            buckets=[] if self._lane is None else held_buckets(table, self._lane.of(order.round)),
        )
