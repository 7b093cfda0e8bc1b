"""The way between the run's loop and the page's thread, and who may act."""

from __future__ import annotations

import asyncio
import logging

import pytest

from coordinator.administration import Answer
from coordinator.dashboard.feed import Feed
from coordinator.dashboard.guard import (
    FIRST_WAIT,
    FORGET_SECONDS,
    FREE_TRIES,
    LONGEST_WAIT,
    MAX_SOURCES,
    Guard,
)
from coordinator.dashboard.snapshot import Snapshot
from tests.coordinator.coordinator_rig import eventually, soon
from tests.coordinator.dashboard.dashboard_rig import TOKEN, snapshot


class Source:
    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None

    def take(self) -> Snapshot:
        self.count += 1
        if self.error is not None:
            raise self.error
        return snapshot(round=self.count)


async def test_snapshots_are_made_while_somebody_looks_only() -> None:
    source = Source()
    feed = Feed(asyncio.get_running_loop(), source.take, seconds=0.001)
    assert source.count == 0 and feed.latest is None and feed._timer is None
    await asyncio.to_thread(feed.open)
    await asyncio.to_thread(feed.open)
    await eventually(lambda: source.count >= 3, "several snapshots")
    assert feed.latest is not None and feed.latest.round == source.count
    feed.close()
    before = source.count
    await eventually(lambda: source.count > before, "another one for the second reader")
    feed.close()
    await eventually(lambda: feed._timer is None, "the end of the last tick")
    before = source.count
    feed.open()
    await eventually(lambda: source.count > before, "a new beginning")
    feed.stop()


async def test_a_defect_of_the_dashboard_does_not_reach_the_run(caplog: pytest.LogCaptureFixture) -> None:
    source = Source()
    source.error = RuntimeError("broken")
    feed = Feed(asyncio.get_running_loop(), source.take, seconds=0.001)
    with caplog.at_level(logging.ERROR):
        feed.open()
        await eventually(lambda: source.count >= 3, "further attempts")
    assert len(caplog.records) == 1, "told once"
    source.error = None
    await eventually(lambda: feed.latest is not None, "a snapshot")
    feed.stop()


async def test_orders_are_carried_out_on_the_loop() -> None:
    feed = Feed(asyncio.get_running_loop(), Source().take)
    threads = []

    def action() -> Answer:
        threads.append(asyncio.get_running_loop())
        return Answer(True, "done")

    answer = await soon(asyncio.wrap_future(await asyncio.to_thread(feed.order, action)))
    assert answer == Answer(True, "done") and threads == [asyncio.get_running_loop()]
    assert feed.latest is not None, "what came of it is seen at once"

    def broken() -> Answer:
        raise RuntimeError("broken")

    answer = await soon(asyncio.wrap_future(feed.order(broken)))
    assert not answer.done and "broken" in answer.text


def test_an_order_to_a_run_that_is_over() -> None:
    loop = asyncio.new_event_loop()
    loop.close()
    answer = Feed(loop, Source().take).order(lambda: Answer(True, "")).result(0)
    assert not answer.done and answer.text == "the coordinator is ending"


class Clock:
    def __init__(self) -> None:
        self.time = 5.0

    def now(self) -> float:
        return self.time


def name_of(secret: str) -> str:
    return "admin" if secret == TOKEN else ""


def refusal(guard: Guard, source: str, token: str) -> str:
    name, why = guard.admit(source, token)
    assert bool(name) != bool(why)
    return why


def test_the_token_and_nothing_else() -> None:
    guard = Guard(name_of, Clock().now)
    assert refusal(guard, "a", TOKEN) == ""
    for wrong in ("", TOKEN[:-1], TOKEN.upper(), f"{TOKEN}x", "ünï\ud800"):
        assert refusal(Guard(name_of, Clock().now), "a", wrong) == "this is not the admin token"
    assert guard.admit("a", f" {TOKEN}\n") == ("admin", "")
    assert guard.admit("a", f"atoll://{TOKEN}@host:4600/pin") == ("admin", "")


def test_wrong_tokens_cost_ever_more_time() -> None:
    clock = Clock()
    guard = Guard(name_of, clock.now)
    for _ in range(FREE_TRIES):
        assert refusal(guard, "a", "wrong") == "this is not the admin token"
    assert refusal(guard, "a", TOKEN) == f"too many wrong tokens; try again in {FIRST_WAIT:.0f} s"
    assert refusal(guard, "b", TOKEN) == "", "others need not wait"
    clock.time += FIRST_WAIT
    assert refusal(guard, "a", "wrong") == "this is not the admin token"
    clock.time += FIRST_WAIT
    assert "try again in 10 s" in refusal(guard, "a", TOKEN)
    clock.time += FIRST_WAIT
    assert refusal(guard, "a", TOKEN) == ""
    assert refusal(guard, "a", "wrong") == "this is not the admin token"
    assert refusal(guard, "a", TOKEN) == "", "a right one wipes the slate"


def test_waits_are_bounded_and_forgotten() -> None:
    clock = Clock()
    guard = Guard(name_of, clock.now)
    for _ in range(40):
        refusal(guard, "a", "wrong")
        clock.time += LONGEST_WAIT
    clock.time += FORGET_SECONDS + 1
    for _ in range(FREE_TRIES - 1):
        refusal(guard, "a", "wrong")
    assert refusal(guard, "a", TOKEN) == ""
    for source in range(3 * MAX_SOURCES):
        refusal(guard, str(source), "wrong")
    assert len(guard._sources) == MAX_SOURCES
