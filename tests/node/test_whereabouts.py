"""A coordinator that has moved: a node finds it by what others tell."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from node.exchange.hub import HubExchange
from node.exchange.link import Link
from node.exchange.meter import Meter
from node.exchange.trouble import Kind, Trouble
from node.exchange.whereabouts import LOST_SECONDS, Follower
from protos import atoll_pb2 as pb
from protos import wire
from tests.node.fake_hub import DEADLINE, FakeHub
from tests.node.hub_rig import CLAIM, LIMITS, SMALL, TIMING, FakeClock, Make

RUN = pb.GetRunReply(protocol=wire.PROTOCOL, run_file="x", run_digest=CLAIM.run_digest)


class Told:
    """What nodes tell, without a swarm."""

    def __init__(self, *addresses: str) -> None:
        self.addresses = addresses
        self.said: list[str] = []
        self.asked = 0
        self.broken = False

    def coordinator_is(self, address: str) -> None:
        self.said.append(address)

    async def find_coordinator(self) -> tuple[str, ...]:
        self.asked += 1
        if self.broken:
            raise Trouble(Kind.BROKEN, "no swarm")
        return self.addresses


@pytest.fixture
def other() -> Iterator[FakeHub]:
    """Where the coordinator has gone."""
    fake = FakeHub(run=RUN).start()
    yield fake
    fake.close()


async def looked(hub: FakeHub, told: Told) -> tuple[Link, list[str], list[bool]]:
    """A link that was reached at ``hub``, and what came of two looks, the second when it counts as lost."""
    clock = FakeClock()
    link, said = Link(hub.invite, Meter(), LIMITS), list[str]()
    link.open()
    follower = Follower(link, told, CLAIM.run_digest, clock.timing(), said.append)
    follower.reached()
    follower.reached()
    moved = [await follower.lost()]
    assert not told.asked and told.said == [hub.invite.address]
    clock.time += LOST_SECONDS
    moved.append(await follower.lost())
    assert told.asked == 1 and told.said == [hub.invite.address, ""]
    return link, said, moved


async def test_it_is_looked_for_after_some_seconds_and_taken_where_it_answers(
    hub: FakeHub, other: FakeHub
) -> None:
    told = Told(hub.invite.address, "127.0.0.1:1", other.invite.address)
    link, said, moved = await looked(hub, told)
    assert moved == [False, True]
    assert link.address == other.invite.address
    assert (await link.get_run()).run_digest == CLAIM.run_digest
    assert len(said) == 1 and other.invite.address in said[0]
    await link.close()


@pytest.mark.parametrize("wrong", ["run", "token", "nothing told", "nobody to ask"])
async def test_what_does_not_fit_is_not_taken(hub: FakeHub, other: FakeHub, wrong: str) -> None:
    told = Told(other.invite.address)
    if wrong == "run":
        other.run = pb.GetRunReply(protocol=wire.PROTOCOL, run_digest="another")
    elif wrong == "token":
        other.token = "another"
    elif wrong == "nothing told":
        told.addresses = ()
    told.broken = wrong == "nobody to ask"
    link, said, moved = await looked(hub, told)
    assert moved == [False, False] and link.address == hub.invite.address and not said
    await link.close()


def test_a_session_goes_on_where_the_coordinator_has_gone(
    hub: FakeHub, other: FakeHub, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.exchange.whereabouts.LOST_SECONDS", 0.05)
    exchange: HubExchange = make(SMALL)
    told = Told(other.invite.address)
    exchange._session.follow(Follower(exchange._link, told, CLAIM.run_digest, TIMING, lambda text: None))
    hub.die()
    assert other.joins.get(timeout=DEADLINE).run_digest == CLAIM.run_digest
    other.sessions.get(timeout=DEADLINE)
    assert exchange.address == other.invite.address
    other.open_round(0)
    assert exchange.next_order().round == 0  # type: ignore[union-attr]
    assert told.said[-1] == other.invite.address


async def test_a_node_without_a_session_yet_asks_nobody_at_once(hub: FakeHub) -> None:
    told = Told()
    link = Link(hub.invite, Meter(), LIMITS)
    follower = Follower(link, told, CLAIM.run_digest, TIMING, lambda text: None)
    assert not await asyncio.wait_for(follower.lost(), DEADLINE)
    assert not told.asked and not told.said
