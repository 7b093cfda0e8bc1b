"""A deadline for each of many steps."""

from __future__ import annotations

import asyncio

import pytest

from node.exchange.retry import Steps
from node.exchange.trouble import Kind, Trouble

DEADLINE = 20.0
SHORT = 0.02


def play(test: object) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE))  # type: ignore[arg-type]


def test_a_step_that_takes_too_long_is_trouble_by_name() -> None:
    async def test() -> None:
        steps = Steps(SHORT, "a part of it")
        steps.begin()
        with pytest.raises(Trouble, match=r"a part of it took longer than 0\.02 s") as trouble:
            await steps.over
        assert trouble.value.kind is Kind.SILENT

    play(test())


def test_the_time_between_steps_does_not_count_and_each_step_has_its_own() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        steps = Steps(SHORT, "a part of it")
        until = loop.time() + 5 * SHORT
        while loop.time() < until:
            steps.begin()
            await asyncio.sleep(0)
            steps.end()
            await asyncio.sleep(0)
        await asyncio.sleep(2 * SHORT)
        assert not steps.over.done()
        steps.begin()
        await asyncio.wait({steps.over})
        assert steps.over.done()

    play(test())


def test_once_closed_it_looks_no_more() -> None:
    async def test() -> None:
        steps = Steps(SHORT, "a part of it")
        steps.begin()
        steps.close()
        await asyncio.sleep(2 * SHORT)
        assert not steps.over.done()

    play(test())
