"""The exchange over TLS: a whole round, the lanes of an island, and a coordinator that has moved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from node.exchange.base import RoundOrder
from node.exchange.hub import HubExchange
from node.exchange.link import Link
from node.exchange.meter import Meter
from node.exchange.trouble import Kind, Trouble
from node.exchange.whereabouts import LOST_SECONDS, Follower
from protos import atoll_pb2 as pb
from protos import wire
from protos.certificate import made
from tests.node.fake_hub import DEADLINE, ExchangeStream, FakeHub
from tests.node.hub_rig import CLAIM, LIMITS, SMALL, TIMING, FakeClock, tables
from tests.node.test_whereabouts import Told

OURS = made()
RUN = pb.GetRunReply(protocol=wire.PROTOCOL, run_file="x", run_digest=CLAIM.run_digest)


async def test_a_coordinator_that_has_moved_still_shows_its_certificate() -> None:
    hubs = [FakeHub(run=RUN, credential=credential).start() for credential in (OURS, made(), None, OURS)]
    home, other, open_, there = hubs
    try:
        clock, said = FakeClock(), list[str]()
        link = Link(home.invite, Meter(), LIMITS)
        link.open()
        assert (await link.get_run()).run_digest == CLAIM.run_digest
        told = Told(other.invite.address, open_.invite.address)
        follower = Follower(link, told, CLAIM.run_digest, clock.timing(), said.append)
        follower.reached()
        home.die()
        assert not await follower.lost()
        clock.time += LOST_SECONDS
        assert not await follower.lost(), "the same run, the same token, another certificate"
        told.addresses = (other.invite.address, open_.invite.address, there.invite.address)
        assert await follower.lost() and link.address == there.invite.address
        assert (await link.get_run()).run_digest == CLAIM.run_digest
        await link.close()
    finally:
        for hub in hubs:
            hub.close()


def test_a_round_over_tls() -> None:
    async def exchange(stream: ExchangeStream) -> None:
        upload = await stream.upload()
        await stream.chunks(upload.payload)
        await stream.commit(upload.header.round, upload.payload)

    hub = FakeHub(run=RUN, credential=OURS, exchange=exchange).start()
    node = HubExchange(hub.invite, limits=LIMITS, timing=TIMING)
    try:
        assert node.describe().run_digest == CLAIM.run_digest
        node.join(CLAIM, tables(SMALL))
        hub.sessions.get(timeout=DEADLINE)
        hub.open_round(0)
        order = node.next_order()
        assert isinstance(order, RoundOrder)
        payload = torch.arange(SMALL, dtype=torch.uint8)
        result = node.reduce(order, payload)
        assert result.payload is not None and torch.equal(result.payload, payload)
    finally:
        node.close("done")
        hub.close()


@pytest.mark.parametrize("pin", ["", made().pin], ids=["insecure", "pinned"])
def test_what_is_not_as_the_invite_says_is_not_waited_for(pin: str) -> None:
    hub, said = FakeHub(run=RUN, credential=OURS).start(), list[str]()
    node = HubExchange(replace(hub.invite, pin=pin), limits=LIMITS, timing=TIMING, say=said.append)
    try:
        with pytest.raises(Trouble) as caught:
            node.describe()
        assert caught.value.kind is (Kind.CERTIFICATE if pin else Kind.ENCRYPTED) and not said
    finally:
        node.close("done")
        hub.close()
