"""A round that is broken off has ended when the contributor says so: nothing of it touches the next one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.exchange.base import RoundOrder
from node.exchange.contributor import Contributor
from node.exchange.link import Limits
from node.exchange.retry import Timing
from node.exchange.trouble import Kind, RoundLost, Trouble
from protos import atoll_pb2 as pb
from protos.buckets import TableSchedule
from tests.coordinator.contribution_rig import voted_table

TABLE = voted_table(64)
ORDER = RoundOrder(0, 0, ("node-0",), 0, 1, False, False, topology=1)
DEADLINE = 60.0


class Session:
    """Stands, and may be told to stop."""

    node, secret, generation, connected = "node-0", "secret", 0, True

    def __init__(self) -> None:
        self.halted = asyncio.Event()
        self.lost = asyncio.Event()

    async def confirmed(self, order: RoundOrder) -> RoundOrder:
        return order

    async def offered_again(self, order: RoundOrder) -> RoundOrder:
        await self.lost.wait()
        raise RoundLost("the session has something else")

    async def superseded(self, order: RoundOrder) -> None:
        await self.lost.wait()


class Unanswered:
    """A call on a connection that was lost, which nobody notices."""

    def __init__(self) -> None:
        self.read_from, self.cancelled = asyncio.Event(), asyncio.Event()

    async def write(self, message: bytes) -> None: ...

    async def done_writing(self) -> None: ...

    async def read(self) -> bytes:
        self.read_from.set()
        await asyncio.Event().wait()
        return b""

    def cancel(self) -> None:
        self.cancelled.set()


class Rounds:
    """Takes some turns of the loop to come to an end."""

    def __init__(self) -> None:
        self.begun, self.over = asyncio.Event(), False

    def decided(self, round_index: int) -> bool:
        return False

    async def reduce(self, order: RoundOrder, *rest: Any) -> pb.Commit:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            self.over = True
        raise Trouble(Kind.CUT, "unreachable")


def contributor(session: Session, rounds: Rounds | None, call: Unanswered | None = None) -> Contributor:
    tables = TableSchedule((TABLE,))
    link: Any = SimpleNamespace(
        limits=Limits(),
        traffic=SimpleNamespace(compose=lambda part: None),
        address="nowhere",
        exchange=lambda secret: call,
    )
    peers: Any = rounds
    return Contributor(
        link, session, tables=tables, lane=None, weight=1, timing=Timing(), say=print, peers=peers
    )


@pytest.mark.parametrize("end", ["halted", "lost", "cancelled"])
async def test_the_round_is_over_when_it_is_broken_off(end: str) -> None:
    session, rounds = Session(), Rounds()
    work = asyncio.ensure_future(contributor(session, rounds).reduce(ORDER, None, "no data", None))
    await asyncio.wait_for(rounds.begun.wait(), DEADLINE)
    if end == "cancelled":
        work.cancel()
    else:
        (session.halted if end == "halted" else session.lost).set()
    await asyncio.wait({work}, timeout=DEADLINE)
    assert rounds.over
    if end != "cancelled":
        assert isinstance(work.exception(), RoundLost)


@pytest.mark.parametrize("result_ready", [False, True])
async def test_a_call_that_never_ends_does_not_hold_up_a_session_that_has_gone_on(result_ready: bool) -> None:
    session, call = Session(), Unanswered()
    order = replace(ORDER, topology=0, result_ready=result_ready)
    work = asyncio.ensure_future(contributor(session, None, call).reduce(order, None, "no data", None))
    await asyncio.wait_for(call.read_from.wait(), DEADLINE)
    session.generation += 1
    session.lost.set()
    with pytest.raises(RoundLost, match="something else"):
        await asyncio.wait_for(work, DEADLINE)
    await asyncio.wait_for(call.cancelled.wait(), DEADLINE)
