"""A deadline for each of many steps, on a clock that no busy machine moves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from bench.virtual import loop
from node.exchange.retry import Steps
from node.exchange.trouble import Kind, Trouble

SHORT = 0.02


def play(test: Coroutine[Any, Any, None]) -> None:
    loop.run(lambda virtual: test)


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
        steps = Steps(SHORT, "a part of it")
        for _ in range(5):
            steps.begin()
            await asyncio.sleep(0.7 * SHORT)
            steps.end()
            await asyncio.sleep(0.7 * SHORT)
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
