"""Rounds whose slices travel between nodes: this node's contributions to them, and their results."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from node.exchange.base import RoundOrder
from node.exchange.filling import Filling, Withdrawn
from node.exchange.link import Limits
from node.exchange.meter import Kind as Counted
from node.exchange.meter import Meter
from node.exchange.peers.base import Carrier
from node.exchange.peers.deliveries import Deliveries
from node.exchange.peers.delivery import Means
from node.exchange.peers.desk import Desk
from node.exchange.peers.fetch import Fetching
from node.exchange.peers.plan import Plan
from node.exchange.peers.rates import Rates
from node.exchange.peers.shelf import Kept
from node.exchange.peers.upload import Contribution
from node.exchange.peers.ways import Ways
from node.exchange.retry import Say, Timing, within
from protos import atoll_pb2 as pb
from protos.buckets import TableSchedule
from protos.waits import patience

_SILENCE_SECONDS: Final = 15.0  # without a byte of a decided result before it is fetched from others
_COMMITS: Final = 8  # that are remembered


class Speaker(Protocol):
    """What is needed of the session."""

    @property
    def node(self) -> str:
        """Name of this node in the present session."""
        ...

    def send(self, message: pb.NodeMessage) -> None:
        """Queue a message to the coordinator."""
        ...


class PeerRounds:
    """Implements :class:`node.exchange.between.Between`, of a node of one rank. Used in the network thread.

    Args:
        desk: where this node reduces its own slices.
        carriers: that other nodes are reached by.
        session: by which the coordinator is told things.
        tables: of the run.
        run_digest: of the run.
        limits: deadlines.
        timing: clock, sleep and randomness.
        say: receives what goes wrong, and by which way a node is reached then.
        meter: counts the bytes.
        answer: goes to a tunnel, given its key and the node that calls there.
        rates: learns what the links carry.
        on_round: called when a round is over.
    """

    def __init__(
        self,
        desk: Desk,
        carriers: Sequence[Carrier],
        session: Speaker,
        *,
        tables: TableSchedule,
        run_digest: str,
        limits: Limits,
        timing: Timing,
        say: Say,
        meter: Meter,
        answer: Callable[[str, str], None],
        rates: Rates | None = None,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._answer, self._now = answer, timing.now
        self._rates, self._on_round = rates or Rates(timing.now), on_round
        self._desk, self._carriers, self._session = desk, carriers, session
        self._tables, self._limits = tables, limits
        ways = Ways(
            carriers,
            desk.serve,
            meter=meter,
            now=timing.now,
            say=say,
            run_digest=run_digest,
            detour=lambda node, reason: session.send(
                pb.NodeMessage(detour=pb.Detour(node=node, reason=reason[:256]))
            ),
        )
        self._ways, self._fetching = ways, Fetching(ways)
        self._means = Means(
            ways,
            session.send,
            say,
            timing,
            limits.stall,
            moving=lambda: self._rates.moving("up"),
            uplink=desk.uplink,
        )
        self._plan: Plan | None = None
        self._commits: OrderedDict[int, pb.Commit] = OrderedDict()
        self._changed = asyncio.Event()  # replaced whenever it is set
        self._deliveries: Deliveries | None = None
        self._abstaining: pb.NodeMessage | None = None

    # ------------------------------------------------------------------------- what the coordinator says

    def take(self, message: pb.CoordinatorMessage) -> bool:
        """A message of the session that is no order; whether it belongs here.

        Raises:
            Trouble: kind PROTOCOL: it cannot be used.
        """
        kind = message.WhichOneof("kind")
        if kind == "topology":
            self._plan = self._desk.set_topology(message.topology, self._session.node)
        elif kind == "reduce":
            self._desk.reduce(message.reduce)
        elif kind == "committed":
            self._remember(message.committed)
            self._desk.committed(message.committed)
        elif kind == "retally":
            self._show(message.retally)
        elif kind == "tunnel":
            self._answer(message.tunnel.key, message.tunnel.caller)
        else:
            return False
        self._wake()
        return True

    @property
    def ways(self) -> Counter[str]:
        """How many other nodes of the topology were last called by each way; any thread may ask."""
        return self._ways.in_use(self._plan.peers) if self._plan is not None else Counter()

    def decided(self, round_index: int) -> bool:
        """Whether a round is known to be committed."""
        return round_index in self._commits

    def kept(self, round_index: int) -> Kept | None:
        """A result that is whole, if it is one of the last."""
        return self._desk.shelf.get(round_index)

    def rejoined(self) -> None:
        """Another stream of the session has opened the round in flight again: say what that may not know."""
        if self._abstaining is not None:
            self._session.send(self._abstaining)
        if self._deliveries is not None:
            self._deliveries.repeat()

    def _show(self, order: pb.Retally) -> None:
        """Show lines of a round in flight, if they are here."""
        if order.received:
            if (shown := self._desk.show(order)) is not None:
                self._session.send(pb.NodeMessage(shown=shown))
        elif self._deliveries is not None:
            self._deliveries.show(order)

    def _remember(self, commit: pb.Commit) -> None:
        self._commits[commit.round] = commit
        while len(self._commits) > _COMMITS:
            self._commits.popitem(last=False)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------------------------------------- rounds

    async def reduce(
        self,
        order: RoundOrder,
        payload: memoryview | None,
        filling: Filling | None,
        into: memoryview,
        reason: str,
        on_sent: Callable[[], None] = lambda: None,
    ) -> pb.Commit:
        """See :class:`node.exchange.between.Between`."""
        work = self._commit_of(order, payload, filling, into, reason, on_sent)
        what = f"the commit of round {order.round + 1}"
        began_at = self._now()
        commit = await within(self._limits.round, what, work)
        silence = min(self._limits.stall, max(_SILENCE_SECONDS, patience(self._now() - began_at)))
        await self.complete(commit, into, "result", silence)
        self._on_round()
        return commit

    async def complete(
        self, commit: pb.Commit, into: memoryview, counted: Counted, silence: float | None = None
    ) -> None:
        """Fetch what ``into`` lacks of a committed result, and keep the result for others.

        Args:
            commit: of slices; without voters there is nothing to do.
            into: the result, of which parts may be here already.
            counted: what kind of bytes it is.
            silence: seconds that a holder may send nothing; ``None``: as long as the limits say.

        Raises:
            Trouble: it is not to be had at present, or the commit is damaged.
        """
        if not commit.slices:
            return
        if self._plan is None:
            await within(self._limits.stall, "a topology", self._first_plan())
        assert self._plan is not None
        what = f"the result of round {commit.round + 1}"
        stall = self._limits.stall if silence is None else silence
        fetched = self._fetching.complete(commit, into, self._plan, counted, stall)
        with self._rates.moving("down"):
            await within(self._limits.transfer, what, fetched)
        self._desk.shelf.put(commit.round, commit, bytes(into))

    async def _commit_of(
        self,
        order: RoundOrder,
        payload: memoryview | None,
        filling: Filling | None,
        into: memoryview,
        reason: str,
        on_sent: Callable[[], None],
    ) -> pb.Commit:
        if payload is not None and not self.decided(order.round):
            contribution = Contribution(payload, filling, (order.lease_start, order.lease_count))
            try:
                return await self._contribute(order, contribution, into, on_sent)
            except Withdrawn as withdrawn:
                reason = str(withdrawn)
        if not self.decided(order.round):
            await self._abstain(pb.Abstention(round=order.round, reason=reason))
        return self._commits[order.round]

    async def _abstain(self, abstention: pb.Abstention) -> None:
        """Say so, and wait until the round is decided."""
        message = self._abstaining = pb.NodeMessage(abstention=abstention)
        self._session.send(message)
        try:
            while not self.decided(abstention.round):
                await self._changed.wait()
        finally:
            if self._abstaining is message:  # else a later round has begun
                self._abstaining = None

    async def _contribute(
        self,
        order: RoundOrder,
        contribution: Contribution,
        into: memoryview,
        on_sent: Callable[[], None],
    ) -> pb.Commit:
        """Send until the round is decided.

        Raises:
            Withdrawn: the contribution has come to nothing, for a reason of this node or of a reducer.
            Trouble: the topology cannot be used.
        """
        table = self._tables.of(order.round)
        deliveries = Deliveries(order.round, table, contribution, into, self._means, on_sent)
        self._deliveries = deliveries
        usable = asyncio.ensure_future(contribution.final(len(contribution.payload) + 1))
        try:
            while not self.decided(order.round):
                plan, changed = self._plan, asyncio.ensure_future(self._changed.wait())
                if plan is not None and plan.number >= order.topology:
                    deliveries.follow(plan)
                pending: set[asyncio.Future[Any]] = {changed, deliveries.refused}
                if not usable.done():
                    pending.add(usable)
                try:
                    await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                if usable.done():
                    usable.result()
                if deliveries.refused.done():
                    raise Withdrawn(deliveries.refused.result())
            commit = self._commits[order.round]
            with self._rates.moving("down"):
                silence = min(_SILENCE_SECONDS, self._limits.stall, patience(deliveries.took))
                await deliveries.settle(commit, silence)
            return commit
        finally:
            deliveries.stop()
            usable.cancel()
            if self._deliveries is deliveries:  # else a later round has begun
                self._deliveries = None

    async def _first_plan(self) -> None:
        while self._plan is None:
            await self._changed.wait()

    async def close(self) -> None:
        """End everything."""
        self._ways.close()
        for carrier in self._carriers:
            await carrier.close()
        self._desk.close()
