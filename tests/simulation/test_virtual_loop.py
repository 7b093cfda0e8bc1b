"""The virtual loop: time jumps, turns are exact, and a deadlock is told with everybody's name."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.virtual import loop
from bench.virtual.loop import START, Deadlock, OutOfTime, VirtualLoop


def test_time_jumps_and_timers_ring_in_order() -> None:
    rung: list[tuple[str, float]] = []

    async def main(virtual: VirtualLoop) -> float:
        for name, seconds in (("c", 7200.0), ("a", 0.5), ("b", 0.5)):
            virtual.call_later(seconds, lambda name=name: rung.append((name, virtual.time() - START)))
        await asyncio.sleep(7200.5)
        return virtual.time() - START

    began = time.perf_counter()
    assert loop.run(main) == pytest.approx(7200.5, abs=1e-3)
    assert time.perf_counter() - began < 600
    assert [name for name, _ in rung] == ["a", "b", "c"]
    assert [seconds for _, seconds in rung] == pytest.approx([0.5, 0.5, 7200.0], abs=1e-3)


def test_a_deadlock_names_who_waits_where() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    async def main(virtual: VirtualLoop) -> None:
        virtual.create_task(stuck(), name="the one that waits")
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"the one that waits waits in stuck:\d+"):
        loop.run(main)


def test_the_deadline_ends_a_run_that_goes_on_for_ever() -> None:
    async def main(virtual: VirtualLoop) -> None:
        while True:
            await asyncio.sleep(1.0)

    with pytest.raises(OutOfTime, match=r"it was not over at 1060 s"):
        loop.run(main, seconds=60.0)


def test_waits_that_no_clock_can_tell_end() -> None:
    async def main(virtual: VirtualLoop) -> int:
        turns, until = 0, virtual.time() + 1e-9
        while virtual.time() < until:
            await asyncio.sleep(1e-15)
            turns += 1
        return turns

    assert loop.run(main) < 100


def test_threads_work_at_once() -> None:
    async def main(virtual: VirtualLoop) -> list[int]:
        return await asyncio.gather(*(asyncio.to_thread(abs, -number) for number in (1, 2)))

    assert loop.run(main) == [1, 2]
