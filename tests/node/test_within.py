"""Deadlines of waits: whatever becomes of the work that was waited for, nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from node.exchange.retry import within
from node.exchange.trouble import Kind, Trouble


async def stubborn(begun: asyncio.Event) -> None:
    """Turns a cancellation into a failure of its own."""
    begun.set()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise Trouble(Kind.BROKEN, "given up") from None


@pytest.mark.parametrize("cancelled", [True, False])
def test_work_that_fails_when_it_is_given_up_is_not_complained_about(cancelled: bool) -> None:
    complaints: list[dict[str, Any]] = []

    async def test() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        begun = asyncio.Event()
        wait = asyncio.ensure_future(within(60.0 if cancelled else 0.0, "something", stubborn(begun)))
        await begun.wait()
        if cancelled:
            wait.cancel()
        with contextlib.suppress(asyncio.CancelledError, Trouble):
            await wait
        assert wait.cancelled() == cancelled
        del wait
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(test())
    assert complaints == []
