"""A node of three lanes beside a node of one stream, in a run of the real coordinator: at the hub, and where
slices travel between the two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from coordinator.events import NodeLeft, NodeRejoined
from node.exchange.base import ReplayOrder, RoundOrder, RoundResult, WorkReport
from node.exchange.filling import Filling
from node.exchange.hub import HubExchange
from node.exchange.in_flight import InFlight
from node.exchange.lane import LaneExchange
from node.exchange.peers.setting import PeerSetting, Transport
from node.exchange.peers.shelf import Shelf
from node.exchange.session import Claim
from node.island.broadcast import Receiver, Sender
from node.island.session_news import StoreNews
from optim.reduce import reduce_payloads
from protos.buckets import BucketTable
from protos.invite import Invite
from protos.traffic import COORDINATOR
from tests.node.fleet import DEADLINE, LIMITS, TIMING, TOKEN, Fleet, Log, tiny_tables
from tests.node.peers.mesh_rig import LOOPBACK, SWARM, transported
from tests.node.relay import Relay
from tests.node.tiny import run_file

TABLES = tiny_tables(run_file(8, nodes=2))
OVERHEAD = 2_000  # bytes of headers in a round


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
    """A coordinator, a node of one stream, and an island whose leader's way to that can be cut."""

    def __init__(self, fleet: Fleet, transport: Transport) -> None:
        file = transported(run_file(8, nodes=2), transport)
        self.between = transport != "hub"
        self.log = Log()
        self.coordinator = fleet.coordinator(file, TABLES, on_event=self.log.listener("coordinator"))
        claim = Claim(
            "single", file.digest, TABLES.digest, "data", "float32", "start", 0, 1, state_bytes=1000
        )
        invite = self.coordinator.invite
        self.relay = Relay(invite.port)
        store, parts_ = dist.HashStore(), parts()  # type: ignore[attr-defined]
        self.sender = Sender(store, "session", len(parts_) - 1, every=0.05)
        self.single = HubExchange(invite, limits=LIMITS, timing=TIMING)
        self.leader = HubExchange(
            Invite(TOKEN, "127.0.0.1", self.relay.port),
            limits=LIMITS,
            timing=TIMING,
            publish=StoreNews(self.sender).publish,
        )
        lanes = [TABLES.part(part) for part in parts_]
        place = self.leader.lead(file.digest, "127.0.0.1") if self.between else None
        self.followers = [
            LaneExchange(
                invite,
                StoreNews(Receiver(store, "session", len(parts_) - 1, silence=DEADLINE)),
                TABLES,
                lane,
                limits=LIMITS,
                timing=TIMING,
                leader=place,
                rank=rank,
            )
            for rank, lane in enumerate(lanes)
            if rank
        ]
        peers = PeerSetting(transport, LOOPBACK, swarm=SWARM) if self.between else None
        self.single.join(claim, TABLES, peers=peers)
        island = replace(claim, name="island", ranks=3, batch=2)
        self.leader.join(island, TABLES, lanes[0], peers, lanes if self.between else ())

    def orders(self, round_index: int) -> tuple[RoundOrder, RoundOrder]:
        """The round, as it is opened to the node of one stream and to the island."""
        found = []
        for exchange in (self.single, self.leader):
            order = exchange.next_order()
            while isinstance(order, RoundOrder) and order.round < round_index:
                order = exchange.next_order()
            assert isinstance(order, RoundOrder) and order.round == round_index
            assert bool(order.topology) == self.between
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

    def replayed(self, rounds: int) -> list[list[RoundResult]]:
        """The results of the first rounds on every lane, none of which has any of them left."""
        if self.between:
            assert self.leader._leader is not None and self.leader._peers is not None
            self.leader._leader._recent.clear()
            self.leader._peers.rounds._desk.shelf = Shelf()

        def fetch(lane: HubExchange | LaneExchange) -> list[RoundResult]:
            found = []
            for result in lane.replay(ReplayOrder(0, rounds)):
                assert result.payload is not None
                found.append(replace(result, payload=result.payload.clone()))
            return found

        lanes = (self.leader, *self.followers)
        return [end() for end in [InFlight(partial(fetch, lane), "replay").result for lane in lanes]]

    def bytes_of(self) -> dict[str, int]:
        """Counted so far at the single node, and between the island and the coordinator, of contributions and
        results."""
        single = self.single.meter.counts()
        lanes = [lane.meter.traffic for lane in (self.leader, *self.followers)]
        return {
            "up": single["up", "contribution"] + single["up", "result"],
            "down": single["down", "contribution"] + single["down", "result"],
            "coordinator": round(
                sum(
                    nbytes
                    for traffic in lanes
                    for peer, _, kind, nbytes in traffic.counts()
                    if peer == COORDINATOR and kind in ("vote", "mean")
                )
            ),
        }


@pytest.fixture(params=["hub", "direct", "swarm"])
def run(request: pytest.FixtureRequest, fleet: Fleet) -> Iterator[Run]:
    if request.param == "swarm":
        pytest.importorskip("hivemind")
    made = Run(fleet, request.param)
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
    expected = [alone.payload.clone()]
    assert all(result.counted for result in lanes)
    whole_bytes, counted = TABLES.of(0).nbytes, run.bytes_of()
    if run.between:
        assert counted["coordinator"] == 0, "it says who is in a round, and carries no data"
        for way in ("up", "down"):  # 2 (M - 1) / M of a payload each way, M = 2
            assert 0 <= counted[way] - whole_bytes <= OVERHEAD
    else:
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
    expected.append(flight.result().payload.clone())
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
    expected.append(flight.result().payload.clone())
    assert not any(result.counted for result in lanes) and names["island"] not in lanes[0].voters
    run.report(2)

    # 3: the leader is cut off while the lanes wait for the commit, and comes back in time
    whole = [payload(TABLES.of(3), seed) for seed in (7, 8)]
    to_single, to_island = run.orders(3)
    ends = run.lanes(to_island, whole[1])
    run.relay.cut()
    run.relay.restore()
    run.log.wait("coordinator", NodeRejoined, 1)
    alone = run.single.reduce(to_single, whole[0])
    lanes = [end() for end in ends]
    check(3, alone, lanes, whole[: len(alone.voters)])  # the round may have waited no longer
    expected.append(alone.payload.clone())
    assert lanes[0].counted == (len(alone.voters) == 2)
    run.report(3)

    # 4: and comes back when the others have gone on without it: it is seated between two of their rounds
    whole = [payload(TABLES.of(4), seed) for seed in (9, 10)]
    to_single, to_island = run.orders(4)
    ends = run.lanes(to_island, whole[1])
    run.relay.cut()
    run.log.wait("coordinator", NodeLeft, 2)
    alone = run.single.reduce(to_single, whole[0])
    alone = replace(alone, payload=alone.payload.clone())
    expected.append(alone.payload)
    run.relay.restore()
    run.log.wait("coordinator", NodeRejoined, 2)
    order = run.single.next_order()
    assert isinstance(order, RoundOrder) and len(order.members) == 1
    expected.append(run.single.reduce(order, payload(TABLES.of(5), 11)).payload.clone())
    lanes = [end() for end in ends]
    check(4, alone, lanes, whole[: len(alone.voters)])
    assert lanes[0].counted == (len(alone.voters) == 2)
    # a hub counts what it had whole before; between nodes the other one reduces the island's slices then, and
    # what it has not received for them is lost
    assert not (run.between and lanes[0].counted)

    # what the island has lost it gets again, from the coordinator or from the other node
    for number, (found, part) in enumerate(zip(run.replayed(len(expected)), parts(), strict=True)):
        for index, (result, right) in enumerate(zip(found, expected, strict=True)):
            assert torch.equal(result.payload, cut_out(right, TABLES.of(index), part, result=True)), number
