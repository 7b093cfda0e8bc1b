"""Background streams give way to rounds, and never starve."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.pacing import BLOCKED_SECONDS, KEEP_UP, QUIET_SECONDS, SHARE, Flow, Pacer, exchanging
from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import Site, VirtualTimer, soon

MIB = 1 << 20
PATIENCE = 15.0
MEMBERS = 2


class Link:
    """A coordinator's link of ``rate`` bytes a second: the traffic of rounds of :data:`MEMBERS` nodes, and
    background streams that want to send without end; some carry results, from those of the rounds
    ``replayed`` on."""

    def __init__(self, streams: int, *, rate: float = 100e6 / 8, replayed: tuple[int, ...] = ()) -> None:
        self.timer = VirtualTimer()
        self.rate = rate
        self.busy = False
        self.round_bytes = 0
        self.sent = [0] * streams
        self.gaps = [0.0] * streams
        self.pacer = Pacer(
            now=self.timer.now,
            exchanging=lambda: self.busy,
            moved=lambda: self.round_bytes + sum(self.sent),
            members=lambda: MEMBERS,
            patience=PATIENCE,
        )
        self.open = contextlib.ExitStack()
        flows = [*replayed, *[None] * (streams - len(replayed))]
        self.flows = [self.open.enter_context(self.pacer.flow(first)) for first in flows]
        self.due = [self.timer.now()] * streams
        self.last = [self.timer.now()] * streams

    def run(self, seconds: float, step: float = 0.01) -> None:
        """In each step the round moves what the link carries while it is busy; streams send what they may."""
        for _ in range(round(seconds / step)):
            if self.busy:
                self.round_bytes += round(self.rate * step)
            for index, flow in enumerate(self.flows):
                self._serve(index, flow)
            self.timer.advance(step)

    def _serve(self, index: int, flow: Flow) -> None:
        now = self.timer.now()
        if now < self.due[index]:
            return
        pause = flow.pause(MIB)
        if pause:
            self.due[index] = now + pause
            return
        self.sent[index] += MIB
        self.due[index] = now + MIB / self.rate
        self.gaps[index] = max(self.gaps[index], now - self.last[index])
        self.last[index] = now


def test_at_rest_streams_run_free() -> None:
    link = Link(2)
    link.run(10)
    assert all(sent == pytest.approx(10 * link.rate, rel=0.15) for sent in link.sent)


@pytest.mark.parametrize("streams", [1, 8])
def test_a_round_that_moves_leaves_a_twentieth(streams: int) -> None:
    link = Link(streams)
    link.busy = True
    link.run(60)
    floor = streams * (60 / PATIENCE + 1) * MIB  # what keeps each alive
    assert sum(link.sent) <= SHARE * link.round_bytes + floor
    assert sum(link.sent) >= 0.8 * SHARE * link.round_bytes
    assert sum(link.sent) < 0.1 * link.round_bytes


def test_nobody_starves_on_a_link_that_never_rests() -> None:
    link = Link(8, rate=100e3)  # the share of all streams is a message every 200 s
    link.busy = True
    link.run(100, step=0.05)
    assert all(sent >= 5 * MIB for sent in link.sent)
    assert max(link.gaps) <= PATIENCE + 0.1


def test_who_replays_results_overtakes_rounds_that_never_rest() -> None:
    link = Link(2, replayed=(3,))
    link.busy = True
    link.run(60)
    added = link.round_bytes / (2 * MEMBERS)  # by the rounds, to what has to be replayed
    kept_alive = (60 / PATIENCE + 1) * MIB
    assert KEEP_UP * added - MIB <= link.sent[0]
    assert sum(link.sent) <= KEEP_UP * added + SHARE * link.round_bytes + 2 * kept_alive


def test_who_is_nearest_to_its_goal_overtakes_first() -> None:
    link = Link(3, replayed=(10, 90, 50))
    link.busy = True
    link.run(60)
    added = link.round_bytes / (2 * MEMBERS)
    kept_alive = (60 / PATIENCE + 1) * MIB
    assert link.sent[1] >= KEEP_UP * added - MIB
    assert link.sent[0] + link.sent[2] <= SHARE * link.round_bytes + 2 * kept_alive


def test_the_next_one_overtakes_when_the_first_has_arrived() -> None:
    link = Link(1, replayed=(10,))
    link.busy = True
    with link.pacer.flow(90):
        link.run(60)
        assert link.sent[0] <= SHARE * link.round_bytes + (60 / PATIENCE + 1) * MIB
    before = link.sent[0]
    link.run(60)
    assert link.sent[0] - before >= KEEP_UP * link.round_bytes / 2 / (2 * MEMBERS) - MIB


def test_rounds_take_turns_with_streams() -> None:
    """A second of exchange, a second of rest: the rest is the streams'."""
    link = Link(1)
    for _ in range(10):
        link.busy = not link.busy
        link.run(1)
    rest = 5 * link.rate
    assert 0.85 * rest <= link.sent[0] <= rest + SHARE * link.round_bytes + 10 * MIB


def test_no_share_is_saved_up_at_rest() -> None:
    link = Link(1)
    link.run(30)
    link.busy = True
    link.run(0.1)
    before = link.sent[0]
    link.run(1)
    assert link.sent[0] - before <= SHARE * link.rate * 1.2 + MIB


# ------------------------------------------------------------------------------------- what is going on


async def test_a_round_is_exchanged_from_its_first_message_to_its_last() -> None:
    site = Site(nodes=2)
    a, b = site.nodes
    order, other = await site.opened()
    assert not exchanging(site.run)
    first = a.send(order, random_payload(0, site.table))
    assert exchanging(site.run)
    site.timer.advance(QUIET_SECONDS)
    assert not exchanging(site.run)  # it waits for the other
    second = b.send(other, random_payload(1, site.table))
    assert exchanging(site.run)
    site.timer.advance(QUIET_SECONDS)
    assert exchanging(site.run)  # the result is on its way
    for node, exchange in ((a, first), (b, second)):
        assert exchanging(site.run)
        await soon(node.receive(exchange))
    assert not exchanging(site.run)


async def test_a_result_that_is_not_read_holds_nobody_up_for_long() -> None:
    site = Site(nodes=1)
    (order,) = await site.opened()
    site.nodes[0].send(order, random_payload(0, site.table))
    site.timer.advance(BLOCKED_SECONDS - 0.01)
    assert exchanging(site.run)
    site.timer.advance(0.01)
    assert not exchanging(site.run)


def test_streams_that_have_ended_are_not_moving() -> None:
    def run_of(**changes: Any) -> Any:
        values = {"served": False, "refusal": None, "result": None, "progress_at": 10.0, **changes}
        node = SimpleNamespace(exchanges=[SimpleNamespace(**values)])
        return SimpleNamespace(now=lambda: 10.0, registry=SimpleNamespace(nodes={"n": node}))

    assert exchanging(run_of())
    assert not exchanging(run_of(served=True))
    assert not exchanging(run_of(refusal="it is over"))
