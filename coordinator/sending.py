"""What answers a request for states or results: sent at the pace that the rounds leave, while it is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable

from coordinator.hub import Hub
from coordinator.nodes import Node
from coordinator.stream import Interrupted, Stream
from protos.refusal import STALLED, Refused


async def send(
    stream: Stream,
    hub: Hub,
    node: Node,
    answer: Callable[[], AsyncGenerator[bytes, None]],
    replayed: int | None = None,
) -> None:
    """Send what ``answer`` makes to ``node``; ``replayed``: the first round whose result it is, if it is one.

    Raises:
        Refused: there is no such answer, the session has ended, or the node does not read; it is counted.
    """
    try:
        await _send(stream, hub, node, answer(), replayed)
    except Refused as refused:
        hub.count(refused.kind)
        raise


async def _send(
    stream: Stream, hub: Hub, node: Node, answer: AsyncGenerator[bytes, None], replayed: int | None
) -> None:
    loop, stall = asyncio.get_running_loop(), hub.plan.stall
    with hub.pacer.flow(replayed) as flow:
        async with contextlib.aclosing(answer) as frames:
            async for frame in frames:
                while pause := flow.pause(len(frame)):
                    await asyncio.sleep(pause)
                if node.state == "left":
                    raise Refused("", f"the session has ended: {node.reason}", "ABORTED")
                alarm = loop.call_later(stall, stream.interrupt)
                try:
                    await stream.write(frame)
                except Interrupted:
                    text = f"{node.node} has not read for {stall:g} s"
                    raise Refused(STALLED, text, "DEADLINE_EXCEEDED") from None
                finally:
                    alarm.cancel()
                hub.moved(node)
