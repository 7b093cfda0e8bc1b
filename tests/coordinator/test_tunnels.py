"""Tunnels: who may call whom, what ends one, and that nothing piles up in them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest

from coordinator.nodes import Node, Outbox
from coordinator.start import Claim
from coordinator.tunnels import TunnelEnd, TunnelLimits, Tunnels
from protos import wire
from protos.refusal import TUNNEL, Refused
from protos.wire import MAX_MESSAGE_BYTES, PEER_END
from tests.coordinator.coordinator_rig import eventually, soon
from tests.coordinator.server_rig import Client, code_of, site


def make_node(name: str, *, session: bool = True) -> Node:
    node = Node(name, name, "", f"secret of {name}", 1, Claim(name, 0, "s0", 0), 0.0)
    node.outbox = Outbox() if session else None
    return node


async def key_of(node: Node) -> str:
    """Of the tunnel that the node is called to."""
    assert node.outbox is not None
    order = await soon(node.outbox.get())
    assert order is not None and order.WhichOneof("kind") == "tunnel"
    return order.tunnel.key


async def joined(tunnels: Tunnels, caller: Node, target: Node) -> tuple[TunnelEnd, TunnelEnd]:
    mine = tunnels.call(caller, target, target.node)
    theirs = tunnels.answer(target, await key_of(target))
    await soon(asyncio.gather(mine.joined(), theirs.joined()))
    return mine, theirs


async def refusal(operation: Awaitable[Any]) -> Refused:
    with pytest.raises(Refused) as refused:
        await soon(operation)
    return refused.value


@pytest.fixture
def pair() -> tuple[Node, Node]:
    return make_node("node-0"), make_node("node-1")


async def test_messages_go_both_ways_and_both_ends_close_it(pair: tuple[Node, Node]) -> None:
    tunnels = Tunnels()
    mine, theirs = await joined(tunnels, *pair)
    for number in range(5):
        await soon(mine.feed(b"up %d" % number))
        await soon(theirs.feed(b"down %d" % number))
        assert await soon(theirs.next()) == b"up %d" % number
        assert await soon(mine.next()) == b"down %d" % number
    await soon(mine.feed(PEER_END))
    mine.hung_up()
    assert await soon(theirs.next()) == PEER_END
    await soon(theirs.feed(b"more"))
    await soon(theirs.feed(PEER_END))
    assert await soon(theirs.next()) is None
    theirs.close()
    assert [await soon(mine.next()) for _ in range(3)] == [b"more", PEER_END, None]
    assert len(tunnels) == 1
    mine.close()
    assert (len(tunnels), tunnels.opened) == (0, 1)


async def test_whoever_is_slow_holds_the_other_one_up(pair: tuple[Node, Node]) -> None:
    mine, theirs = await joined(Tunnels(TunnelLimits(queued=3)), *pair)
    fed = 0

    async def feed() -> None:
        nonlocal fed
        for number in range(20):
            await mine.feed(bytes([number]))
            fed += 1

    feeding = asyncio.ensure_future(feed())
    for number in range(20):
        for _ in range(5):
            await asyncio.sleep(0)
        assert fed == min(number + 3, 20)
        assert await soon(theirs.next()) == bytes([number])
    await soon(feeding)


@pytest.mark.parametrize("by_caller", [True, False])
async def test_a_broken_end_breaks_the_other_one(pair: tuple[Node, Node], by_caller: bool) -> None:
    tunnels = Tunnels()
    ends = await joined(tunnels, *pair)
    one, other = ends if by_caller else reversed(ends)
    woken = []
    other.on_close = lambda: woken.append(other)
    waiting = asyncio.ensure_future(other.next())
    await soon(one.feed(b"half"))
    assert await soon(waiting) == b"half"
    waiting = asyncio.ensure_future(other.next())
    one.hung_up()
    leaver = "node-0" if by_caller else "node-1"
    found = await refusal(waiting)
    assert found.text == f"the tunnel from node-0 to node-1 is over: {leaver} broke off"
    assert found.code == "ABORTED" and other.refusal is found and woken
    assert len(tunnels) == 0
    await refusal(other.feed(b"x"))
    other.close()


async def test_a_session_that_ends_takes_its_tunnels_with_it(pair: tuple[Node, Node]) -> None:
    tunnels, third = Tunnels(), make_node("node-2")
    mine, theirs = await joined(tunnels, *pair)
    unheard = tunnels.call(third, pair[1], "node-1")
    kept, _ = await joined(tunnels, pair[0], third)
    for _ in range(2):  # full
        await soon(mine.feed(b"x"))
    stuck = asyncio.ensure_future(mine.feed(b"x"))
    tunnels.drop(pair[1])
    assert "node-1 is in the run no more" in (await refusal(stuck)).text
    await refusal(theirs.next())
    await refusal(unheard.joined())
    await soon(kept.feed(b"x"))
    assert len(tunnels) == 1


async def test_a_target_that_does_not_come(pair: tuple[Node, Node]) -> None:
    tunnels = Tunnels(TunnelLimits(answer=0.01))
    mine = tunnels.call(*pair, "node-1")
    found = await refusal(mine.joined())
    assert found.text == "node-1 did not come to the tunnel within 0.01 s"
    assert found.code == "DEADLINE_EXCEEDED" and len(tunnels) == 0
    with pytest.raises(Refused, match="no tunnel with this key"):
        tunnels.answer(pair[1], await key_of(pair[1]))


async def test_a_key_is_good_for_one_node_and_once(pair: tuple[Node, Node]) -> None:
    tunnels, third = Tunnels(), make_node("node-2")
    tunnels.call(*pair, "node-1")
    key = await key_of(pair[1])
    for node, shown in ((third, key), (pair[0], key), (pair[1], "guess")):
        with pytest.raises(Refused, match="no tunnel with this key") as refused:
            tunnels.answer(node, shown)
        assert refused.value.kind == TUNNEL
    tunnels.answer(pair[1], key)
    with pytest.raises(Refused, match="no tunnel with this key"):
        tunnels.answer(pair[1], key)


async def test_nobody_without_a_session_calls_or_is_called(pair: tuple[Node, Node]) -> None:
    tunnels, absent = Tunnels(), make_node("node-2", session=False)
    for caller, target in ((pair[0], absent), (absent, pair[0]), (pair[0], None), (pair[0], pair[0])):
        with pytest.raises(Refused, match="no other node of that name is here"):
            tunnels.call(caller, target, "node-9")
    pair[1].outbox = Outbox(limit=0)
    with pytest.raises(Refused, match="node-1 does not read its orders"):
        tunnels.call(*pair, "node-1")
    assert len(tunnels) == 0


async def test_there_are_only_so_many_at_a_time(pair: tuple[Node, Node]) -> None:
    tunnels, third = Tunnels(TunnelLimits(of_a_node=3, of_a_pair=2)), make_node("node-2")
    ends = [tunnels.call(*pair, "node-1") for _ in range(2)]
    with pytest.raises(Refused, match="node-0 has 2 tunnels to node-1 open") as refused:
        tunnels.call(*pair, "node-1")
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    tunnels.call(pair[1], pair[0], "node-0")
    for caller, target in ((pair[0], third), (third, pair[0])):
        with pytest.raises(Refused, match="node-0 has 3 tunnels open"):
            tunnels.call(caller, target, target.node)
    ends[0].close()
    tunnels.call(pair[0], third, "node-2")


@pytest.mark.parametrize("fault", ["too long", "behind the end"])
async def test_a_node_that_breaks_the_rules_breaks_the_tunnel(pair: tuple[Node, Node], fault: str) -> None:
    mine, theirs = await joined(Tunnels(), *pair)
    if fault == "behind the end":
        await soon(mine.feed(PEER_END))
    size = 1 if fault == "behind the end" else MAX_MESSAGE_BYTES + 1
    found = await refusal(mine.feed(b"x" * size))
    assert "node-0 sent a message" in found.text
    await refusal(theirs.next())


# ------------------------------------------------------------------------------------- through the server


class TunnelClient(Client):
    """Raw calls of a tunnel."""

    def tunnel(self, **keys: str) -> Any:
        names = {"to": wire.TUNNEL_TO_KEY, "key": wire.TUNNEL_KEY}
        pairs = [(names[name], value) for name, value in keys.items()]
        method = self.channel.stream_stream(f"/{wire.BULK_SERVICE}/Tunnel")
        return method(metadata=[*self.metadata(), *pairs])


async def test_bytes_of_a_tunnel_are_counted() -> None:
    async with site() as here:
        caller, target = TunnelClient(here), TunnelClient(here)
        for client in (caller, target):
            await client.join()
        await eventually(lambda: len(here.hub.run.registry.in_session()) == 2, "both sessions")
        up = caller.tunnel(to=target.id)
        order = await target.ordered("tunnel")
        assert order.caller == caller.id
        down = target.tunnel(key=order.key)
        before = here.hub.bytes_in, here.hub.bytes_out
        for call, count in ((up, 3), (down, 2)):
            for _ in range(count):
                await soon(call.write(b"x" * 1000))
            await soon(call.write(PEER_END))
            await soon(call.done_writing())
        for call, count in ((down, 3), (up, 2)):
            for _ in range(count):
                assert await soon(call.read()) == b"x" * 1000
            assert await soon(call.read()) == PEER_END
        for call in (up, down):
            assert await soon(call.code()) is grpc.StatusCode.OK
        assert (here.hub.bytes_in - before[0], here.hub.bytes_out - before[1]) == (5000, 5000)
        nodes = here.hub.run.registry.nodes
        assert nodes[caller.id].bytes_in >= 3000 and nodes[target.id].bytes_out >= 3000
        assert (len(here.hub.tunnels), here.hub.tunnels.opened) == (0, 1)
        assert not here.hub.status().counters


async def test_a_tunnel_needs_both_sessions() -> None:
    async with site() as here:
        caller, target = TunnelClient(here), TunnelClient(here)
        for client in (caller, target):
            await client.join()
        await eventually(lambda: len(here.hub.run.registry.in_session()) == 2, "both sessions")
        code, words = await code_of(caller.tunnel(to="node-9").read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "no other node of that name" in words
        stranger = TunnelClient(here)
        code, _ = await code_of(stranger.tunnel(to=target.id).read())
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert here.hub.status().counters[TUNNEL] == 1
        up = caller.tunnel(to=target.id)
        down = target.tunnel(key=(await target.ordered("tunnel")).key)
        await soon(down.write(b"hello"))
        assert await soon(up.read()) == b"hello"
        await target.leave()
        code, words = await code_of(up.read())
        assert code is grpc.StatusCode.ABORTED and f"{target.id} is in the run no more" in words
        assert len(here.hub.tunnels) == 0
