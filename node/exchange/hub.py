"""The hub exchange: every node talks to the coordinator, which reduces. The worker sees no sockets.

All networking happens in one thread of its own (network.py); every call here waits for it with a deadline and
may be interrupted by Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

import torch

from node.exchange.base import (
    DonateOrder,
    ExchangeError,
    LoadOrder,
    Order,
    RoundOrder,
    RoundResult,
    WorkReport,
)
from node.exchange.bulk import Contribution, contribute, get_state, put_state
from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.network import process_network
from node.exchange.retry import Patience, Say, Timing, persist
from node.exchange.session import Admission, Claim, Session
from node.exchange.tensor_bytes import byte_view
from node.exchange.trouble import Kind, RoundLost, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable, TableSchedule
from protos.invite import Invite

T = TypeVar("T")

_SLACK_SECONDS = 5.0  # of a facade's deadline over the deadlines inside


class HubExchange:
    """Implements :class:`node.exchange.base.Exchange` over gRPC.

    Use: :meth:`describe` what run it is, then :meth:`join` it, then the methods of the exchange.

    Args:
        invite: where the coordinator listens, and the token.
        say: receives sentences about what is waited for and what was refused; called from the network thread.
        meter: counts bytes.
        limits: deadlines.
        timing: clock, sleep and randomness of retries.

    Attributes:
        address: of the coordinator.
        meter: the byte counters.
        sent_at: when the last payload had been handed to the transport, in monotonic seconds.
    """

    def __init__(
        self,
        invite: Invite,
        *,
        say: Say = lambda text: None,
        meter: Meter | None = None,
        limits: Limits | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.meter = meter or Meter()
        self.address = invite.address
        self.sent_at = math.nan
        self._timing = timing or Timing()
        self._say = say
        self._claim: Claim | None = None
        self._tables: TableSchedule | None = None
        self._result = torch.empty(0, dtype=torch.uint8)
        self._reducing: asyncio.Future[pb.Commit] | None = None
        self._sent_round, self._sent_as = -1, set[str]()  # the last payload: its round, our names in it
        self._closed = False
        self._network = process_network().open()
        self._link = Link(invite, self.meter, limits or Limits())
        self._session = self._network.call(self._open(), self.limits.call, "opening the channels")

    @property
    def limits(self) -> Limits:
        """Deadlines; may be replaced once the run is known."""
        return self._link.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._link.limits = limits

    async def _open(self) -> Session:
        self._link.open()
        return Session(self._link, self._timing, self._say)

    # ------------------------------------------------------------------------------- admission

    def describe(self) -> pb.GetRunReply:
        """What run the coordinator leads; waits for it as long as ``limits.wait``.

        Raises:
            ExchangeError: it did not come, or refused.
        """
        patience = Patience(f"the coordinator at {self.address}", self.limits.wait, self._timing, self._say)
        return self._call(
            persist(self._link.get_run, patience), self._bound(self.limits.wait), "asking what run this is"
        )

    def join(self, claim: Claim, tables: TableSchedule) -> Admission:
        """Ask for admission and take up the session.

        Args:
            claim: what this node is.
            tables: what travels, round by round.

        Raises:
            ExchangeError: refused; the text is the coordinator's.
        """
        self._claim, self._tables = claim, tables
        self._result = torch.empty(tables.result_nbytes, dtype=torch.uint8)
        return self._call(
            self._session.join(claim, self.limits.wait), self._bound(self.limits.wait), "joining the run"
        )

    def _call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        if self._closed:
            work.close()
            raise ExchangeError(f"{what} is not possible any more: the exchange has been closed")
        return self._network.call(work, seconds, what)

    def _bound(self, span: float) -> float:
        return span + self.limits.call + self._timing.backoff.cap + _SLACK_SECONDS

    # ----------------------------------------------------------------------------- the exchange

    def next_order(self) -> Order:
        """See :class:`node.exchange.base.Exchange`."""
        return self._call(
            self._session.next_order(),
            self.limits.order,
            f"waiting for the coordinator at {self.address} to go on",
        )

    def reduce(
        self, order: RoundOrder, payload: torch.Tensor | None, abstain_reason: str = ""
    ) -> RoundResult:
        """See :class:`node.exchange.base.Exchange`. Broken connections are retried with the same payload.

        Raises:
            RoundLost: the round went on without this node, which stays in the run.
            ExchangeError: refused even as an abstention, or the coordinator is gone for good.
        """
        table = self._table(order.round)
        if payload is not None and (payload.dtype is not torch.uint8 or payload.numel() != table.nbytes):
            raise ValueError(
                f"the payload of round {order.round + 1} must be uint8[{table.nbytes}], not "
                f"{payload.dtype}{list(payload.shape)}"
            )
        memory = None if payload is None else byte_view(payload)
        if memory is not None or order.round != self._sent_round:
            self._sent_round, self._sent_as = order.round, set()
        result = self._result[: table.result_nbytes]
        commit = self._call(
            self._reduce(order, memory, byte_view(result), abstain_reason),
            self.limits.round + self.limits.reconnect + _SLACK_SECONDS,
            f"round {order.round + 1}",
        )
        return RoundResult(
            round=order.round,
            payload=result if commit.nbytes else None,
            voters=tuple(commit.voters),
            weights=tuple(commit.weights),
            # A node that is cut off and comes back has another name; what it sent before counts all the same.
            counted=commit.counted
            or bool((self._sent_as - {self._session.node}).intersection(commit.voters)),
            agreement=commit.agreement,
            reason=commit.reason,
        )

    def _table(self, round_index: int) -> BucketTable:
        assert self._tables is not None, "join comes first"
        return self._tables.of(round_index)

    async def _reduce(
        self, order: RoundOrder, memory: memoryview | None, into: memoryview, reason: str
    ) -> pb.Commit:
        work = self._reducing = asyncio.ensure_future(self._contribute(order, memory, into, reason))
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
        self, order: RoundOrder, memory: memoryview | None, into: memoryview, reason: str
    ) -> pb.Commit:
        session = self._session
        patience = Patience(
            f"the commit of round {order.round + 1}", self.limits.reconnect, self._timing, self._say
        )
        hidden = False
        while True:
            if session.order_generation != session.generation:
                order = await session.offered_again(order)
            contribution = Contribution(self._header(order, memory, reason), memory)
            if memory is not None:
                self._sent_as.add(session.node)
            try:
                return await contribute(self._link, session.secret, contribution, into, self._mark_sent)
            except Trouble as trouble:
                if self._cut_off(trouble):
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

    def _cut_off(self, trouble: Trouble) -> bool:
        """Whether the stream that brought the order is gone, or soon will be, as the session is unknown."""
        session = self._session
        stale = session.generation != session.order_generation or not session.connected
        return stale or trouble.kind is Kind.SESSION_UNKNOWN

    def _mark_sent(self) -> None:
        self.sent_at = self._timing.now()

    def _header(self, order: RoundOrder, memory: memoryview | None, reason: str) -> pb.ContributionHeader:
        assert self._claim is not None, "join comes first"
        return pb.ContributionHeader(
            round=order.round,
            epoch=order.epoch,
            table_digest=self._table(order.round).digest,
            nbytes=0 if memory is None else len(memory),
            weight=self._claim.weight,
            abstain=memory is None,
            reason=reason if memory is None else "",
        )

    def report(self, report: WorkReport) -> None:
        """See :class:`node.exchange.base.Exchange`."""
        message = pb.Report(
            round=report.round,
            state_digest=report.state_digest,
            loss=report.loss,
            tokens=report.tokens,
            validation_loss=report.validation_loss or 0.0,
            evaluated=report.validation_loss is not None,
            bits_per_byte=report.bits_per_byte or 0.0,
            compute_seconds=report.compute_seconds,
            busy_seconds=report.busy_seconds,
            bytes_up=self.meter.total("up"),
            bytes_down=self.meter.total("down"),
        )

        def send() -> None:
            self._session.hold_state(report.round + 1, report.state_digest)
            self._session.send(pb.NodeMessage(report=message))

        self._network.soon(send)

    def donate(self, order: DonateOrder, tensors: Mapping[str, torch.Tensor], state_digest: str) -> None:
        """See :class:`node.exchange.base.Exchange`.

        Raises:
            TransferError: it did not get through; this node is unharmed.
        """
        self._call(
            put_state(self._link, self._session.secret, order, tensors, state_digest),
            self.limits.transfer + _SLACK_SECONDS,
            f"the upload of round {order.round}'s state",
        )

    def load(self, order: LoadOrder, tensors: Mapping[str, torch.Tensor]) -> str:
        """See :class:`node.exchange.base.Exchange`.

        Raises:
            TransferError: it did not arrive whole; ``tensors`` may hold a part of it.
        """
        return self._call(
            get_state(self._link, self._session.secret, order, tensors),
            self.limits.transfer + _SLACK_SECONDS,
            f"the download of round {order.round}'s state",
        )

    def ready(self, round_index: int, state_digest: str) -> None:
        """See :class:`node.exchange.base.Exchange`."""

        def send() -> None:
            self._session.hold_state(round_index, state_digest)
            self._session.send(pb.NodeMessage(ready=pb.Ready(round=round_index, state_digest=state_digest)))

        self._network.soon(send)

    def reducer_tensors(self) -> dict[str, torch.Tensor]:
        """See :class:`node.exchange.base.Exchange`: the coordinator holds it."""
        return {}

    def bytes_counted(self) -> tuple[int, int]:
        """See :class:`node.exchange.base.Exchange`."""
        return self.meter.total("up"), self.meter.total("down")

    def close(self, reason: str) -> None:
        """Leave: say goodbye if there is a connection, end all calls and the thread."""
        if self._closed:
            return
        self._closed = True
        try:
            with contextlib.suppress(ExchangeError):
                self._network.call(self._close(reason), self.limits.leave * 2 + _SLACK_SECONDS, "leaving")
        finally:
            self._network.close()

    async def _close(self, reason: str) -> None:
        if self._reducing is not None:
            self._reducing.cancel()
        await self._session.leave(reason)
        await self._link.close()
