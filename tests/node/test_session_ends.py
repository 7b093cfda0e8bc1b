"""A session that cannot go on says so: nobody waits for its orders for ever."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from node.exchange.base import ExchangeError
from node.exchange.link import Limits
from node.exchange.retry import Timing
from node.exchange.session import Session
from protos import atoll_pb2 as pb
from tests.node.hub_rig import CLAIM

DEADLINE = 60.0


async def test_a_defect_ends_the_wait_for_orders() -> None:
    begin = asyncio.Event()

    async def join(request: pb.JoinRequest) -> pb.JoinReply:
        return pb.JoinReply(node="node-0", session="secret", heartbeat_seconds=1.0)

    async def read() -> Any:
        await begin.wait()
        raise RuntimeError("out of order")

    call = SimpleNamespace(read=read, cancel=lambda: None)
    link: Any = SimpleNamespace(address="nowhere", limits=Limits(), join=join, session=lambda secret: call)
    session = Session(link, Timing(), print)
    await session.join(CLAIM, DEADLINE)
    waiting = asyncio.ensure_future(session.next_order())
    begin.set()
    with pytest.raises(ExchangeError, match=r"defect of this node's session: RuntimeError\('out of order'\)"):
        await asyncio.wait_for(waiting, DEADLINE)
    assert session.halted.is_set()
