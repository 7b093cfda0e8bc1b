"""Whether others can call a node, decided from what is known; and whether libp2p answers somewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator.dialing import knock
from coordinator.reachability import Known, is_relayed, judge, swarm_places
from protos.atoll_pb2 import Endpoint

HIDDEN = Known(swarm=True)
GREETING = b"\x13/multistream/1.0.0\n"


@pytest.mark.parametrize(
    ("known", "transport", "able"),
    [
        (Known(direct=True), "direct", True),
        (Known(direct=True, swarm=True), "auto", True),
        (Known(), "direct", False),
        (Known(), "swarm", False),
        (HIDDEN, "auto", False),
        (HIDDEN, "direct", False),
        (Known(swarm=True, relayed=True), "auto", True),
        (Known(swarm=True, relayed=True), "direct", False),
        (Known(swarm=True, answered=True), "auto", True),
        (Known(swarm=True, answered=True), "swarm", True),
    ],
)
def test_a_node_is_able_once_something_has_shown_it(known: Known, transport: str, able: bool) -> None:
    verdict = judge({"reef": known}, transport)["reef"]
    assert verdict.able is able and verdict.reason


def test_the_swarm_tries_what_nobody_knows_where_there_is_nothing_else() -> None:
    lonely = {"reef": HIDDEN, "lagoon": Known()}
    assert {name: verdict.able for name, verdict in judge(lonely, "swarm").items()} == {
        "reef": True,
        "lagoon": False,
    }
    with_another = judge({**lonely, "atoll": Known(swarm=True, answered=True)}, "swarm")
    assert not with_another["reef"].able and with_another["atoll"].able
    assert not any(verdict.able for verdict in judge(lonely, "auto").values()), "all goes to the coordinator"


def test_what_a_node_announces() -> None:
    own = ["/ip4/192.0.2.7/tcp/4701/p2p/Qm1", "/ip6/2001:db8::7/tcp/4701/p2p/Qm1"]
    quic = "/ip4/192.0.2.7/udp/4701/quic-v1/p2p/Qm1"
    relayed = "/ip4/198.51.100.1/tcp/4701/p2p/Qm9/p2p-circuit/p2p/Qm1"
    wrong = ["", "/", "//ip4/192.0.2.7/tcp/1", "/ip4//tcp/1", "/ip4/192.0.2.7/tcp/x", "/unix/a/tcp/1"]
    assert swarm_places([*own, own[0], quic, relayed, *wrong]) == ["192.0.2.7:4701", "[2001:db8::7]:4701"]
    assert is_relayed(Endpoint(swarm_addresses=[own[0], relayed]))
    assert not is_relayed(Endpoint(swarm_addresses=[*own, quic]))


@asynccontextmanager
async def listener(answer: bytes) -> AsyncIterator[str]:
    """Says ``answer`` to whoever connects, and hangs up."""

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(len(GREETING))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_libp2p_is_known_by_its_greeting() -> None:
    async with listener(GREETING) as libp2p, listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as web:
        assert await knock([libp2p]) == ""
        assert await knock([web, libp2p]) == "", "one is enough"
        assert "is not libp2p" in await knock([web])
    async with listener(b"") as silent:
        assert silent in await knock([silent])
    assert libp2p in await knock([libp2p]), "nobody listens there any more"
    assert "no address" in await knock([])
    assert "port" in await knock(["reef.example:99999"])
