"""The hub exchange's session with a scripted coordinator: what is told, stops, and its end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Awaitable, Callable

import pytest

from node.exchange.base import ExchangeError, RoundOrder, StopOrder, WorkReport
from node.exchange.in_flight import InFlight
from node.exchange.trouble import RoundLost
from protos import atoll_pb2 as pb
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub
from tests.node.hub_rig import SMALL, Make, next_message, pattern, report, take_part


def test_reports_and_heartbeats_reach_the_coordinator(hub: FakeHub, make: Make) -> None:
    hub.heartbeat_seconds = 0.02
    exchange = make()
    exchange.report(WorkReport(3, "s4", 1.5, 64, 0.25, 0.5, validation_loss=1.25, bits_per_byte=1.8))
    sent = next_message(hub, "report").report
    assert (sent.round, sent.state_digest, sent.loss, sent.tokens) == (3, "s4", 1.5, 64)
    assert (sent.evaluated, sent.validation_loss, sent.bits_per_byte) == (True, 1.25, 1.8)
    assert (sent.compute_seconds, sent.busy_seconds) == (0.25, 0.5)
    assert sent.bytes_up > 0 and sent.bytes_down > 0
    next_message(hub, "heartbeat")
    next_message(hub, "heartbeat")


def test_reports_of_a_long_cut_are_dropped_and_nothing_else(hub: FakeHub, make: Make) -> None:
    cut_off = threading.Event()
    exchange = make(say=lambda text: cut_off.set())
    hub.die()
    assert cut_off.wait(DEADLINE)
    exchange.ready(1, "s1")
    for round_index in range(1, 301):
        exchange.report(report(round_index, "s"))
    hub.start()
    assert next_message(hub, "ready").ready.round == 1
    assert next_message(hub, "report").report.round == 300 - 256 + 1
    for round_index in range(46, 301):
        assert next_message(hub, "report").report.round == round_index


def test_stop_is_an_order_and_leaving_comes_after_the_last_report(hub: FakeHub, make: Make) -> None:
    exchange = make()
    hub.send(pb.CoordinatorMessage(stop=pb.Stop(done=True, reason="all 8 rounds are done", evaluate=True)))
    assert exchange.next_order() == StopOrder(True, "all 8 rounds are done", True)
    exchange.report(report(7, "s8"))
    exchange.close("the run is done")
    exchange.close("twice does no harm")
    assert next_message(hub, "report").report.round == 7
    assert next_message(hub, "leave").leave.reason == "the run is done"


def unanswered(arrived: Callable[[], None]) -> Callable[[ExchangeStream], Awaitable[None]]:
    """A round whose contribution comes, which is told, and that goes no further."""

    async def script(stream: ExchangeStream) -> None:
        await stream.upload()
        arrived()
        await stream.context.read()
        await stream.context.read()

    return script


def test_stop_in_mid_round_ends_the_wait_for_its_commit(hub: FakeHub, make: Make) -> None:
    arrived = threading.Event()

    def stop() -> None:
        assert arrived.wait(DEADLINE)
        hub.open_round(1)  # it cannot be carried out without the result of the round that is broken off
        hub.send(pb.CoordinatorMessage(stop=pb.Stop(reason="digests differ: aaa and bbb")))

    hub.exchange = unanswered(arrived.set)
    exchange = make()
    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(RoundLost):
        take_part(hub, exchange, pattern(SMALL))
    thread.join(DEADLINE)
    assert exchange.next_order() == StopOrder(False, "digests differ: aaa and bbb", False)


def test_closing_ends_a_reduction_that_another_thread_waits_for(hub: FakeHub, make: Make) -> None:
    arrived = threading.Event()

    hub.exchange = unanswered(arrived.set)
    exchange = make()
    hub.open_round(0)
    order = exchange.next_order()
    assert isinstance(order, RoundOrder)
    flight = InFlight(lambda: exchange.reduce(order, pattern(SMALL)), "in-flight")
    assert arrived.wait(DEADLINE)
    exchange.close("interrupted by its user")  # the fake coordinator keeps the network thread in use
    with pytest.raises(ExchangeError, match="round 1 was cut short: the exchange has been closed"):
        flight.result()


def test_ctrl_c_ends_a_wait_and_closing_leaves_no_thread(hub: FakeHub, make: Make) -> None:
    hub.exchange = unanswered(lambda: os.kill(os.getpid(), signal.SIGINT))
    exchange = make()
    with pytest.raises(KeyboardInterrupt):
        take_part(hub, exchange, pattern(SMALL))
    exchange.close("interrupted by its user")
    assert next_message(hub, "leave").leave.reason == "interrupted by its user"
    assert not [thread for thread in threading.enumerate() if thread.name == "atoll-network"]
    with pytest.raises(ExchangeError, match="has been closed"):
        exchange.next_order()
