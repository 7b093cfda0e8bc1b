"""The table of who is there: its records, and two nodes that share it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.exchange import whereabouts
from node.exchange.link import Limits, Link
from node.exchange.meter import Meter
from node.exchange.retry import Timing, within
from node.exchange.swarm.presence import (
    MAX_RECORD,
    Presence,
    Present,
    coordinator_record,
    parse_coordinator,
)
from protos import atoll_pb2 as pb
from protos import wire
from tests.node.fake_hub import FakeHub
from tests.node.swarm.swarm_rig import SECONDS, Site

PEER = "QmVvbzNhJvkVWD3uTNHUGo6JrqmfYQbGVSRTdZxpBwdvyU"


@given(st.text(max_size=60).filter(str.isprintable), st.integers(0, 30))
def test_records_of_presence_come_back(node: str, count: int) -> None:
    addresses = tuple(f"/ip4/10.0.0.{k}/tcp/4601/p2p/{PEER}" for k in range(count))
    data = Present(PEER, node, addresses).to_bytes()
    assert len(data) <= MAX_RECORD
    read = Present.parse(PEER, data)
    assert read.node == node and read.addresses == addresses[: len(read.addresses)]
    assert len(read.addresses) == count or count > 5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        "text",
        7,
        b"[" * 900,
        b"\xff" * 10,
        b" " * (MAX_RECORD + 1),
        json.dumps({"node": "a"}).encode(),
        json.dumps({"node": 1, "addresses": []}).encode(),
        json.dumps({"node": "a\nb", "addresses": []}).encode(),
        json.dumps({"node": "a", "addresses": [1]}).encode(),
        json.dumps({"node": "a", "addresses": ["/ip4/1.2.3.4/tcp/5"]}).encode(),
        json.dumps({"node": "a", "addresses": ["/unix/etc/passwd/p2p/" + PEER]}).encode(),
        json.dumps({"node": "a", "addresses": [], "more": 1}).encode(),
    ],
)
def test_other_records_are_refused(data: object) -> None:
    with pytest.raises(ValueError):
        Present.parse(PEER, data)
    with pytest.raises(ValueError):
        parse_coordinator(data)


def test_the_coordinators_record() -> None:
    assert parse_coordinator(coordinator_record("[::1]:4600")) == "[::1]:4600"
    for address in ("0.0.0.0:4600", "10.0.0.1:0", "a b:1", "10.0.0.1"):
        with pytest.raises(ValueError):
            parse_coordinator(json.dumps({"coordinator": address}).encode())


async def _found(presence: Presence, wanted: tuple[str, ...]) -> None:
    while await presence.find_coordinator() != wanted:
        pass


@pytest.mark.asyncio(loop_scope="module")
async def test_nodes_find_each_other_and_the_coordinator_that_has_moved(sites: list[Site]) -> None:
    one, two = (site.swarm for site in sites)

    async def seen() -> None:
        while not (one.presence.present and two.presence.present):
            await one.presence.refresh()
            await two.presence.refresh()

    await within(SECONDS, "presence", seen())
    assert [other.node for other in one.presence.present] == ["two"]
    assert [other.node for other in two.presence.present] == ["one"]
    assert one.presence.present[0].addresses == await two.addresses()
    two.presence.coordinator_is("10.0.0.1:4600")
    await within(SECONDS, "the coordinator", _found(one.presence, ("10.0.0.1:4600",)))
    # Who is with it at its new place says so; what was said last is tried first.
    one.presence.coordinator_is("10.0.0.2:4600")
    two.presence.coordinator_is("")
    await within(SECONDS, "the new one", _found(two.presence, ("10.0.0.2:4600", "10.0.0.1:4600")))
    # Garbage that another node writes is passed over.
    await two.presence._write("present", b"{}")
    await one.presence.refresh()
    assert one.presence.present == ()
    # What they hold can be read by those with the token only: others ask for other keys, and are refused.
    assert one.presence._secret.label("present") != Site("x", token="y").swarm.presence._secret.label(
        "present"
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_a_node_follows_the_coordinator_that_others_have_found(
    sites: list[Site], hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whereabouts, "LOST_SECONDS", 0.0)
    hub.run = pb.GetRunReply(protocol=wire.PROTOCOL, run_digest="run")
    here, there = (site.swarm.presence for site in sites)
    here.coordinator_is(hub.invite.address)
    link = Link(replace(hub.invite, port=1), Meter(), Limits())
    link.open()
    follower = whereabouts.Follower(link, there, "run", Timing(), lambda text: None)

    async def found() -> None:
        while not await follower.lost():
            pass

    await within(SECONDS, "the coordinator", found())
    assert link.address == hub.invite.address
    assert (await link.get_run()).run_digest == "run"
    await link.close()
