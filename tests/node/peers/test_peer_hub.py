"""Rounds whose slices travel between nodes, as a worker sees them: orders, reconnects, replays."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.exchange.base import ReplayOrder, RoundOrder, RoundResult
from node.exchange.hub import HubExchange
from node.exchange.in_flight import InFlight
from node.exchange.meter import Meter
from node.exchange.network import process_network
from node.exchange.peers.announcement import Announcement
from node.exchange.peers.desk import Desk
from node.exchange.peers.direct import DirectCarrier
from node.exchange.peers.setting import PeerSetting
from node.exchange.trouble import Kind, RoundLost, TransferError, Trouble
from protos import atoll_pb2 as pb
from protos import wire
from protos.address import Address
from protos.buckets import TableSchedule
from tests.coordinator.contribution_rig import random_payload, voted_table
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub
from tests.node.hub_rig import CLAIM, LIMITS, TIMING, next_message
from tests.node.peers.peer_rig import digest

TABLE = voted_table(300)
TABLES = TableSchedule((TABLE,))
PAYLOAD = torch.frombuffer(bytearray(random_payload(1, TABLE)), dtype=torch.uint8)
RESULT = bytes(PAYLOAD.numpy())  # of one voter
HERE = PeerSetting("direct", Address("127.0.0.1", 0))


Join = Callable[..., HubExchange]


@pytest.fixture
def join(hub: FakeHub) -> Iterator[Join]:
    """Makes exchanges that join ``hub`` with a setting; they are closed at the end."""
    made: list[HubExchange] = []

    def build(setting: PeerSetting | None = HERE, **options: Any) -> HubExchange:
        exchange = HubExchange(hub.invite, **{"limits": LIMITS, "timing": TIMING, **options})
        made.append(exchange)
        exchange.join(CLAIM, TABLES, peers=setting)
        assert exchange._contributor is not None
        exchange._contributor._result.zero_()  # else it may hold the result of the test before: no fetch
        hub.sessions.get(timeout=DEADLINE)
        return exchange

    yield build
    for exchange in made:
        exchange.close("test over")


def plan(hub: FakeHub, number: int, me: str, *others: pb.PeerNode) -> None:
    """This node reduces everything."""
    part = pb.SliceOf(reducer=me, end=TABLE.nbytes, out_end=TABLE.result_nbytes)
    topology = pb.Topology(
        number=number,
        nodes=[pb.PeerNode(node=me), *others],
        tables=[pb.TableSlices(table_digest=TABLE.digest, slices=[part])],
    )
    hub.send(pb.CoordinatorMessage(topology=topology))


def order(hub: FakeHub, number: int, me: str, round_index: int = 0) -> None:
    reduce = pb.Reduce(
        round=round_index,
        topology=number,
        attempt=1,
        voters=[me],
        weights=[1],
        mean_weights=[1],
        leases=[pb.Lease(start=0, count=4)],
    )
    hub.send(pb.CoordinatorMessage(reduce=reduce))
    hub.open_round(round_index, topology=number)


def commit(me: str, round_index: int = 0, **fields: object) -> pb.Commit:
    row = pb.SliceDigest(out_end=TABLE.result_nbytes, digest=digest(RESULT), reducer=me)
    values = {"voters": [me], "weights": [3], "counted": True, "slices": [row], "holders": [me]}
    return pb.Commit(round=round_index, **{**values, **fields})  # type: ignore[arg-type]


def committed(hub: FakeHub, me: str) -> None:
    """Once its reducer has said so."""
    news = next_message(hub, "slice_news").slice_news
    while not news.digest:
        news = next_message(hub, "slice_news").slice_news
    assert news.digest == digest(RESULT)
    hub.send(pb.CoordinatorMessage(committed=commit(me)))


def begin(exchange: HubExchange) -> InFlight[RoundResult]:
    taken = exchange.next_order()
    assert isinstance(taken, RoundOrder) and taken.topology == 1
    return InFlight(lambda: exchange.reduce(taken, PAYLOAD), "reduce")


def rejoin(hub: FakeHub) -> None:
    hub.end_session()
    hub.sessions.get(timeout=DEADLINE)


def answered(hub: FakeHub, reply: pb.Commit) -> list[pb.ContributionHeader]:
    """What asks for the round's result by an Exchange is told the facts."""
    headers: list[pb.ContributionHeader] = []

    async def exchange(stream: ExchangeStream) -> None:
        headers.append((await stream.upload()).header)
        await stream.send(wire.COMMIT, reply.SerializeToString())

    hub.exchange = exchange
    return headers


def test_a_node_says_where_it_is_reached(join: Join, hub: FakeHub) -> None:
    said: list[str] = []
    setting = PeerSetting("direct", Address("127.0.0.1", 0), uplink=2.5e6)
    join(setting, say=said.append)
    endpoint = hub.joins.get(timeout=DEADLINE).endpoint
    address = Address.parse(endpoint.direct)
    assert address.host == "127.0.0.1" and address.port and endpoint.uplink == 2.5e6
    assert said == [f"other nodes reach this one at {address} and through the coordinator"]


@pytest.mark.parametrize(
    ("setting", "direct"),
    [
        (PeerSetting("direct"), ":"),
        (PeerSetting("direct", announced=Address("example.org", 4700)), "example.org:4700"),
        (PeerSetting("hub"), ""),
    ],
)
def test_what_is_announced(join: Join, hub: FakeHub, setting: PeerSetting, direct: str) -> None:
    join(setting)
    request = hub.joins.get(timeout=DEADLINE)
    assert request.HasField("endpoint")
    assert request.endpoint.direct.rstrip("0123456789") == direct.rstrip("0123456789")
    if direct == ":":
        assert int(request.endpoint.direct[1:]) > 0


def test_without_a_setting_it_takes_no_part(join: Join, hub: FakeHub) -> None:
    exchange = join(None)
    assert not hub.joins.get(timeout=DEADLINE).HasField("endpoint")
    plan(hub, 1, "node-0")
    order(hub, 1, "node-0")
    with pytest.raises(Trouble, match="not set up: install the same version"):
        begin(exchange).result()


def test_a_round_needs_nothing_of_the_coordinator_but_words(join: Join, hub: FakeHub) -> None:
    exchange = join()
    plan(hub, 1, "node-0")
    order(hub, 1, "node-0")
    flight = begin(exchange)
    committed(hub, "node-0")
    result = flight.result()
    assert result.counted and result.voters == ("node-0",)
    assert result.payload is not None and bytes(result.payload.numpy()) == RESULT
    assert not math.isnan(exchange.sent_at)
    counts = exchange.meter.counts()
    assert counts["up", "contribution"] == counts["down", "result"] == 0  # to itself, nothing travels


def test_a_round_goes_on_while_the_session_is_joined_again(join: Join, hub: FakeHub) -> None:
    exchange = join()
    plan(hub, 1, "node-0")
    order(hub, 1, "node-0")
    flight = begin(exchange)
    next_message(hub, "holding")
    rejoin(hub)
    plan(hub, 2, "node-1")
    order(hub, 2, "node-1")
    committed(hub, "node-1")
    result = flight.result()
    assert result.counted and bytes(result.payload.numpy()) == RESULT
    hub.open_round(1)
    following = exchange.next_order()
    assert isinstance(following, RoundOrder) and following.round == 1  # the second order has been taken


def test_a_round_that_went_on_without_the_node_is_lost(join: Join, hub: FakeHub) -> None:
    exchange = join()
    plan(hub, 1, "node-0")
    order(hub, 1, "node-0")
    flight = begin(exchange)
    next_message(hub, "holding")
    rejoin(hub)
    hub.open_round(1)
    with pytest.raises(RoundLost, match="round 1 went on without this node"):
        flight.result()
    following = exchange.next_order()
    assert isinstance(following, RoundOrder) and following.round == 1


def test_a_round_that_is_decided_meanwhile_is_asked_for(join: Join, hub: FakeHub) -> None:
    exchange = join()
    plan(hub, 1, "node-0")
    order(hub, 1, "node-0")
    flight = begin(exchange)
    next_message(hub, "holding")
    headers = answered(hub, commit("node-0", counted=False))
    rejoin(hub)
    plan(hub, 2, "node-1")
    hub.open_round(0, topology=2, result_ready=True)
    result = flight.result()
    assert result.counted and bytes(result.payload.numpy()) == RESULT  # its old name is among the voters
    (header,) = headers
    assert header.abstain and not header.nbytes


def test_a_round_may_change_over_to_the_hub(join: Join, hub: FakeHub) -> None:
    exchange = join()
    plan(hub, 1, "node-0")
    order(hub, 1, "node-0")
    flight = begin(exchange)
    next_message(hub, "holding")

    async def by_hub(stream: ExchangeStream) -> None:
        upload = await stream.upload()
        await stream.chunks(upload.payload)
        await stream.commit(0, upload.payload)

    hub.exchange = by_hub
    rejoin(hub)
    hub.open_round(0)
    result = flight.result()
    assert result.counted and bytes(result.payload.numpy()) == RESULT


class Holder:
    """Another node, which has a result on its shelf."""

    def __init__(self) -> None:
        self._network = process_network().open()
        self._desk, self._carrier, self.address = self._network.call(self._start(), DEADLINE, "a holder")

    async def _start(self) -> tuple[Desk, DirectCarrier, Address]:
        desk = Desk(
            TABLES, CLAIM.run_digest, tell=print, now=lambda: 0.0, meter=Meter(), say=lambda text: None
        )
        carrier = DirectCarrier(desk.serve, CLAIM.run_digest)
        return desk, carrier, await carrier.listen(Address("127.0.0.1", 0))

    def hold(self, caller: str, *rounds: int) -> pb.PeerNode:
        """Keep results, and know ``caller``; as that one is told of this node."""

        def put() -> None:
            part = pb.SliceOf(reducer="holder", end=TABLE.nbytes, out_end=TABLE.result_nbytes)
            nodes = [pb.PeerNode(node="holder"), pb.PeerNode(node=caller, accept_token=b"secret")]
            tables = [pb.TableSlices(table_digest=TABLE.digest, slices=[part])]
            self._desk.set_topology(pb.Topology(number=1, nodes=nodes, tables=tables), "holder")
            for round_index in rounds:
                self._desk.shelf.put(round_index, commit("holder", round_index), RESULT)

        done = threading.Event()
        self._network.soon(lambda: (put(), done.set()))
        assert done.wait(DEADLINE)
        return pb.PeerNode(node="holder", direct=str(self.address), call_token=b"secret")

    def close(self) -> None:
        self._network.call(self._carrier.close(), DEADLINE, "closing a holder")
        self._network.soon(self._desk.close)
        self._network.close()


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.close()


def test_a_lagging_node_is_told_who_has_the_result(join: Join, hub: FakeHub, holder: Holder) -> None:
    exchange = join()
    plan(hub, 1, "node-0", holder.hold("node-0", 0))
    headers = answered(hub, commit("holder", counted=False))
    hub.open_round(0, topology=1, result_ready=True)
    taken = exchange.next_order()
    assert isinstance(taken, RoundOrder) and taken.result_ready
    result = exchange.reduce(taken, None, "late")
    assert not result.counted and bytes(result.payload.numpy()) == RESULT
    assert headers[0].abstain
    counts = exchange.meter.counts()
    assert 0 < counts["down", "state"] - TABLE.result_nbytes < 200
    assert 0 < counts["up", "state"] < 200


def test_rounds_of_both_kinds_are_replayed(join: Join, hub: FakeHub, holder: Holder) -> None:
    exchange = join()
    plan(hub, 1, "node-0", holder.hold("node-0", 0, 2))

    async def results(request: pb.ResultsRequest, stream: ExchangeStream) -> None:
        for index in range(request.first, request.first + request.count):
            if index == 1:
                await stream.chunks(RESULT)
                await stream.commit(1, RESULT)
            else:
                await stream.send(wire.COMMIT, commit("holder", index).SerializeToString())

    hub.get_results = results
    replayed = [bytes(r.payload.numpy()) for r in exchange.replay(ReplayOrder(0, 3)) if r.payload is not None]
    assert replayed == [RESULT] * 3


def test_a_result_that_no_holder_has_any_more_ends_a_replay(hub: FakeHub, join: Join, holder: Holder) -> None:
    exchange = join(limits=replace(LIMITS, reconnect=0.2))
    plan(hub, 1, "node-0", holder.hold("node-0"))

    facts = commit("holder")
    facts.slices[0].digest = digest(b"of no memory that may come to be used again")

    async def results(request: pb.ResultsRequest, stream: ExchangeStream) -> None:
        await stream.send(wire.COMMIT, facts.SerializeToString())

    hub.get_results = results
    with pytest.raises(TransferError, match="holder does not hold that of round 1"):
        next(exchange.replay(ReplayOrder(0, 1)))


def test_a_topology_that_makes_no_sense_ends_the_session(join: Join, hub: FakeHub) -> None:
    exchange = join()
    part = pb.SliceOf(reducer="nobody", end=TABLE.nbytes, out_end=TABLE.result_nbytes)
    tables = [pb.TableSlices(table_digest=TABLE.digest, slices=[part])]
    hub.send(pb.CoordinatorMessage(topology=pb.Topology(number=1, tables=tables)))
    with pytest.raises(Trouble, match="gives slices to nobody") as caught:
        exchange.next_order()
    assert caught.value.kind is Kind.PROTOCOL


Measured = tuple[float | None, float | None]


@pytest.mark.parametrize(
    ("fixed", "measured", "said"),
    [
        (0.0, [(None, None)] * 10, []),
        (0.0, [(100.0, None)] * 3, []),
        (0.0, [(1.0, None)] * 3 + [(100.0, None)], [(3, 100.0, 0.0)]),
        (0.0, [(100.0, None)] * 4 + [(110.0, 124.0)] * 9, [(3, 100.0, 0.0), (11, 100.0, 124.0)]),
        (0.0, [(100.0, 9.0)] * 4 + [(126.0, 9.0)] * 9, [(3, 100.0, 9.0), (11, 126.0, 9.0)]),
        (0.0, [(100.0, 9.0)] * 4 + [(124.0, 8.0)] * 20, [(3, 100.0, 9.0)]),
        (50.0, [(100.0, 9.0)] * 10, [(7, 50.0, 9.0)]),
    ],
)
def test_rates_are_announced_anew_if_they_have_changed(
    fixed: float, measured: list[Measured], said: list[tuple[int, float, float]]
) -> None:
    announcement = Announcement(pb.Endpoint(direct="a:1", uplink=fixed))
    found = []
    for index, (uplink, downlink) in enumerate(measured):
        endpoint = announcement.after_round(uplink, downlink)
        if endpoint is not None:
            assert endpoint.direct == "a:1" and announcement.endpoint == endpoint
            found.append((index, endpoint.uplink, endpoint.downlink))
            assert endpoint.uplink_measured == (endpoint.uplink not in (0.0, fixed))
            assert endpoint.downlink_measured == (endpoint.downlink > 0)
    assert found == said
