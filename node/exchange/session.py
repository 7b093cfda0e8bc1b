"""The session: one stream that keeps a node in its run, held up through broken connections and restarts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from grpc import aio

from node.exchange.base import DonateOrder, ExchangeError, Order, RoundOrder, StopOrder
from node.exchange.link import Call, Link
from node.exchange.news import MAX_FAILURE, Opened, Publish, SessionNews, went_on_without
from node.exchange.orders import order_of
from node.exchange.retry import Patience, Say, Timing, persist, within
from node.exchange.trouble import Kind, RoundLost, Trouble
from node.exchange.whereabouts import Follower
from protos import atoll_pb2 as pb
from protos import wire

_MAX_REPORTS: Final = 256  # that are kept while the connection is down; whatever else is said is kept as well


@dataclass(frozen=True)
class Claim:
    """What a node says about itself when it joins; see the message JoinRequest.

    ``former`` is the secret of its last session, and the lease its work in hand: both are the session's to
    fill in when it joins again.
    """

    name: str
    run_digest: str
    table_digest: str
    data_digest: str
    dtype: str
    state_digest: str
    round: int
    weight: int
    ranks: int = 1
    batch: int = 0  # samples of a micro-step; 0: as the run file says
    samples: int = 0  # first global sample index behind all that the run had leased
    state_bytes: int = 0  # of the shared state
    endpoint: pb.Endpoint | None = None  # how other nodes reach it; None: its slices cannot travel so
    former: str = field(default="", repr=False)
    lease_round: int = 0
    lease_start: int = 0
    lease_count: int = 0  # 0: there is no work in hand

    def at(self, round_index: int, state_digest: str) -> Claim:
        """The shared state is that before ``round_index`` now: work for the rounds before has come to its
        end."""
        claim = replace(self, round=round_index, state_digest=state_digest)
        done = self.lease_count and self.lease_round < round_index
        return replace(claim, lease_round=0, lease_start=0, lease_count=0) if done else claim

    def ordered(self, order: Order) -> Claim:
        """An order has come."""
        if isinstance(order, (DonateOrder, StopOrder)):
            return self
        claim = replace(self, samples=max(self.samples, order.frontier))
        if not isinstance(order, RoundOrder) or order.result_ready or order.round < self.round:
            return claim
        start, count = order.lease_start, order.lease_count
        return replace(claim, lease_round=order.round, lease_start=start, lease_count=count)

    def request(self) -> pb.JoinRequest:
        """The message."""
        return pb.JoinRequest(
            protocol=wire.PROTOCOL,
            name=self.name,
            run_digest=self.run_digest,
            table_digest=self.table_digest,
            data_digest=self.data_digest,
            dtype=self.dtype,
            state_digest=self.state_digest,
            round=self.round,
            weight=self.weight,
            ranks=self.ranks,
            batch=self.batch,
            samples=self.samples,
            state_bytes=self.state_bytes,
            endpoint=self.endpoint,
            former=self.former,
            lease_round=self.lease_round,
            lease_start=self.lease_start,
            lease_count=self.lease_count,
        )


@dataclass(frozen=True)
class Admission:
    """The coordinator's answer; ``session`` is a secret."""

    node: str
    session: str
    heartbeat_seconds: float
    needs_state: bool


class Session:
    """Used in the network thread only.

    Args:
        link: opened.
        timing: clock, sleep and randomness of the reconnects.
        say: receives what is waited for.
        publish: receives what other ranks of the node need to know, whenever it changes; must not block.
    """

    def __init__(self, link: Link, timing: Timing, say: Say, publish: Publish = lambda news: None) -> None:
        self._link = link
        self._timing = timing
        self._say = say
        self._publish = publish
        self._listener: Callable[[pb.CoordinatorMessage], object] = lambda message: None
        self._follower: Follower | None = None
        self._claim: Claim | None = None
        self._admission: Admission | None = None
        self._orders: deque[Order] = deque()
        self._unsent: deque[pb.NodeMessage] = deque()
        self._unheard: list[pb.NodeMessage] = []  # sent on a stream that has brought nothing yet
        self._outgoing = asyncio.Event()
        self._news = asyncio.Event()
        self._failure: ExchangeError | None = None
        self._leaving = False
        self._stopped = False
        self._heard = False  # anything on the present stream
        self._first: Order | None = None  # of the present stream
        self._task: asyncio.Task[None] | None = None
        self.generation = 0  # of the stream: grows with every reconnect
        self.connected = False
        self.paused = ""  # why the coordinator opens no rounds; empty: it does, as far as is known
        self.halted = asyncio.Event()  # ordered to leave before the run's end, or given up

    @property
    def secret(self) -> str:
        """Of the present session, for the metadata of bulk calls."""
        return self._admission.session if self._admission else ""

    @property
    def node(self) -> str:
        """Name of this node in the present session; empty while there is none."""
        return self._admission.node if self._admission else ""

    async def join(self, claim: Claim, seconds: float) -> Admission:
        """Ask for admission, then hold the stream from now on.

        Raises:
            Trouble: refused, or not there for ``seconds``.
        """
        self._claim = claim
        admission = await persist(self._ask, self._patience(seconds))
        self._task = asyncio.ensure_future(self._hold())
        return admission

    def listen(self, listener: Callable[[pb.CoordinatorMessage], object]) -> None:
        """Hand messages that are no orders to ``listener``, in the order in which all of them come. If it
        raises :class:`Trouble`, the session fails."""
        self._listener = listener

    def follow(self, follower: Follower) -> None:
        """Have a coordinator looked for that cannot be reached any more."""
        self._follower = follower

    def announce(self, endpoint: pb.Endpoint) -> None:
        """Tell how other nodes reach this one from now on, also in the next session."""
        if self._claim is not None:
            self._claim = replace(self._claim, endpoint=endpoint)
        self.send(pb.NodeMessage(endpoint=endpoint))

    def hold_state(self, round_index: int, state_digest: str) -> None:
        """Remember the shared state that a rejoin may claim: that before ``round_index``."""
        if self._claim is not None:
            self._claim = self._claim.at(round_index, state_digest)

    def send(self, message: pb.NodeMessage) -> None:
        """Queue a message; it survives a reconnect. Of too many reports the oldest are dropped."""
        self._unsent.append(message)
        reports = [message for message in self._unsent if message.HasField("report")]
        if len(reports) > _MAX_REPORTS:
            self._unsent.remove(reports[0])
        self._outgoing.set()

    async def next_order(self) -> Order:
        """The oldest order that has not been taken.

        Raises:
            ExchangeError: the session has failed for good, or has ended after its stop.
        """
        while not self._orders:
            if self._failure is not None:
                raise self._failure
            await self._something_new()
        return self._orders.popleft()

    async def _something_new(self) -> None:
        self._news.clear()
        await self._news.wait()

    async def confirmed(self, order: RoundOrder) -> RoundOrder:
        """``order``, if the stream that brought it still is the present one; else see
        :meth:`offered_again`."""
        return order if order.generation == self.generation else await self.offered_again(order)

    async def offered_again(self, order: RoundOrder) -> RoundOrder:
        """After the stream that brought ``order`` has ended: wait until its round is open to us again, for
        the same samples, or its result is there.

        Raises:
            RoundLost: the coordinator has something else for this node, which :meth:`next_order` will return.
            ExchangeError: the session has failed for good.
        """
        while self.generation == order.generation and self._failure is None:
            await self._something_new()
        following = await self.next_order()
        if isinstance(following, RoundOrder) and Opened.by(following).takes(order):
            return following
        self._orders.appendleft(following)
        opened = Opened.by(following) if isinstance(following, RoundOrder) else None
        raise RoundLost(went_on_without(order, opened, self._link.address))

    async def superseded(self, order: RoundOrder) -> None:
        """See :class:`node.exchange.standing.Standing`."""
        while self.generation == order.generation or self._first is None:
            await self._something_new()

    async def leave(self, reason: str) -> None:
        """Say goodbye after everything that is queued, and end the stream."""
        self._leaving = True
        self.send(pb.NodeMessage(leave=pb.Leave(reason=reason)))
        if self._task is None:
            return
        if not self.connected:
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=self._link.limits.leave)
        self._task.cancel()

    # ---------------------------------------------------------------------------- the stream

    def _patience(self, seconds: float) -> Patience:
        return Patience(f"the coordinator at {self._link.address}", seconds, self._timing, self._say)

    async def _ask(self) -> Admission:
        assert self._claim is not None
        reply = await self._link.join(self._claim.request())
        self._admission = Admission(reply.node, reply.session, reply.heartbeat_seconds, reply.needs_state)
        return self._admission

    async def _hold(self) -> None:
        """Keep a stream open until the node leaves; ask for admission again once the session is unknown."""
        patience = self._patience(self._link.limits.reconnect)
        try:
            while not self._leaving:
                opened, self._heard = self._timing.now(), False
                try:
                    admission = self._admission
                    if admission is None:
                        admission = await self._ask()
                        self._say(f"joined {self._link.address} again, as {admission.node}")
                    if await self._stream(admission):
                        return
                except Trouble as trouble:
                    stood = self._timing.now() - opened > self._timing.backoff.cap
                    if self._heard or (stood and trouble.kind in (Kind.BROKEN, Kind.CUT)):
                        patience.reset()
                    if trouble.kind is Kind.SESSION_UNKNOWN and self._admission is not None:
                        self._forget(self._admission)
                        trouble = Trouble(Kind.BROKEN, f"{trouble}; joining again")
                    elif self._follower is not None and trouble.passing and await self._follower.lost():
                        patience = self._patience(self._link.limits.reconnect)
                        continue
                    await patience.endure(trouble)
        except ExchangeError as failure:
            self._fail(failure)
        except Exception as defect:  # who waits for orders would wait for ever
            self._fail(ExchangeError(f"a defect of this node's session: {defect!r}; please report it"))

    def _fail(self, failure: ExchangeError) -> None:
        self._failure = failure
        self.halted.set()
        self._tell()

    def _forget(self, admission: Admission) -> None:
        """The coordinator knows of this session no more; its secret tells it who comes back."""
        assert self._claim is not None
        self._claim = replace(self._claim, former=admission.session)
        self._admission = None

    async def _stream(self, admission: Admission) -> bool:
        """One stream from its start to its end; True if it ended as it should."""
        call = self._link.session(admission.session)
        self._orders.clear()
        self._first = None
        self.generation += 1
        self.connected, self.paused = True, ""
        self._tell()
        writer = asyncio.ensure_future(self._write(call, admission.heartbeat_seconds))
        try:
            while isinstance(message := await call.read(), pb.CoordinatorMessage):
                self._take(message)
        except aio.AioRpcError as error:
            if not self._over:
                raise self._link.trouble(error, 0.0) from None
        finally:
            self.connected = False
            self._tell()
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            if not self._heard:  # a stream that is refused takes messages all the same, and drops them
                self._unsent.extendleft(reversed(self._unheard))
            self._unheard.clear()
        if not self._over:
            raise Trouble(
                Kind.CUT, f"the coordinator at {self._link.address} ended the session without a word"
            )
        # Not a halt: after a stop that says "done" the last commit may still be on its way.
        self._failure = ExchangeError(f"the coordinator at {self._link.address} has ended the session")
        self._tell()
        return True

    @property
    def _over(self) -> bool:
        return self._leaving or self._stopped

    async def _write(self, call: Call, heartbeat_seconds: float) -> None:
        """Send what is queued, and a heartbeat every ``heartbeat_seconds``."""
        beat = self._timing.now() + heartbeat_seconds
        with contextlib.suppress(aio.AioRpcError, aio.InternalError, asyncio.InvalidStateError):
            while True:  # until the stream ends: the reader learns why
                while self._unsent:
                    message = self._unsent[0]
                    await call.write(message)
                    if self._unsent and self._unsent[0] is message:
                        self._unsent.popleft()
                    if not self._heard:
                        self._unheard.append(message)
                    if message.HasField("leave"):
                        await call.done_writing()
                        return
                if (left := beat - self._timing.now()) <= 0:
                    await call.write(pb.NodeMessage(heartbeat=pb.Heartbeat()))
                    beat = self._timing.now() + heartbeat_seconds
                    continue
                self._outgoing.clear()
                with contextlib.suppress(Trouble):
                    await within(left, "something to say", self._outgoing.wait())

    def _take(self, message: pb.CoordinatorMessage) -> None:
        if not self._heard and self._follower is not None:
            self._follower.reached()
        self._heard = True
        self._unheard.clear()
        if message.HasField("paused"):
            self._pause(message.paused)
            return
        order = order_of(message, self.generation)
        if order is None:
            self._listener(message)
            return
        if isinstance(order, StopOrder):
            self._stopped = True
            if not order.done:
                self.halted.set()
                self._orders.clear()  # the round before them may have been broken off
        if self._claim is not None:
            self._claim = self._claim.ordered(order)
        self._orders.append(order)
        first, self._first = self._first, self._first or order
        if first is None or self.halted.is_set():
            self._tell()
        self._news.set()

    def _pause(self, message: pb.Paused) -> None:
        self.paused = message.reason
        if self.paused:
            self._say(f"the run is paused after round {message.round}: {self.paused}; this node waits")
        else:
            self._say("the run goes on")

    def _tell(self) -> None:
        """Something has changed: wake who waits here, and publish."""
        self._news.set()
        first = self._first
        self._publish(
            SessionNews(
                secret=self.secret,
                node=self.node,
                generation=self.generation,
                connected=self.connected,
                ordered=first is not None,
                opened=Opened.by(first) if isinstance(first, RoundOrder) else None,
                halted=self.halted.is_set(),
                failure="" if self._failure is None else str(self._failure)[:MAX_FAILURE],
            )
        )
