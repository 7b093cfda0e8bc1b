"""Rates, the connections of a port, and which of them are cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.gate import Gate, Standing, to_cut
from coordinator.hub import Hub
from coordinator.inbound import Connections, Inbound
from coordinator.rates import Rates, TokenBucket, caller, origin
from coordinator.run import Run
from protos.limits import LIMITS, Limits, state_limit
from protos.refusal import CROWDED, FLOOD, SILENT, Refused
from tests.coordinator.contribution_rig import schedule, slow_tally, voted_table
from tests.coordinator.coordinator_rig import InlinePool, VirtualTimer, join_request, make_plan, soon

DEADLINE = 30.0


# ------------------------------------------------------------------------------------------------- rates


def test_a_bucket_gives_a_minute_s_worth_at_once_and_then_its_rate() -> None:
    bucket = TokenBucket(60, now=0.0)
    assert [bucket.take(0.0) for _ in range(61)] == [True] * 60 + [False]
    assert not bucket.take(0.9)
    assert bucket.take(1.0) and not bucket.take(1.0)
    assert sum(bucket.take(1000.0) for _ in range(100)) == 60  # never more than a minute's


def test_a_bucket_tells_how_long_to_wait() -> None:
    bucket = TokenBucket(60, now=0.0)
    assert [bucket.wait(0.0) for _ in range(60)] == [0.0] * 60
    assert [bucket.wait(0.0), bucket.wait(0.0)] == pytest.approx([1.0, 2.0])
    assert bucket.wait(10.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.1, 3)), max_size=200), st.integers(1, 500))
def test_nobody_gets_more_than_a_bucket_and_what_flows_in(acts: list[tuple[float, float]], rate: int) -> None:
    bucket, now, taken = TokenBucket(rate, 0.0), 0.0, 0.0
    for pause, cost in acts:
        now += pause
        taken += cost if bucket.take(now, cost) else 0.0
    assert taken <= max(1, rate) + now * rate / 60 + 1e-6


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(60, now=100.0)
    for _ in range(60):
        assert bucket.take(100.0)
    assert not bucket.take(50.0) and not bucket.take(100.5)


def test_rates_remember_a_bounded_number_of_callers() -> None:
    rates = Rates(1, lambda: 0.0, keys=3)
    assert all(rates.take(str(number)) for number in range(100))
    assert len(rates) == 3
    assert not rates.take("99")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("somewhere", "somewhere"),
        ("", ""),
    ],
)
def test_origin(host: str, expected: str) -> None:
    assert origin(host) == expected


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("ipv4:192.0.2.7:5000", ("192.0.2.7", 5000)),
        ("ipv6:%5B2001:db8::1%5D:5000", ("2001:db8::/64", 5000)),
        ("ipv6:[::ffff:192.0.2.7]:5000", ("192.0.2.7", 5000)),
        ("unix:", ("unix", 0)),
    ],
)
def test_caller(peer: str, expected: tuple[str, int]) -> None:
    assert caller(peer) == expected


# ------------------------------------------------------------------------------------------------- verdicts


def connection(number: int, host: str = "192.0.2.1") -> Inbound:
    return Inbound(number, host, 1000 + number)


def test_silent_connections_go_and_others_stay() -> None:
    limits = Limits(first_call_seconds=20)
    cut = to_cut(
        [(connection(1), Standing(0.0)), (connection(2), Standing(0.0, True)), (connection(3), Standing(5))],
        limits,
        now=20.0,
    )
    assert [(one.inode, kind) for one, kind, _ in cut] == [(1, SILENT)]
    assert "20 s" in cut[0][2]


def test_of_a_crowd_those_without_a_token_go_first_and_then_the_newest() -> None:
    limits = Limits(connections_per_address=2)
    crowd = [
        (connection(1), Standing(1.0)),
        (connection(2), Standing(4.0, True)),
        (connection(3), Standing(3.0, True)),
        (connection(4), Standing(2.0, True)),
        (connection(5, "198.51.100.1"), Standing(9.0)),
    ]
    cut = to_cut(crowd, limits, now=10.0)
    assert sorted(one.inode for one, _, _ in cut) == [1, 2]
    assert {kind for _, kind, _ in cut} == {CROWDED}


def test_a_hostile_address_keeps_the_connections_that_have_shown_a_token() -> None:
    here = [
        (connection(1), Standing(0.0)),
        (connection(2), Standing(0.0, True)),
        (connection(3, "x"), Standing(0)),
    ]
    cut = to_cut(here, LIMITS, now=1.0, hostile=["192.0.2.1"])
    assert [(one.inode, kind) for one, kind, _ in cut] == [(1, FLOOD)]


def gate(**limits: Any) -> tuple[Gate, VirtualTimer, Counter[str]]:
    timer, counted = VirtualTimer(), Counter[str]()
    made = Gate(timer.now, lambda kind: counted.update([kind]), Limits(**limits))
    return made, timer, counted


def test_a_token_may_be_shown_before_its_connection_is_seen() -> None:
    made, timer, counted = gate(first_call_seconds=20)
    made.welcome("ipv4:192.0.2.1:1001")
    assert made.judge([]) == []
    assert made.judge([connection(1)]) == []
    timer.advance(100.0)
    assert made.judge([connection(1)]) == [] and not counted
    # The same address and port again is another connection, which has shown nothing.
    again = Inbound(77, "192.0.2.1", 1001)
    assert made.judge([again]) == []
    timer.advance(20.0)
    assert [one for one, _ in made.judge([again])] == [again] and counted == {SILENT: 1}


def test_what_is_remembered_of_callers_ends() -> None:
    made, _, _ = gate()
    for port in range(1000):
        made.welcome(f"ipv4:192.0.2.1:{port}")
    for _ in range(10):
        made.judge([])
    assert not made._shown


def test_wrong_tokens_cost_the_connections_of_their_address() -> None:
    made, timer, counted = gate(wrong_tokens=3)
    for _ in range(3):
        made.wrong_token("ipv4:192.0.2.1:1001")
    assert made.judge([connection(1)]) == []
    made.wrong_token("ipv4:192.0.2.1:1001")
    assert [one.inode for one, _ in made.judge([connection(1), connection(2, "198.51.100.1")])] == [1]
    assert counted == {FLOOD: 1}
    assert made.judge([connection(3)]) == []  # once: who comes anew may have the right one
    timer.advance(60.0)
    made.wrong_token("ipv4:192.0.2.1:1001")
    assert made.judge([connection(4)]) == []


def test_joins_and_questions_are_counted_for_each_address_by_themselves() -> None:
    made, timer, counted = gate(joins=2, questions=1)
    for _ in range(2):
        made.join("ipv4:192.0.2.1:1")
    with pytest.raises(Refused, match=r"more than 2 nodes a minute join from 192\.0\.2\.1") as refused:
        made.join("ipv4:192.0.2.1:2")
    assert refused.value.code == "UNAVAILABLE"  # nodes try that again
    made.join("ipv4:192.0.2.2:1")
    made.question("ipv4:192.0.2.1:1")
    with pytest.raises(Refused, match="questions"):
        made.question("ipv4:192.0.2.1:1")
    timer.advance(30.0)
    made.join("ipv4:192.0.2.1:1")
    assert counted == {FLOOD: 2}


def test_streams_and_messages_count_for_each_rank() -> None:
    made, _, counted = gate(contributions=2, messages=60)
    one: Any = SimpleNamespace(node="node-0", ranks=1)
    four: Any = SimpleNamespace(node="node-1", ranks=4)
    for _ in range(2):
        made.contribution(one)
    for _ in range(8):
        made.contribution(four)
    for node in (one, four):
        with pytest.raises(Refused, match=f"{node.node} opens more than 2 streams"):
            made.contribution(node)
    assert counted == {FLOOD: 2}
    assert [made.pause(one) for _ in range(61)][-2:] == [0.0, pytest.approx(1.0)]


def test_the_limit_of_a_state_leaves_room_for_every_optimizer() -> None:
    assert state_limit(0) >= 1 << 20
    assert state_limit(10**9) < 100 * 10**9


def test_a_state_that_cannot_be_is_given_no_room() -> None:
    table = voted_table()
    hub = Hub(Run(make_plan(), schedule(table), timer=VirtualTimer(), pool=InlinePool(), tally=slow_tally))
    with pytest.raises(Refused, match="the shared state of this run has 1 to"):
        hub.join(join_request(table, state_bytes=1 << 40), "ipv4:192.0.2.1:1")
    hub.join(join_request(table, state_bytes=1 << 20), "ipv4:192.0.2.1:1")
    plan = make_plan(limits=Limits(state=1 << 41))
    hub = Hub(Run(plan, schedule(table), timer=VirtualTimer(), pool=InlinePool(), tally=slow_tally))
    hub.join(join_request(table, state_bytes=1 << 40), "ipv4:192.0.2.1:1")


# ------------------------------------------------------------------------------------------------ connections


@contextlib.contextmanager
def listening(family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[socket.socket, Connections]]:
    with socket.socket(family) as server:
        server.bind(("::1" if family is socket.AF_INET6 else "127.0.0.1", 0))
        server.listen()
        server.settimeout(DEADLINE)
        yield server, Connections(server.getsockname()[1])


def test_connections_are_found_and_cut() -> None:
    with listening() as (server, connections), socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            (found,) = connections.look()
            assert (found.origin, found.port) == ("127.0.0.1", near.getsockname()[1])
            assert connections.look() == [found]
            connections.cut([found, Inbound(0, "127.0.0.1", 1)])
            near.settimeout(DEADLINE)
            assert near.recv(1) == b""
            assert far.recv(1) == b""
        assert connections.look() == []
        connections.cut([found])


def test_connections_of_ipv6_and_no_others() -> None:
    with contextlib.ExitStack() as stack:
        try:
            server, connections = stack.enter_context(listening(socket.AF_INET6))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        other, _ = stack.enter_context(listening())
        for listener in (server, other):
            stack.enter_context(socket.create_connection(listener.getsockname()[:2]))
            stack.enter_context(listener.accept()[0])
        (found,) = connections.look()
        assert found.origin == "::/64"


def test_the_watch_cuts_who_stays_silent() -> None:
    async def scene() -> None:
        with listening() as (server, connections), socket.create_connection(server.getsockname()) as near:
            far, _ = server.accept()
            now = iter(range(0, 10_000, 15))
            counted: list[str] = []
            made = Gate(lambda: float(next(now)), counted.append, Limits(first_call_seconds=20))
            watching = asyncio.create_task(made.watch(connections, 0.001))
            near.setblocking(False)
            try:
                assert await soon(asyncio.get_running_loop().sock_recv(near, 1)) == b""
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                far.close()
            assert counted == [SILENT]

    asyncio.run(scene())
