"""The hub exchange: every node talks to the coordinator, which reduces. The worker sees no sockets.

All networking happens in one thread of its own (network.py); every call here waits for it with a deadline and
may be interrupted by Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from node.exchange.base import (
    DonateOrder,
    ExchangeError,
    LoadOrder,
    Order,
    ReplayOrder,
    RoundOrder,
    RoundResult,
    WorkReport,
)
from node.exchange.chunks_down import get_chunks
from node.exchange.chunks_up import Uploads
from node.exchange.connections import Connections
from node.exchange.contributor import Contributor
from node.exchange.filling import Filling
from node.exchange.lanes.leader import LeaderRounds
from node.exchange.lanes.place import LeaderPlace
from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.network import process_network
from node.exchange.news import Publish
from node.exchange.peers.setting import PeerSetting
from node.exchange.peers.setup import Peers, open_peers
from node.exchange.replay import results
from node.exchange.retry import Patience, Say, Timing, persist, within
from node.exchange.session import Admission, Claim, Session
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import Row
from node.exchange.trouble import TransferError, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import TableSchedule
from protos.identity import NodeKey
from protos.invite import Invite
from protos.listening import ListenError
from protos.tls import PINNED, ClientTls

T = TypeVar("T")

_PEERS_SECONDS = 300.0  # for all ways together: the swarm has phases with deadlines of their own
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
        tls: what this node brings beside the invite.
        publish: receives what the other ranks of an island need to know of the session, whenever it changes;
            called from the network thread, must not block.

    Attributes:
        meter: the byte counters.
    """

    def __init__(
        self,
        invite: Invite,
        *,
        say: Say = lambda text: None,
        meter: Meter | None = None,
        limits: Limits | None = None,
        timing: Timing | None = None,
        tls: ClientTls = PINNED,
        publish: Publish = lambda news: None,
    ) -> None:
        self.meter = meter or Meter()
        self._timing = timing or Timing()
        self._say = say
        self._swarm_secret = invite.token  # of a coordinator that does not tell another one
        self._contributor: Contributor | None = None
        self._peers: Peers | None = None
        self._leader: LeaderRounds | None = None
        self._closed = False
        self._publish = publish
        self._network = process_network().open()
        self._link = Link(invite, self.meter, limits or Limits(), tls)
        self._session, self._uploads = self._network.call(
            self._open(), self.limits.call, "opening the channels"
        )

    @property
    def address(self) -> str:
        """Of the coordinator, at present."""
        return self._link.address

    @property
    def limits(self) -> Limits:
        """Deadlines; may be replaced once the run is known."""
        return self._link.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._link.limits = limits

    async def _open(self) -> tuple[Session, Uploads]:
        self._link.open()
        session = Session(self._link, self._timing, self._say, self._publish)
        uploads = Uploads(self._link, lambda: session.secret, self._busy, self._timing, self._say)
        return session, uploads

    def _busy(self) -> bool:
        return self._contributor is not None and self._contributor.sending

    @property
    def sent_at(self) -> float:
        """When the last payload had been handed to the transport, in monotonic seconds."""
        return math.nan if self._contributor is None else self._contributor.sent_at

    # ------------------------------------------------------------------------------- admission

    def describe(self) -> pb.GetRunReply:
        """What run the coordinator leads; waits for it as long as ``limits.wait``.

        Raises:
            ExchangeError: it did not come, or refused.
        """
        patience = Patience(f"the coordinator at {self.address}", self.limits.wait, self._timing, self._say)
        run = self._call(
            persist(self._link.get_run, patience), self._bound(self.limits.wait), "asking what run this is"
        )
        self._swarm_secret = run.swarm_secret or self._swarm_secret
        return run

    def identify(self, key: NodeKey) -> None:
        """Be who has this key, in every join from now on; without one it is somebody new."""
        self._link.key = key

    def lead(self, run_digest: str, host: str) -> LeaderPlace:
        """Take the lanes of the island's other ranks, which know this machine as ``host``, in rounds of this
        run whose slices travel between nodes.

        Raises:
            ExchangeError: this machine cannot listen for them.
        """
        leader = self._leader = LeaderRounds(self.limits, run_digest)

        async def listen() -> LeaderPlace:
            try:
                return await leader.listen(host)
            except ListenError as error:
                raise ExchangeError(str(error)) from error

        return self._call(listen(), self.limits.call, "listening for the other ranks")

    def join(
        self,
        claim: Claim,
        tables: TableSchedule,
        lane: TableSchedule | None = None,
        peers: PeerSetting | None = None,
        lanes: Sequence[TableSchedule] = (),
    ) -> Admission:
        """Ask for admission and take up the session.

        Args:
            claim: what this node is.
            tables: what travels, round by round.
            lane: the part of it that this rank carries, if the node is an island whose other ranks carry the
                rest, each by a :class:`~node.exchange.lane.LaneExchange`.
            peers: how other nodes reach this one, for rounds whose slices travel between nodes. ``None``: it
                takes part in no such round, and with it the run has none.
            lanes: of all ranks, after :meth:`lead`; of an island that takes part in such rounds.

        Raises:
            ExchangeError: refused; the text is the coordinator's. Or it cannot listen for other nodes.
        """
        if peers is not None:
            claim = self._call(
                self._open_peers(peers, claim, tables, lanes),
                _PEERS_SECONDS,
                "opening the ways to other nodes",
            )
        between = None if self._peers is None else self._peers.rounds
        self._contributor = Contributor(
            self._link,
            self._session,
            tables=tables,
            lane=lane,
            weight=claim.weight,
            timing=self._timing,
            say=self._say,
            peers=self._leader or between,
        )
        return self._call(
            self._session.join(claim, self.limits.wait), self._bound(self.limits.wait), "joining the run"
        )

    async def _open_peers(
        self, setting: PeerSetting, claim: Claim, tables: TableSchedule, lanes: Sequence[TableSchedule]
    ) -> Claim:
        self._peers = await open_peers(
            setting,
            self._link,
            self._session,
            tables=tables,
            run_digest=claim.run_digest,
            secret=self._swarm_secret,
            name=claim.name,
            meter=self.meter,
            timing=self._timing,
            say=self._say,
        )
        if self._leader is not None:
            self._leader.begin(self._peers.rounds, tables, lanes)
        return replace(claim, endpoint=self._peers.endpoint)

    def _call(self, work: Coroutine[Any, Any, T], seconds: float, what: str) -> T:
        if self._closed:
            work.close()
            raise ExchangeError(f"{what} is not possible any more: the exchange has been closed")
        return self._network.call(work, seconds, what)

    def _bound(self, span: float) -> float:
        return span + 2 * self.limits.call + self._timing.backoff.cap + _SLACK_SECONDS  # a join is two calls

    # ----------------------------------------------------------------------------- the exchange

    def next_order(self) -> Order:
        """See :class:`node.exchange.base.Exchange`."""
        return self._call(self._ordered(), threading.TIMEOUT_MAX, "waiting for an order")

    async def _ordered(self) -> Order:
        """The next order; a run that is paused may take as long as it likes."""
        session = self._session
        what = f"waiting for the coordinator at {self.address} to go on"
        while True:
            try:
                return await within(self.limits.order, what, session.next_order())
            except Trouble:
                if session.halted.is_set() or not session.paused:
                    raise

    def reduce(
        self,
        order: RoundOrder,
        payload: torch.Tensor | None,
        abstain_reason: str = "",
        filling: Filling | None = None,
    ) -> RoundResult:
        """See :class:`node.exchange.base.Lane`. Broken connections are retried with the same payload.

        Raises:
            RoundLost: the round went on without this node, which stays in the run.
            ExchangeError: refused even as an abstention, or the coordinator is gone for good.
        """
        contributor = self._contributor
        assert contributor is not None, "join comes first"
        contributor.check(order, payload, filling)
        return self._call(
            contributor.reduce(order, payload, abstain_reason, filling),
            self.limits.round + self.limits.reconnect + _SLACK_SECONDS,
            f"round {order.round + 1}",
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
            bytes_up=report.bytes_up or self.meter.total("up"),
            bytes_down=report.bytes_down or self.meter.total("down"),
        )

        def send() -> None:
            self._session.hold_state(report.round + 1, report.state_digest)
            self._session.send(pb.NodeMessage(report=message))

        self._network.soon(send)

    def replay(self, order: ReplayOrder) -> Generator[RoundResult, None, None]:
        """See :class:`node.exchange.base.Lane`.

        Raises:
            TransferError: a result is not to be had; those before it have been handed out.
            Trouble: a result is damaged.
        """
        assert self._contributor is not None, "join comes first"
        return results(self._contributor.replay(order), self._call, self.limits.transfer)

    def donate(self, order: DonateOrder, spool: Spool, done: Callable[[str], None]) -> None:
        """See :class:`node.exchange.base.Exchange`."""
        self._network.soon(lambda: self._uploads.start(order, spool, done))

    def download(self, order: LoadOrder, rows: Sequence[Row]) -> Spool:
        """See :class:`node.exchange.base.Exchange`.

        Raises:
            TransferError: it did not arrive whole.
        """
        return self._call(
            self._download(order, rows),
            self.limits.transfer + _SLACK_SECONDS,
            f"the download of round {order.round}'s state",
        )

    async def _download(self, order: LoadOrder, rows: Sequence[Row]) -> Spool:
        session = self._session
        work = asyncio.ensure_future(
            get_chunks(self._link, lambda: session.secret, order, rows, self._timing, self._say)
        )
        halt = asyncio.ensure_future(session.halted.wait())
        try:
            await asyncio.wait({work, halt}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise TransferError("the download was broken off: this node has been told to stop")
            return work.result()
        finally:
            work.cancel()
            halt.cancel()

    def ready(self, round_index: int, state_digest: str) -> None:
        """See :class:`node.exchange.base.Exchange`."""

        def send() -> None:
            self._session.hold_state(round_index, state_digest)
            self._session.send(pb.NodeMessage(ready=pb.Ready(round=round_index, state_digest=state_digest)))

        self._network.soon(send)

    def reducer_tensors(self) -> dict[str, torch.Tensor]:
        """See :class:`node.exchange.base.Exchange`: the coordinator holds it."""
        return {}

    def connections(self) -> Connections:
        """As they are now; any thread may ask."""
        node = self._session.node
        return Connections(node) if self._peers is None else self._peers.connections(node)

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
                self._network.call(self._close(reason), self.limits.leave * 3 + _SLACK_SECONDS, "leaving")
        finally:
            self._network.close()

    async def _close(self, reason: str) -> None:
        if self._contributor is not None:
            self._contributor.cancel()
        self._uploads.cancel()
        await self._session.leave(reason)
        if self._peers is not None:
            with contextlib.suppress(Trouble):
                await within(self.limits.leave, "ending the streams of other nodes", self._peers.close())
        if self._leader is not None:
            with contextlib.suppress(Trouble):
                await within(self.limits.leave, "ending the streams of other ranks", self._leader.close())
        await self._link.close()
