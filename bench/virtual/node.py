"""A simulated node: the real session, contributor and transfers of a node around a worker that only pretends.

The worker follows the same orders as :class:`node.worker.Worker`, holds a real shared state and makes real
votes; what it takes for computing is a pause.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import Final, Protocol, cast

import numpy as np
import torch
from grpc import aio

from bench.virtual.invariants import Checker, Work, random_votes
from bench.virtual.line import Line, Process
from bench.virtual.network import Call, Channel
from bench.virtual.site import TOKEN, Site
from bench.virtual.state import BATCH, RUN_DIGEST, TABLES, Replica
from node.exchange.base import DonateOrder, ExchangeError, LoadOrder, ReplayOrder, RoundOrder, StopOrder
from node.exchange.chunks_down import get_chunks
from node.exchange.chunks_up import Uploads
from node.exchange.contributor import Contributor
from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.retry import Backoff, Timing
from node.exchange.session import Claim, Session
from node.exchange.spool import Spool
from node.exchange.tensor_bytes import Row, byte_view
from node.exchange.trouble import RoundLost, TransferError, Trouble
from protos import atoll_pb2 as pb
from protos.invite import Invite
from protos.snapshots import chunk_range

SAVE_EVERY: Final = 3  # rounds between two checkpoints
SLOW, SLOW_SHARE = 5.0, 0.1  # some nodes are so much slower
ABSTAIN: Final = 0.03  # of the rounds: something was not finite
LIMITS: Final = Limits(
    wait=300.0, reconnect=300.0, call=5.0, order=3600.0, round=600.0, stall=20.0, leave=1.0
)


class Surroundings(Protocol):
    """What a node needs of its world."""

    site: Site
    checker: Checker

    async def at(self, node: Node, phase: str, round_index: int) -> None:
        """The node has come to a phase; what is scheduled there happens now."""
        ...


class _SimulatedLink(Link):
    """A link over the simulated network."""

    def __init__(self, channels: tuple[Channel, Channel, Channel]) -> None:
        super().__init__(Invite(TOKEN, "127.0.0.1", 1), Meter(), LIMITS)
        self._channels = channels

    def open(self) -> None:
        """See :class:`node.exchange.link.Link`."""
        channels = (cast(aio.Channel, channel) for channel in self._channels)
        self._control, self._bulk, self._downloads = channels

    async def _looked_at(self, trouble: Trouble) -> Trouble:
        """See :class:`node.exchange.link.Link`: no socket is there to look at."""
        return trouble


class Node:
    """One process of a node, from its start to its end.

    Args:
        world: around it.
        name: of the node; several processes may have it, one after the other.
        line: its connection.
        seed: of its pace, its votes and its mishaps.
        saved: the checkpoint that it resumes, and the first sample behind all leases that it knew of.

    Attributes:
        process: as the network sees it.
        saved: the last checkpoint.
        ahead: seconds by which its clock is ahead.
        identity: of this process among all.
        why: how its run ended, in words.
    """

    def __init__(
        self,
        world: Surroundings,
        name: str,
        line: Line,
        seed: str,
        saved: tuple[tuple[int, bytes], int] | None = None,
    ) -> None:
        self.name = name
        self.process = Process(name)
        self.line = line
        self.replica = Replica()
        self.ahead = 0.0
        self.why = ""
        self.identity = ""  # of this process among all
        self.done = False  # it was told that the run is done
        self.saved = saved
        self._samples = 0
        if saved is not None:
            self.replica.restore(saved[0])
            self._samples = saved[1]
        self._world = world
        self._random = random.Random(seed)
        self._votes = np.random.default_rng(self._random.getrandbits(63))
        self._pace = self._random.uniform(0.2, 0.6) * (SLOW if self._random.random() < SLOW_SHARE else 1.0)
        timing = Timing(self._now, self._sleep, self._random.random, Backoff(0.2, 2.0, 3.0))
        control, bulk, downloads = (Channel(world.site, line, self.process) for _ in range(3))
        bulk.on_write = self._writing
        self._link = _SimulatedLink((control, bulk, downloads))
        self._timing = timing
        self._session = Session(self._link, timing, self._say)
        self._contributor = Contributor(
            self._link, self._session, tables=TABLES, lane=None, weight=1, timing=timing, say=self._say
        )
        self._uploads = Uploads(
            self._link,
            lambda: self._session.secret,
            lambda: self._contributor.sending,
            timing,
            self._say,
        )
        tensor = self.replica.tensor
        self._rows = [Row("w", "float32", tuple(tensor.shape))]
        self.said: list[str] = []

    def _now(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead

    async def _sleep(self, seconds: float) -> None:
        """A pause of the process, longer if it is stopped meanwhile."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(seconds)
        while self.process.awake_at > loop.time():
            await asyncio.sleep(self.process.awake_at - loop.time())

    def _say(self, text: str) -> None:
        self.said.append(text)

    async def _at(self, phase: str, round_index: int) -> None:
        await self._world.at(self, phase, round_index)
        await self._sleep(0)

    async def _writing(self, call: Call, index: int) -> None:
        """Between the frames of a contribution, and behind the last."""
        if call.name == "Exchange" and index in (1, 3):
            await self._at("sending" if index == 1 else "waiting", self.replica.round)
        elif call.name == "PutChunks" and index == 1:
            await self._at("donating", self.replica.round)

    # ------------------------------------------------------------------------------------ its life

    async def live(self) -> None:
        """Join, follow orders until the stop, and leave.

        Raises:
            ExchangeError: it cannot go on.
        """
        self._link.open()
        await self._at("joining", self.replica.round)
        claim = Claim(
            name=self.name,
            run_digest=RUN_DIGEST,
            table_digest=TABLES.digest,
            data_digest="data",
            dtype="float32",
            state_digest=self.replica.digest,
            round=self.replica.round,
            weight=1,
            samples=self._samples,
            state_bytes=self.replica.tensor.nbytes,
        )
        await self._session.join(claim, LIMITS.wait)
        stop = await self._follow()
        self.why, self.done = stop.reason, stop.done
        await self.leave("the run has ended")

    async def leave(self, reason: str) -> None:
        """Say goodbye."""
        self._contributor.cancel()
        self._uploads.cancel()
        await self._session.leave(reason)
        await self._link.close()

    async def _follow(self) -> StopOrder:
        while True:
            order = await self._session.next_order()
            await self._sleep(0)
            if isinstance(order, RoundOrder):
                await self._round(order)
            elif isinstance(order, DonateOrder):
                self._donate(order)
            elif isinstance(order, LoadOrder):
                await self._try(self._load(order))
            elif isinstance(order, ReplayOrder):
                await self._try(self._replay(order))
            else:
                return order

    async def _try(self, work: Awaitable[None]) -> None:
        try:
            await work
        except TransferError as error:
            self._say(str(error))

    async def _round(self, order: RoundOrder) -> None:
        replica = self.replica
        if order.round < replica.round:
            return
        if order.round > replica.round:
            raise ExchangeError(
                f"round {order.round} was opened, but this node holds that of {replica.round}"
            )
        self._samples = max(self._samples, order.frontier)
        payload, reason = None, "catching up"
        if not order.result_ready:
            await self._at("computing", order.round)
            await self._sleep(self._pace * self._random.uniform(0.8, 1.2))
            payload, reason = self._compute(order)
        try:
            result = await self._contributor.reduce(order, payload, reason, None)
        except RoundLost as lost:
            self._say(str(lost))
            return
        await self._at("applying", order.round)
        data = None if result.payload is None else bytes(byte_view(result.payload))
        self._apply(data)
        await self._at("reporting", order.round)
        self._report(order.round)

    def _compute(self, order: RoundOrder) -> tuple[torch.Tensor | None, str]:
        if self._random.random() < ABSTAIN:
            return None, "loss is nan"
        votes = random_votes(self._votes)
        self._world.checker.computed(
            votes, Work(self.name, order.round, order.lease_start, order.lease_count)
        )
        return torch.frombuffer(bytearray(votes), dtype=torch.uint8), ""

    def _apply(self, data: bytes | None) -> None:
        replica = self.replica
        replica.apply(data)
        self._world.checker.applied(self.name, replica.round - 1, data, replica)
        if replica.round % SAVE_EVERY == 0:
            self.saved = replica.saved(), self._samples

    def _report(self, round_index: int) -> None:
        digest = self.replica.digest
        report = pb.Report(round=round_index, state_digest=digest, loss=2.0, tokens=BATCH)
        self._session.hold_state(round_index + 1, digest)
        self._session.send(pb.NodeMessage(report=report))

    # ------------------------------------------------------------------------------------ the shared state

    def _donate(self, order: DonateOrder) -> None:
        if order.round != self.replica.round:
            self._say(f"asked for the state of {order.round}, holds that of {self.replica.round}")
            return
        spool = Spool(self._rows, order.first, order.count, state_digest=self.replica.digest)
        spool.write(spool.start, byte_view(self.replica.tensor)[spool.start : spool.stop])
        self._uploads.start(order, spool, self._say)

    async def _load(self, order: LoadOrder) -> None:
        await self._at("loading", order.round)
        session = self._session
        spool = await get_chunks(
            self._link, lambda: session.secret, order, self._rows, self._timing, self._say
        )
        try:
            start, stop = chunk_range(spool.nbytes, 0, spool.count)
            spool.read(start, byte_view(self.replica.tensor)[start:stop])
        finally:
            spool.close()
        self.replica.loaded(order.round)
        self._world.checker.holds(self.name, self.replica)
        self._ready(order.frontier)

    async def _replay(self, order: ReplayOrder) -> None:
        await self._at("replaying", order.first)
        if not order.first <= self.replica.round <= order.first + order.count:
            raise ExchangeError(f"told to replay from {order.first} on, this holds {self.replica.round}")
        replay = self._contributor.replay(order)
        try:
            while (result := await replay.next()) is not None:
                if result.round == self.replica.round:
                    self._apply(None if result.payload is None else bytes(byte_view(result.payload)))
        finally:
            await replay.close()
        self._ready(order.frontier)

    def _ready(self, frontier: int) -> None:
        self._samples = max(self._samples, frontier)
        replica = self.replica
        self._session.hold_state(replica.round, replica.digest)
        ready = pb.Ready(round=replica.round, state_digest=replica.digest)
        self._session.send(pb.NodeMessage(ready=ready))
