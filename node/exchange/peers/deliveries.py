"""A contribution to a round whose slices travel between nodes: all its deliveries, as plans come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from node.exchange.peers.delivery import Delivery, Means, Place
from node.exchange.peers.lines import check_lines, lines_of
from node.exchange.peers.pace import Coming, standing_still
from node.exchange.peers.plan import Plan, Share
from node.exchange.peers.uplink import HOLD_SECONDS
from node.exchange.peers.upload import Contribution
from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import BucketTable
from protos.digests import slices_digest


class Deliveries:
    """Of one round.

    Args:
        round_index: which.
        table: of the round.
        contribution: what goes out, ``table.nbytes`` of it.
        into: the whole result, ``table.result_nbytes``.
        means: what deliveries are made with.
        on_sent: called once, when every slice has been handed over whole.

    Attributes:
        refused: comes to its end with the reason if the contribution is no good.
    """

    def __init__(
        self,
        round_index: int,
        table: BucketTable,
        contribution: Contribution,
        into: memoryview,
        means: Means,
        on_sent: Callable[[], None],
    ) -> None:
        self.refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._round, self._table, self._contribution = round_index, table, contribution
        self._into, self._means, self._on_sent = into, means, on_sent
        self._deliveries: list[Delivery] = []
        self._all_sent = False
        self._number = 0  # of the plan
        self._under_way = asyncio.Event()  # something has gone to every other reducer
        self._began_at = means.timing.now()
        self._whole_at: dict[Share, float] = {}  # since when each result is here
        self._news = asyncio.Event()
        self._watching = asyncio.ensure_future(self._watch())
        self._told = (0, b"")  # plan and digest of the whole result that the coordinator knows to be here
        self._asked: pb.Retally | None = None  # for lines of a result that is not here yet

    def follow(self, plan: Plan) -> None:
        """Go by this plan: what it has in common with the one before goes on, the rest is begun anew. One
        that has no slices of the table is of later rounds, and changes nothing.

        Raises:
            Trouble: it does not fit the table.
        """
        if not (shares := plan.shares(self._table)):
            return
        self._number = plan.number
        going_on = {delivery.share: delivery for delivery in self._deliveries}
        for share in going_on.keys() - set(shares):
            going_on[share].stop()
        self._deliveries = []
        for index, share in enumerate(shares):
            place = Place(plan, index)
            if share in going_on:
                going_on[share].place = place
                self._deliveries.append(going_on[share])
                continue
            into = self._into[share.slice.out_start : share.slice.out_end]
            self._deliveries.append(
                Delivery(
                    share,
                    place,
                    self._round,
                    self._contribution,
                    into,
                    self._means,
                    self._look,
                    self._refuse,
                    self._turn,
                )
            )
        self._look()

    def repeat(self) -> None:
        """Say again what the coordinator may have forgotten; what it asked for before is void."""
        self._told, self._asked = (0, b""), None
        self._look()

    def show(self, order: pb.Retally) -> None:
        """Show lines of the contribution, and of the result as soon as it is here.

        Raises:
            Trouble: kind PROTOCOL: there are no such lines.
        """
        if order.round != self._round:
            return  # and perhaps of another table
        check_lines(order, self._table)
        if not self._contribution.written:
            return
        shown = pb.Shown(round=order.round, question=order.question)
        shown.contribution = lines_of(self._contribution.payload, order.lines)
        self._means.tell(pb.NodeMessage(shown=shown))
        self._asked = order
        self._look()

    def _show_result(self, whole: bytes) -> None:
        order = self._asked
        if order is None or order.digest != whole:
            return
        self._asked = None
        shown = pb.Shown(round=order.round, question=order.question)
        shown.result = lines_of(self._into, order.out_lines)
        self._means.tell(pb.NodeMessage(shown=shown))

    @property
    def took(self) -> float:
        """Seconds since they began."""
        return self._means.timing.now() - self._began_at

    async def settle(self, commit: pb.Commit, silence: float) -> None:
        """The round is decided: wait for what still comes of its result, ``silence`` seconds longer than it
        does, and end all streams."""
        self._watching.cancel()
        decided = {(row.out_start, row.out_end): row.digest for row in commit.slices}
        waits = []
        for delivery in self._deliveries:
            part = delivery.share.slice
            digest = decided.get((part.out_start, part.out_end))
            if digest is None:
                delivery.stop()
            else:
                waits.append(self._settle(delivery, digest, silence))
        await asyncio.gather(*waits)
        self._deliveries = []  # each has been stopped as it should be

    async def _settle(self, delivery: Delivery, digest: bytes, silence: float) -> None:
        delivery.stop(politely=await delivery.holds(digest, silence))

    def stop(self) -> None:
        """End all streams that have not been, and write to the result no more."""
        self._watching.cancel()
        for delivery in self._deliveries:
            delivery.stop()

    async def _turn(self) -> None:
        """This node's own slice: the links stand still until something has gone to the other reducers. One
        that takes nothing holds it up no longer than it holds up results."""
        with suppress(Trouble):
            await within(HOLD_SECONDS, "the first parts of other slices", self._under_way.wait())

    def _look(self) -> None:
        if all(delivery.begun or delivery.own for delivery in self._deliveries):
            self._under_way.set()
        if not self._all_sent and all(delivery.sent for delivery in self._deliveries):
            self._all_sent = True
            self._on_sent()
        now = self._means.timing.now()
        self._whole_at = {
            delivery.share: self._whole_at.get(delivery.share, now)
            for delivery in self._deliveries
            if delivery.result is not None
        }
        self._news.set()
        results = [delivery.result for delivery in self._deliveries]
        whole = [digest for digest in results if digest is not None]
        if len(whole) < len(results):
            return
        held = self._number, slices_digest(whole)
        self._show_result(held[1])
        if held != self._told:
            self._told = held
            holding = pb.Holding(round=self._round, topology=held[0], digest=held[1])
            self._means.tell(pb.NodeMessage(holding=holding))

    async def _watch(self) -> None:
        """Tell of results that stand still."""
        while True:
            self._news.clear()
            now = self._means.timing.now()
            coming = [
                Coming(one.share.reducer, self._whole_at.get(one.share), one.moved_at)
                for one in self._deliveries
            ]
            still, until = standing_still(coming, self._began_at, now)
            for index in still:
                silence = f"{now - max(self._whole_at.values()):.3g} s after the results of all others"
                reason = f"nothing more comes from {coming[index].reducer}, {silence}"
                self._deliveries[index].in_trouble(Trouble(Kind.SILENT, reason))
            if until is None:
                await self._news.wait()
                continue
            with suppress(Trouble):
                await within(until - now, "a part of the last result", self._news.wait())

    def _refuse(self, reason: str) -> None:
        if not self.refused.done():
            self.refused.set_result(reason)
