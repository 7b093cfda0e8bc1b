"""The hub exchange against a scripted coordinator: finding it, and connections that break."""

from __future__ import annotations

import socket
import threading

import grpc
import pytest
import torch

from node.exchange.base import ExchangeError, LoadOrder, RoundOrder
from node.exchange.hub import HubExchange
from node.exchange.link import Limits
from node.exchange.retry import Backoff
from node.exchange.trouble import Kind, RoundLost, Trouble
from protos import atoll_pb2 as pb
from protos.invite import Invite
from tests.node.fake_hub import DEADLINE, TOKEN, ExchangeStream, FakeHub, Upload
from tests.node.hub_rig import (
    CLAIM,
    LIMITS,
    SMALL,
    TIMING,
    FakeClock,
    Make,
    next_message,
    pattern,
    report,
    tables,
    take_part,
)
from tests.waiting import free_port

# ---------------------------------------------------------------------------------- nobody there, addresses


def test_waiting_for_a_coordinator_tells_what_how_long_and_gives_up() -> None:
    clock, said, port = FakeClock(), list[str](), free_port()
    exchange = HubExchange(
        Invite(TOKEN, "127.0.0.1", port),
        limits=Limits(wait=60.0),
        timing=clock.timing(Backoff(first=1.0, factor=2.0, cap=20.0)),
        say=said.append,
    )
    try:
        with pytest.raises(Trouble) as caught:
            exchange.describe()
    finally:
        exchange.close("nobody there")
    nobody = f"nothing listens at 127.0.0.1:{port}: connection refused"
    assert said[0] == (
        f"waiting for the coordinator at 127.0.0.1:{port}: {nobody}; trying again in 1 s, 60 s left"
    )
    assert clock.pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 9.0]
    assert caught.value.kind is Kind.NOBODY_LISTENS
    assert str(caught.value) == (
        f"gave up on the coordinator at 127.0.0.1:{port} after 60 s, tried 8 times: {nobody}"
    )


def test_coordinator_that_comes_later_is_found() -> None:
    hub = FakeHub(port=free_port())
    started = threading.Event()

    def say(text: str) -> None:
        if not started.is_set():
            hub.start()
            started.set()

    exchange = HubExchange(Invite(TOKEN, hub.host, hub.port), limits=LIMITS, timing=TIMING, say=say)
    try:
        assert exchange.describe().run_file == "x"
    finally:
        exchange.close("done")
        hub.close()
    assert started.is_set()


def test_host_name_that_does_not_resolve_is_told_apart() -> None:
    exchange = HubExchange(
        Invite(TOKEN, "no-such-host.invalid", 4600), limits=Limits(wait=0.0), timing=FakeClock().timing()
    )
    try:
        with pytest.raises(Trouble, match=r"the host name 'no-such-host.invalid' does not resolve") as caught:
            exchange.describe()
    finally:
        exchange.close("no name")
    assert caught.value.kind is Kind.NAME


def test_something_else_listening_is_told_apart() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        over = threading.Event()

        def answer() -> None:
            server.settimeout(0.1)
            while not over.is_set():
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        exchange = HubExchange(Invite(TOKEN, "127.0.0.1", port), limits=LIMITS, timing=TIMING)
        try:
            with pytest.raises(Trouble, match="does not speak gRPC") as caught:
                exchange.describe()
        finally:
            exchange.close("not a coordinator")
            over.set()
            thread.join(DEADLINE)
    assert caught.value.kind is Kind.STRANGER


def test_ipv6_address() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    hub = FakeHub(host="::1").start()
    exchange = HubExchange(hub.invite, limits=LIMITS, timing=TIMING)
    try:
        assert exchange.address == f"[::1]:{hub.port}"
        assert exchange.describe().run_file == "x"
        assert exchange.join(CLAIM, tables(SMALL)).node == "node-0"
    finally:
        exchange.close("done")
        hub.close()


# --------------------------------------------------------------------------------------- broken connections


def test_coordinator_that_restarts_in_mid_round_gets_the_same_payload_again(hub: FakeHub, make: Make) -> None:
    arrived = threading.Event()
    uploads: list[Upload] = []

    async def first(stream: ExchangeStream) -> None:
        uploads.append(await stream.upload())
        arrived.set()
        await stream.context.read()

    async def second(stream: ExchangeStream) -> None:
        uploads.append(await stream.upload())
        await stream.chunks(uploads[-1].payload)
        await stream.commit(7, uploads[-1].payload)

    def restart() -> None:
        assert arrived.wait(DEADLINE)
        hub.die()
        hub.exchange = second
        hub.start()
        assert hub.sessions.get(timeout=DEADLINE) == "secret-2"
        hub.open_round(7, epoch=9)

    hub.exchange = first
    said: list[str] = []
    exchange = make(say=said.append)
    exchange.report(report(6, "s7"))
    thread = threading.Thread(target=restart)
    thread.start()
    mine = pattern(SMALL)
    result = take_part(hub, exchange, mine, round_index=7)
    thread.join(DEADLINE)

    assert result.payload is not None and torch.equal(result.payload, mine)
    assert [upload.payload for upload in uploads] == [mine.numpy().tobytes()] * 2
    assert [upload.header.epoch for upload in uploads] == [1, 9]
    hub.joins.get(timeout=DEADLINE)
    again = hub.joins.get(timeout=DEADLINE)
    assert (again.round, again.state_digest, again.samples) == (7, "s7", 12)
    assert (again.former, again.state_bytes) == ("secret-1", CLAIM.state_bytes)
    assert (again.lease_round, again.lease_start, again.lease_count) == (7, 0, 4), "its work in hand"
    assert any("again, as node-1" in text for text in said)


@pytest.mark.parametrize("lease", [{"lease_start": 4}, {"lease_count": 3}])
def test_payload_is_not_sent_for_other_samples_and_the_new_order_is_computed_afresh(
    hub: FakeHub, make: Make, lease: dict[str, int]
) -> None:
    arrived, uploads = threading.Event(), list[Upload]()

    async def first(stream: ExchangeStream) -> None:
        uploads.append(await stream.upload())
        arrived.set()
        await stream.context.read()

    async def second(stream: ExchangeStream) -> None:
        uploads.append(await stream.upload())
        await stream.chunks(uploads[-1].payload)
        await stream.commit(7, uploads[-1].payload)

    def restart() -> None:
        assert arrived.wait(DEADLINE)
        hub.die()
        hub.exchange = second
        hub.start()
        hub.sessions.get(timeout=DEADLINE)
        hub.open_round(7, **lease)

    hub.exchange = first
    exchange = make()
    thread = threading.Thread(target=restart)
    thread.start()
    with pytest.raises(RoundLost, match="round 8 is open to this node again, but for other samples"):
        take_part(hub, exchange, pattern(SMALL), round_index=7)
    thread.join(DEADLINE)
    assert len(uploads) == 1
    order = exchange.next_order()
    assert isinstance(order, RoundOrder) and order.round == 7
    exchange.reduce(order, pattern(SMALL, 1))
    assert uploads[1].payload == pattern(SMALL, 1).numpy().tobytes()
    hub.end_session()
    hub.sessions.get(timeout=DEADLINE)
    claims = [hub.joins.get(timeout=DEADLINE) for _ in range(3)]
    held = [(claim.former, claim.lease_round, claim.lease_start, claim.lease_count) for claim in claims]
    start, count = lease.get("lease_start", 0), lease.get("lease_count", 4)
    assert held == [("", 0, 0, 0), ("secret-1", 7, 0, 4), ("secret-2", 7, start, count)]


def test_work_that_has_come_to_its_end_is_not_claimed(hub: FakeHub, make: Make) -> None:
    exchange = make()
    hub.open_round(3)
    exchange.next_order()
    exchange.report(report(3, "s4"))
    next_message(hub, "report")
    hub.end_session()
    hub.sessions.get(timeout=DEADLINE)
    hub.joins.get(timeout=DEADLINE)
    again = hub.joins.get(timeout=DEADLINE)
    assert (again.round, again.lease_count) == (4, 0)
    hub.open_round(4, result_ready=True)
    hub.open_round(4, lease_count=0)
    exchange.next_order()
    exchange.next_order()
    hub.end_session()
    hub.sessions.get(timeout=DEADLINE)
    assert hub.joins.get(timeout=DEADLINE).lease_count == 0


@pytest.mark.parametrize("voters", [["node-0", "node-7"], ["node-7"]])
def test_contribution_counts_that_was_made_before_the_node_came_back_under_another_name(
    hub: FakeHub, make: Make, voters: list[str]
) -> None:
    arrived = threading.Event()

    async def first(stream: ExchangeStream) -> None:
        await stream.upload()
        arrived.set()
        await stream.context.read()

    async def stored(stream: ExchangeStream) -> None:
        payload = (await stream.upload()).payload  # repeated, and of no use to the coordinator any more
        await stream.chunks(payload)
        await stream.commit(7, payload, voters=voters, weights=[1] * len(voters), counted=False)

    def cut() -> None:
        assert arrived.wait(DEADLINE)
        hub.exchange = stored
        hub.end_session()
        assert hub.sessions.get(timeout=DEADLINE) == "secret-2"
        hub.open_round(7, members=["node-1"], result_ready=True)

    hub.exchange = first
    exchange = make()
    thread = threading.Thread(target=cut)
    thread.start()
    result = take_part(hub, exchange, pattern(SMALL), round_index=7)
    thread.join(DEADLINE)
    assert hub.joins.qsize() == 2
    assert result.voters == tuple(voters)
    assert result.counted == ("node-0" in voters), "else its error feedback would send the same work twice"


def test_round_that_went_on_without_a_node_that_was_cut_off_is_lost_not_fatal(
    hub: FakeHub, make: Make
) -> None:
    arrived = threading.Event()

    async def script(stream: ExchangeStream) -> None:
        await stream.upload()
        arrived.set()
        await stream.context.read()

    def cut() -> None:
        assert arrived.wait(DEADLINE)
        hub.die()
        hub.start()
        hub.sessions.get(timeout=DEADLINE)
        hub.send(pb.CoordinatorMessage(load_state=pb.LoadState(snapshot="t", round=9)))

    hub.exchange = script
    exchange = make()
    thread = threading.Thread(target=cut)
    thread.start()
    with pytest.raises(RoundLost, match="round 8 went on without this node"):
        take_part(hub, exchange, pattern(SMALL), round_index=7)
    thread.join(DEADLINE)
    assert exchange.next_order() == LoadOrder("t", 9)


def test_session_that_ends_without_a_word_is_taken_up_again(hub: FakeHub, make: Make) -> None:
    exchange = make()
    hub.open_round(1)
    assert isinstance(exchange.next_order(), RoundOrder)
    hub.end_session()
    hub.sessions.get(timeout=DEADLINE)
    hub.open_round(2)
    opened = exchange.next_order()
    assert isinstance(opened, RoundOrder) and opened.round == 2


def test_coordinator_that_stays_away_ends_the_run_with_a_reason(hub: FakeHub, make: Make) -> None:
    clock = FakeClock()
    exchange = make(timing=clock.timing())
    hub.die()
    with pytest.raises(
        Trouble, match=rf"gave up on the coordinator at .* after {DEADLINE:g} s, tried .* nothing listens"
    ):
        exchange.next_order()


def test_one_that_has_forgotten_the_node_and_stays_away_is_waited_for_once(hub: FakeHub, make: Make) -> None:
    clock, said = FakeClock(), list[str]()
    exchange = make(timing=clock.timing(Backoff(cap=1.0)), say=said.append)
    hub.refuse_join, hub.refuse_code = "it goes down", grpc.StatusCode.UNAVAILABLE
    hub.end_session()
    with pytest.raises(Trouble, match="gave up on the coordinator"):
        exchange.next_order()
    assert clock.time <= LIMITS.reconnect + 1e-6, "not another span after the first"


def test_waiting_for_an_order_has_a_deadline_and_a_name(hub: FakeHub, make: Make) -> None:
    exchange = make()
    exchange.limits = Limits(order=0.05)
    with pytest.raises(
        ExchangeError, match=r"waiting for the coordinator at .* to go on took longer than 0.05 s"
    ):
        exchange.next_order()


def test_a_paused_run_is_waited_for_longer_than_any_order(hub: FakeHub, make: Make) -> None:
    said, paused = list[str](), threading.Event()

    def say(text: str) -> None:
        said.append(text)
        paused.set()

    exchange = make(say=say)
    hub.send(pb.CoordinatorMessage(paused=pb.Paused(reason="night", round=7)))
    assert paused.wait(DEADLINE)
    assert said == ["the run is paused after round 7: night; this node waits"]
    exchange.limits = Limits(order=0.05)
    later = threading.Timer(0.3, hub.open_round, (7,))  # several times the deadline
    later.start()
    order = exchange.next_order()
    assert isinstance(order, RoundOrder) and order.round == 7
    hub.send(pb.CoordinatorMessage(paused=pb.Paused()))
    with pytest.raises(ExchangeError, match=r"took longer than 0.05 s"):
        exchange.next_order()
    assert said[1:] == ["the run goes on"]
