"""Results wait for contributions, but for none that do not move."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from node.exchange.peers.uplink import HOLD_SECONDS, Uplink

DEADLINE = 100.0


def play(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, DEADLINE))


def test_a_result_leaves_once_no_contribution_does() -> None:
    async def test() -> None:
        uplink = Uplink()
        await uplink.turn()
        with uplink.sending():
            with uplink.sending():
                waiting = asyncio.ensure_future(uplink.turn())
                await asyncio.sleep(0)
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done()
        await waiting

    play(test())


def test_contributions_hold_results_up_only_while_they_move() -> None:
    async def test() -> None:
        uplink, loop = Uplink(), asyncio.get_running_loop()
        with uplink.sending():
            waiting = asyncio.ensure_future(uplink.turn())
            until = loop.time() + 3 * HOLD_SECONDS
            while loop.time() < until:
                uplink.moved()
                await asyncio.sleep(0.01)
            assert not waiting.done()
            await waiting

    play(test())
