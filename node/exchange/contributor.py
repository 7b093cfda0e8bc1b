"""A rank's part in the rounds: its lane of the contribution goes up, its lane of the result comes down.

Connections break, sessions are joined again, coordinators restart: the same payload is sent until there is a
commit, or until the round is known to be lost.
"""

from __future__ import annotations

import asyncio
import math
from typing import Protocol

import torch

from node.exchange.base import RoundOrder, RoundResult
from node.exchange.bulk import Contribution, contribute
from node.exchange.filling import Filling, Withdrawn
from node.exchange.link import Link
from node.exchange.retry import Patience, Say, Timing
from node.exchange.tensor_bytes import byte_view
from node.exchange.trouble import Kind, RoundLost, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable, TableSchedule


class Standing(Protocol):
    """What a contribution needs of the session in whose name it is made.

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

    Attributes:
        sent_at: when the last payload had been handed to the transport, in the clock's seconds.
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
    ) -> None:
        self.sent_at = math.nan
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
        result = self._result[: part.result_nbytes]
        commit = await self._unless_halted(order, memory, filling, byte_view(result), reason)
        return RoundResult(
            round=order.round,
            payload=result if commit.nbytes or (commit.voters and not part.result_nbytes) else None,
            voters=tuple(commit.voters),
            weights=tuple(commit.weights),
            # A node that is cut off and comes back has another name; what it sent before counts all the same.
            counted=commit.counted
            or bool((self._sent_as - {self._session.node}).intersection(commit.voters)),
            agreement=commit.agreement,
            reason=commit.reason,
        )

    def cancel(self) -> None:
        """End a :meth:`reduce` that goes on."""
        if self._reducing is not None:
            self._reducing.cancel()

    def _part(self, round_index: int) -> BucketTable:
        return (self._lane or self._tables).of(round_index)

    async def _unless_halted(
        self,
        order: RoundOrder,
        memory: memoryview | None,
        filling: Filling | None,
        into: memoryview,
        reason: str,
    ) -> pb.Commit:
        work = self._reducing = asyncio.ensure_future(self._contribute(order, memory, filling, into, reason))
        halt = asyncio.ensure_future(self._session.halted.wait())
        try:
            await asyncio.wait({work, halt}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise RoundLost(f"round {order.round + 1} was broken off: this node has been told to stop")
            return await work
        finally:
            work.cancel()
            halt.cancel()

    async def _contribute(
        self,
        order: RoundOrder,
        memory: memoryview | None,
        filling: Filling | None,
        into: memoryview,
        reason: str,
    ) -> pb.Commit:
        session = self._session
        patience = Patience(
            f"the commit of round {order.round + 1}", self._link.limits.reconnect, self._timing, self._say
        )
        hidden = False
        while True:
            order = await session.confirmed(order)
            contribution = Contribution(self._header(order, memory, reason), memory, filling)
            if memory is not None:
                self._sent_as.add(session.node)
            try:
                return await contribute(self._link, session.secret, contribution, into, self._mark_sent)
            except Withdrawn as withdrawn:
                memory, reason = None, str(withdrawn)
            except Trouble as trouble:
                if self._cut_off(order, trouble):
                    self._say(f"cut off in round {order.round + 1}: {trouble}")
                    order = await session.offered_again(order)
                elif trouble.kind is Kind.REFUSED and memory is not None:
                    self._say(
                        f"the contribution to round {order.round + 1} was refused: {trouble}; "
                        "fetching the result"
                    )
                    memory, reason = None, "its contribution was refused"
                elif trouble.kind is Kind.HIDDEN and not hidden:
                    hidden = True
                elif trouble.kind is Kind.HIDDEN:
                    # Too late or refused. An abstention is so short that the answer gets through.
                    memory, reason = None, "its contribution was not taken"
                    await patience.endure(trouble)
                else:
                    await patience.endure(trouble)

    def _cut_off(self, order: RoundOrder, trouble: Trouble) -> bool:
        """Whether the stream that brought the order is gone, or soon will be, as the session is unknown."""
        session = self._session
        stale = session.generation != order.generation or not session.connected
        return stale or trouble.kind is Kind.SESSION_UNKNOWN

    def _mark_sent(self) -> None:
        self.sent_at = self._timing.now()

    def _header(self, order: RoundOrder, memory: memoryview | None, reason: str) -> pb.ContributionHeader:
        table = self._tables.of(order.round)
        held = [] if self._lane is None else self._lane.of(order.round).buckets
        names = {bucket.name for bucket in held}
        return pb.ContributionHeader(
            round=order.round,
            epoch=order.epoch,
            table_digest=table.digest,
            nbytes=0 if memory is None else len(memory),
            weight=self._weight,
            abstain=memory is None,
            reason=reason if memory is None else "",
            part=self._lane is not None,
            buckets=[index for index, bucket in enumerate(table.buckets) if bucket.name in names],
        )
