"""A node of three lanes beside a node of one stream, in a run of the real coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from node.exchange.base import RoundOrder, RoundResult, WorkReport
from node.exchange.filling import Filling
from node.exchange.hub import HubExchange
from node.exchange.in_flight import InFlight
from node.exchange.lane import LaneExchange
from node.exchange.session import Claim
from node.island.broadcast import Receiver, Sender
from node.island.session_news import StoreNews
from optim.reduce import reduce_payloads
from protos.buckets import BucketTable
from protos.invite import Invite
from tests.node.fleet import DEADLINE, LIMITS, TIMING, TOKEN, Fleet, tiny_tables
from tests.node.relay import Relay
from tests.node.tiny import run_file

RUN = run_file(8, nodes=2)
TABLES = tiny_tables(RUN)
CLAIM = Claim("single", RUN.digest, TABLES.digest, "data", "float32", "start", 0, 1, state_bytes=1000)


def parts() -> list[set[str]]:
    """Every other bucket on rank 0 and on rank 1, none on rank 2."""
    names = [bucket.name for bucket in TABLES.of(0).buckets]
    return [set(names[::2]), set(names[1::2]), set()]


def payload(table: BucketTable, seed: int) -> torch.Tensor:
    """A contribution that a coordinator takes: any votes, and numbers where means are taken."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.zeros(table.nbytes, dtype=torch.uint8)
    for bucket, start in zip(table.buckets, table.offsets, strict=True):
        view = out[start : start + bucket.nbytes]
        if bucket.reduce == "majority":
            view.copy_(torch.randint(0, 256, view.shape, dtype=torch.uint8, generator=generator))
        else:
            assert bucket.codec == "fp32"
            view[: 4 * bucket.elements].view(torch.float32).normal_(generator=generator)
    return out


def cut_out(whole: torch.Tensor, table: BucketTable, part: set[str], result: bool) -> torch.Tensor:
    """The part's bytes of a contribution, or of a result."""
    pieces = [whole[:0]]
    offsets = table.result_offsets if result else table.offsets
    for bucket, start in zip(table.buckets, offsets, strict=True):
        if bucket.name in part:
            pieces.append(whole[start : start + (bucket.result_nbytes if result else bucket.nbytes)])
    return torch.cat(pieces)


class Run:
    """A coordinator, a node of one stream, and an island whose leader's way can be cut."""

    def __init__(self, fleet: Fleet) -> None:
        self.coordinator = fleet.coordinator(RUN, TABLES)
        invite = self.coordinator.invite
        self.relay = Relay(invite.port)
        self.back = threading.Event()  # the island has joined again
        store, parts_ = dist.HashStore(), parts()  # type: ignore[attr-defined]
        self.sender = Sender(store, "session", len(parts_) - 1, every=0.05)
        self.single = HubExchange(invite, limits=LIMITS, timing=TIMING)
        self.leader = HubExchange(
            Invite(TOKEN, "127.0.0.1", self.relay.port),
            limits=LIMITS,
            timing=TIMING,
            say=self._hear,
            publish=StoreNews(self.sender).publish,
        )
        self.followers = [
            LaneExchange(
                invite,
                StoreNews(Receiver(store, "session", len(parts_) - 1, silence=DEADLINE)),
                TABLES,
                TABLES.part(part),
                limits=LIMITS,
                timing=TIMING,
            )
            for part in parts_[1:]
        ]
        self.single.join(CLAIM, TABLES)
        self.leader.join(replace(CLAIM, name="island", ranks=3, batch=2), TABLES, TABLES.part(parts_[0]))

    def _hear(self, text: str) -> None:
        if "again, as node-" in text:
            self.back.set()

    def orders(self, round_index: int) -> tuple[RoundOrder, RoundOrder]:
        """The round, as it is opened to the node of one stream and to the island."""
        found = []
        for exchange in (self.single, self.leader):
            order = exchange.next_order()
            while isinstance(order, RoundOrder) and order.round < round_index:
                order = exchange.next_order()
            assert isinstance(order, RoundOrder) and order.round == round_index
            found.append(order)
        return found[0], found[1]

    def lanes(
        self, order: RoundOrder, whole: torch.Tensor, fillings: list[Filling] | None = None
    ) -> list[Callable[[], RoundResult]]:
        """All lanes of the island contribute their parts."""

        def begin(rank: int, lane: HubExchange | LaneExchange) -> Callable[[], RoundResult]:
            mine = cut_out(whole, TABLES.of(order.round), parts()[rank], result=False)
            filling = fillings[rank] if fillings else None
            return InFlight(lambda: lane.reduce(order, mine, filling=filling), f"lane-{rank}").result

        return [begin(rank, lane) for rank, lane in enumerate((self.leader, *self.followers))]

    def report(self, round_index: int) -> None:
        for exchange in (self.single, self.leader):
            exchange.report(WorkReport(round_index, f"digest-{round_index}", 1.0, 4, 0.1, 0.1))

    def close(self) -> None:
        self.sender.close("test over")
        for lane in (self.single, self.leader, *self.followers):
            lane.close("test over")
        self.relay.close()


@pytest.fixture
def run(fleet: Fleet) -> Iterator[Run]:
    made = Run(fleet)
    yield made
    made.close()


def check(
    round_index: int, single: RoundResult, lanes: list[RoundResult], payloads: list[torch.Tensor]
) -> None:
    """Everybody has received the reduction of ``payloads``, each in its own part."""
    table = TABLES.of(round_index)
    expected = reduce_payloads(table, payloads, round_index=round_index)
    assert expected is not None and single.payload is not None and torch.equal(single.payload, expected)
    assert len(single.voters) == len(payloads)
    for result, part in zip(lanes, parts(), strict=True):
        assert result.payload is not None
        assert torch.equal(result.payload, cut_out(expected, table, part, result=True))
        assert result.voters == single.voters
    assert len({result.counted for result in lanes}) == 1


def test_island_of_three_lanes_votes_as_one_node_and_survives_what_happens(run: Run) -> None:
    names = {}
    # 0: all lanes at once
    whole = [payload(TABLES.of(0), seed) for seed in (1, 2)]
    to_single, to_island = run.orders(0)
    assert len(to_island.members) == 2
    ends = run.lanes(to_island, whole[1])
    alone = run.single.reduce(to_single, whole[0])
    lanes = [end() for end in ends]
    names = {"single": alone.voters[0], "island": alone.voters[1]}
    check(0, alone, lanes, whole)
    assert all(result.counted for result in lanes)
    for lane, part in zip((run.leader, *run.followers), parts(), strict=True):
        sent = lane.meter.counts()["up", "contribution"]
        share = sum(bucket.nbytes for bucket in TABLES.of(0).buckets if bucket.name in part)
        assert share <= sent <= share + 300, "bytes per lane are its share"
    run.report(0)

    # 1: written while it is sent
    whole = [payload(TABLES.of(1), seed) for seed in (3, 4)]
    to_single, to_island = run.orders(1)
    fillings = [Filling(cut_out(whole[1], TABLES.of(1), part, result=False).numel()) for part in parts()]
    ends = run.lanes(to_island, whole[1], fillings)
    flight = InFlight(lambda: run.single.reduce(to_single, whole[0]), "single")
    for filling in fillings:
        filling.advance(filling.nbytes // 2)
        filling.finish(True)
    lanes = [end() for end in ends]
    check(1, flight.result(), lanes, whole)
    assert all(result.counted for result in lanes)
    run.report(1)

    # 2: not usable on any rank
    whole = [payload(TABLES.of(2), seed) for seed in (5, 6)]
    to_single, to_island = run.orders(2)
    fillings = [Filling(filling.nbytes) for filling in fillings]
    ends = run.lanes(to_island, whole[1], fillings)
    flight = InFlight(lambda: run.single.reduce(to_single, whole[0]), "single")
    for filling in fillings:
        filling.finish(False, "a gradient is not finite")
    lanes = [end() for end in ends]
    check(2, flight.result(), lanes, whole[:1])
    assert not any(result.counted for result in lanes) and names["island"] not in lanes[0].voters
    run.report(2)

    # 3: the leader is cut off while the lanes wait for the commit, and joins again
    whole = [payload(TABLES.of(3), seed) for seed in (7, 8)]
    to_single, to_island = run.orders(3)
    ends = run.lanes(to_island, whole[1])
    run.relay.cut()
    run.relay.restore()
    assert run.back.wait(DEADLINE)
    alone = run.single.reduce(to_single, whole[0])
    lanes = [end() for end in ends]
    check(3, alone, lanes, whole[: len(alone.voters)])
    assert lanes[0].counted == (len(alone.voters) == 2)
    run.report(3)
