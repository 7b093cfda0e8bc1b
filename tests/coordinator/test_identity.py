"""Nodes and their keys at the hub: one live session a key, rejoining, and tokens that end."""

from __future__ import annotations

import pytest

from coordinator.events import NodeJoined, NodeLeft
from coordinator.nodes import Node, Outbox, session_secret
from coordinator.registry import Registry
from coordinator.start import Claim
from protos.atoll_pb2 import GetRunRequest
from protos.identity import NodeKey, fingerprint
from protos.refusal import EXPELLED, KEY_IN_USE, OLD_VERSION, Refused
from protos.wire import PROTOCOL
from tests.coordinator.coordinator_rig import FakeNode, Site, join_request

KEY, OTHER = NodeKey(bytes(32)).public, NodeKey(bytes(range(32))).public


def refused(site: Site, **claim: object) -> str:
    with pytest.raises(Refused) as caught:
        FakeNode(site.hub, **claim)
    return caught.value.kind


async def test_a_key_is_in_one_session_at_a_time() -> None:
    site = Site(nodes=3)
    node, other = site.add(key=KEY), site.add(key=OTHER)
    assert site.told(NodeJoined)[-1].key == fingerprint(OTHER)
    assert refused(site, key=KEY) == KEY_IN_USE
    assert refused(site, key=KEY, former=other.reply.session) == KEY_IN_USE, "another node's secret"
    assert site.run.counters[KEY_IN_USE] == 2 and len(site.run.registry.nodes) == 5
    back = node.again(key=KEY)
    assert back.id == node.id, "who can tell the secret of the session takes it over"
    back.leave()
    assert site.add(key=KEY).id != node.id


async def test_a_stolen_secret_is_of_no_use_without_the_key() -> None:
    site = Site(nodes=2)
    node = site.add(key=KEY)
    thief = FakeNode(site.hub, key=OTHER, former=node.reply.session)
    assert thief.id != node.id and node.node.in_session
    nobody = FakeNode(site.hub, former=node.reply.session)
    assert nobody.id not in (node.id, thief.id)


async def test_a_join_without_a_session_does_not_hold_the_key() -> None:
    site = Site(nodes=3)
    lost = site.hub.join(join_request(site.hub.tables, key=KEY), "ipv4:127.0.0.1:1")
    node = site.add(key=KEY)
    assert node.id != lost.node and site.told(NodeLeft)[-1].reason == "its key has joined again"
    with pytest.raises(Refused):
        site.hub.node_of(lost.session)


def test_a_restarted_coordinator_knows_nodes_by_secret_and_key() -> None:
    registry, secret = Registry(), session_secret()
    claim = Claim("node-0", 0, "digest", 0, None)
    node = Node("node-0", "one", "ipv4:127.0.0.1:1", secret, 1, claim, 0.0, key=KEY, outbox=Outbox())
    registry.nodes["node-0"] = node
    registry.renew([(node, 0)])
    assert registry.former(secret, KEY) == "node-0" and registry.former(secret, OTHER) is None
    restarted = Registry()
    restarted.restore(registry.record())
    assert restarted.former(session_secret(secret), KEY) == "node-0", "of a later session, too"
    assert restarted.former(secret, OTHER) is None and restarted.former(secret) is None


async def test_an_expelled_key_is_known_again() -> None:
    site = Site(nodes=2)
    node = site.add(key=KEY, name="one")
    site.run.administration.expel(node.id, "why", by="root")
    node.leave()
    assert refused(site, key=KEY, name="another name") == EXPELLED
    site.add(key=OTHER, name="another name")


async def test_sessions_end_with_their_tokens() -> None:
    site = Site(nodes=3, rounds=9)
    await site.play()
    orders = await site.opened()
    for node, token in zip(site.nodes, ("kept", "revoked", ""), strict=True):
        node.node.token = token
    for node, order in zip(site.nodes[::2], orders[::2], strict=True):
        node.send(order, bytes(site.table.nbytes))
    site.hub.revoked(lambda token: "its token was revoked" if token == "revoked" else "")
    (left,) = site.told(NodeLeft)
    assert (left.node, left.reason) == (site.nodes[1].id, "its token was revoked")
    assert site.run.round == 2, "the round is not kept waiting for it"
    with pytest.raises(Refused, match="has ended"):
        site.hub.node_of(site.nodes[1].reply.session)


async def test_versions_that_do_not_fit_are_told_who_has_to_upgrade() -> None:
    site = Site(nodes=1)
    node, coordinator = "node's", "coordinator's"
    for protocol, who, other in ((PROTOCOL - 1, node, coordinator), (PROTOCOL + 1, coordinator, node)):
        for call in (
            lambda protocol=protocol: site.hub.get_run(GetRunRequest(protocol=protocol)),
            lambda protocol=protocol: FakeNode(site.hub, protocol=protocol),
        ):
            with pytest.raises(
                Refused, match=rf"the {who} version of atoll is too old: install the {other} there"
            ) as caught:
                call()
            assert caught.value.kind == OLD_VERSION
