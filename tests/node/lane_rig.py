"""An island's lanes to a scripted coordinator, in the threads of one process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from node.exchange.base import RoundOrder, RoundResult
from node.exchange.hub import HubExchange
from node.exchange.in_flight import InFlight
from node.exchange.lane import LaneExchange
from node.island.broadcast import Receiver, Sender
from node.island.session_news import StoreNews
from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.invite import Invite
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub, Upload
from tests.node.hub_rig import CLAIM, LIMITS, TIMING, pattern

TABLE = BucketTable(
    (
        Bucket.of("a", "majority", [("a", (70_000,))]),
        Bucket.of("b", "majority", [("b", (4_000,))]),
        Bucket.of("c", "mean", [("c", (600,))], codec="fp32", result="int8"),
        Bucket.of("d", "mean", [("d", (33,))]),
    )
)
SCHEDULE = TableSchedule((TABLE,))
PARTS = ({"a", "d"}, {"b", "c"}, set[str]())  # of the ranks; one may hold nothing
PAYLOAD, RESULT = pattern(TABLE.nbytes, 1), pattern(TABLE.result_nbytes, 2)


def slices(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int], part: set[str]) -> torch.Tensor:
    """The bytes of the buckets of ``part``, one after the other."""
    rows = zip(TABLE.buckets, offsets, sizes, strict=True)
    pieces = [whole[start : start + size] for bucket, start, size in rows if bucket.name in part]
    return torch.cat([*pieces, whole[:0]])


def contributed(part: set[str]) -> torch.Tensor:
    """Of :data:`PAYLOAD`."""
    return slices(PAYLOAD, TABLE.offsets, [bucket.nbytes for bucket in TABLE.buckets], part)


def received(part: set[str]) -> torch.Tensor:
    """Of :data:`RESULT`."""
    return slices(RESULT, TABLE.result_offsets, [bucket.result_nbytes for bucket in TABLE.buckets], part)


class LaneRound:
    """A coordinator's script for one round: once all lanes are there, each gets its part of the result.

    Args:
        lanes: how many.
        commit: other fields of the commits.
    """

    def __init__(self, lanes: int = len(PARTS), **commit: Any) -> None:
        self.arrived = threading.Semaphore(0)  # once for every lane
        self.uploads: list[Upload] = []
        self._lanes, self._commit = lanes, commit
        self._whole = asyncio.Event()

    async def __call__(self, stream: ExchangeStream) -> None:
        upload = await stream.upload()
        self.uploads.append(upload)
        self.arrived.release()
        if len(self.uploads) >= self._lanes:
            self._whole.set()
        await self._whole.wait()
        await self.answer(stream, upload)

    async def answer(self, stream: ExchangeStream, upload: Upload) -> None:
        """The lane's part of the result."""
        part = {TABLE.buckets[index].name for index in upload.header.buckets}
        lane = received(part).numpy().tobytes()
        await stream.chunks(lane)
        await stream.commit(upload.header.round, lane, **self._commit)


class Island:
    """The exchanges of its ranks; ``routes`` are other invites for some of them."""

    def __init__(self, hub: FakeHub, routes: dict[int, Invite] | None = None) -> None:
        store, followers = dist.HashStore(), len(PARTS) - 1  # type: ignore[attr-defined]
        self.sender = Sender(store, "session", followers, every=0.02)
        self.leader = HubExchange(
            hub.invite, limits=LIMITS, timing=TIMING, publish=StoreNews(self.sender).publish
        )
        self.followers = [
            LaneExchange(
                (routes or {}).get(rank, hub.invite),
                StoreNews(Receiver(store, "session", followers, silence=DEADLINE)),
                SCHEDULE,
                SCHEDULE.part(part),
                weight=CLAIM.weight,
                limits=LIMITS,
                timing=TIMING,
            )
            for rank, part in enumerate(PARTS)
            if rank
        ]
        claim = replace(CLAIM, ranks=len(PARTS), batch=6)
        self.leader.join(claim, SCHEDULE, lane=SCHEDULE.part(PARTS[0]))
        hub.sessions.get(timeout=DEADLINE)

    @property
    def lanes(self) -> list[HubExchange | LaneExchange]:
        """By rank."""
        return [self.leader, *self.followers]

    def begin(self, hub: FakeHub, round_index: int = 0) -> list[Callable[[], RoundResult]]:
        """Open a round in which all ranks contribute; what they receive, by rank."""
        hub.open_round(round_index)
        order = self.leader.next_order()
        assert isinstance(order, RoundOrder)

        def start(lane: HubExchange | LaneExchange, part: set[str]) -> Callable[[], RoundResult]:
            return InFlight(lambda: lane.reduce(order, contributed(part)), "lane").result

        return [start(lane, part) for lane, part in zip(self.lanes, PARTS, strict=True)]

    def close(self) -> None:
        """End everything."""
        self.sender.close("test over")
        for lane in self.lanes:
            lane.close("test over")
