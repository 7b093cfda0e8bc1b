"""What the tests of the hub exchange share: short limits, a virtual clock, payloads and orders."""

from __future__ import annotations

from collections.abc import Callable

import torch

from node.exchange.base import RoundOrder, RoundResult, WorkReport
from node.exchange.hub import HubExchange
from node.exchange.link import Limits
from node.exchange.retry import Backoff, Timing
from node.exchange.session import Claim
from protos import atoll_pb2 as pb
from protos import wire
from protos.buckets import Bucket, BucketTable, TableSchedule
from tests.node.fake_hub import DEADLINE, FakeHub

SMALL = 192  # bytes: one chunk
LARGE = 2 * wire.CHUNK_BYTES + 128  # three chunks
LIMITS = Limits(
    wait=DEADLINE, reconnect=DEADLINE, order=DEADLINE, round=DEADLINE, transfer=DEADLINE, leave=1.0
)
TIMING = Timing(backoff=Backoff(first=0.01, cap=0.05))


def tables(nbytes: int) -> TableSchedule:
    """One table, of a contribution and a result of ``nbytes``, a multiple of 64."""
    return TableSchedule((BucketTable((Bucket.of("w", "mean", [("w", (nbytes // 4,))]),)),))


CLAIM = Claim(
    name="test",
    run_digest="run",
    table_digest="tables",
    data_digest="data",
    dtype="float32",
    state_digest="s0",
    round=0,
    weight=3,
    state_bytes=1000,
)
Make = Callable[..., HubExchange]  # the fixture ``make``


class FakeClock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.time = 0.0
        self.pauses: list[float] = []

    def timing(self, backoff: Backoff | None = None) -> Timing:
        return Timing(
            now=lambda: self.time, sleep=self._sleep, uniform=lambda: 1.0, backoff=backoff or Backoff()
        )

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def take_part(
    hub: FakeHub,
    exchange: HubExchange,
    payload: torch.Tensor | None,
    reason: str = "",
    *,
    round_index: int = 0,
) -> RoundResult:
    """Open a round, take the order and contribute."""
    hub.open_round(round_index)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder) and order.round == round_index
    return exchange.reduce(order, payload, reason)


def report(round_index: int, digest: str) -> WorkReport:
    return WorkReport(round_index, digest, 2.5, 64, 0.1, 0.2)


def next_message(hub: FakeHub, kind: str) -> pb.NodeMessage:
    """The next message of ``kind`` from the node; others are dropped."""
    while True:
        message = hub.messages.get(timeout=DEADLINE)
        if message.WhichOneof("kind") == kind:
            return message
