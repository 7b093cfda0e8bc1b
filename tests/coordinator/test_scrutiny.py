"""False nodes in a run: they are named in metrics and events, weighed less, or expelled."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from coordinator.admission import MAX_WEIGHT
from coordinator.events import NodeExpelled, NodeSuspected
from coordinator.member import Member
from coordinator.metrics import Metrics
from coordinator.open_round import OpenRound
from coordinator.result import Result
from coordinator.rounds import State
from coordinator.suspicion import LEAST_ROUNDS, PENALTY, Thresholds
from protos.refusal import Refused
from tests.coordinator.contribution_rig import voted_table
from tests.coordinator.coordinator_rig import FakeNode, Site

TABLE = voted_table(32)
ROUNDS = LEAST_ROUNDS + 1


def honest(voters: int, seed: int) -> list[bytes]:
    rng = np.random.default_rng(seed)
    bits = TABLE.nbytes * 8
    truth = rng.random(bits) < 0.5
    return [np.packbits(truth ^ (rng.random(bits) >= 0.7)).tobytes() for _ in range(voters)]


def opposite(payload: bytes) -> bytes:
    return (~np.frombuffer(payload, np.uint8)).tobytes()


async def play(site: Site, nodes: Sequence[FakeNode], payloads: Sequence[bytes | None]) -> None:
    """One round; ``None`` abstains."""
    for node, payload in zip(nodes, payloads, strict=True):
        order = await node.opened()
        if payload is None:
            node.abstain(order)
        else:
            node.send(order, payload)
    for node in nodes:
        node.report(site.run.round - 1, f"state-{site.run.round}")


def metric(site: Site, name: str, **labels: str) -> dict[str, float]:
    """Values by node."""
    registry = Metrics(site.hub).registry
    return {
        sample.labels["node"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    }


async def test_three_of_eight_are_named_and_no_honest_node_is() -> None:
    site = Site(8, table=TABLE, rounds=64)
    old = honest(8, 99)[7]
    for index in range(ROUNDS):
        payloads: list[bytes | None] = [*honest(8, index)]
        payloads[2] = opposite(payloads[2] or b"")
        payloads[5] = None
        payloads[7] = old
        await play(site, site.nodes, payloads)
    suspected = metric(site, "atoll_member_suspected")
    assert [node for node, value in suspected.items() if value] == ["node-2", "node-5", "node-7"]
    disagrees = metric(site, "atoll_member_suspicion_ratio", cause="disagrees")
    assert disagrees["node-2"] == pytest.approx(2.0, abs=0.2) and disagrees["node-0"] < 0.2
    assert metric(site, "atoll_member_suspicion_ratio", cause="replays")["node-7"] == pytest.approx(
        1, abs=0.2
    )
    told = {event.node: event for event in site.told(NodeSuspected)}
    assert {node: event.cause for node, event in told.items()} == {
        "node-2": "disagrees",
        "node-5": "abstains",
        "node-7": "replays",
    }
    assert all(event.action == "warn" for event in told.values()) and not site.told(NodeExpelled)


async def test_a_false_node_counts_less_and_is_expelled() -> None:
    site = Site(4, table=TABLE, rounds=64, thresholds=Thresholds(downweight=0.8))
    for index in range(ROUNDS):
        payloads = honest(4, index)
        await play(site, site.nodes, [*payloads[:3], opposite(payloads[3])])
    active = site.run.active
    assert active is not None
    assert [member.penalty for member in active.members.values()] == [1, 1, 1, PENALTY]
    payloads = honest(4, 50)
    await play(site, site.nodes, [*payloads[:3], opposite(payloads[3])])
    result = site.run.results.get(site.run.round - 1)
    assert result is not None and list(result.facts.weights) == [PENALTY] * 3 + [1]

    site = Site(4, table=TABLE, rounds=64, thresholds=Thresholds(expel=1.5))
    for index in range(LEAST_ROUNDS):
        payloads = honest(4, index)
        await play(site, site.nodes, [*payloads[:3], opposite(payloads[3])])
    [expelled] = site.told(NodeExpelled)
    assert expelled.node == "node-3" and "[byzantine] expel" in expelled.reason
    assert site.run.registry.roster.members == ("node-0", "node-1", "node-2")
    with pytest.raises(Refused, match="was expelled"):
        site.nodes[3].again()
    await play(site, site.nodes[:3], honest(3, 60))
    assert site.run.round == LEAST_ROUNDS + 1


async def test_contributions_that_are_refused_name_their_sender() -> None:
    """As of a node that claims another weight than it has joined with."""
    site = Site(4, table=TABLE, rounds=64)
    for index in range(LEAST_ROUNDS):
        payloads = honest(4, index)
        for node, payload in zip(site.nodes, payloads, strict=True):
            order = await node.opened()
            exchange = node.send(order, payload, weight=MAX_WEIGHT if node is site.nodes[1] else 1)
            if node is site.nodes[1]:
                assert exchange.refusal is not None
        for node in site.nodes:
            node.report(index, f"state-{index + 1}")
    assert [(event.node, event.cause) for event in site.told(NodeSuspected)] == [("node-1", "invalid")]


def test_where_votes_go_between_nodes_their_agreement_tells() -> None:
    """Of a round of slices the coordinator knows no more than what the reducers have counted."""
    site = Site(4, table=TABLE, rounds=64)
    names = [node.id for node in site.nodes]
    for index in range(LEAST_ROUNDS):
        made = Result(index, 1)
        agreement = dict(zip(names, (0.85, 0.84, 0.86, 0.4), strict=True))
        made.settle(names, [1] * 4, casting=0, nbytes=1, digest="", reason="", agreement=agreement, slices=[])
        members = {name: Member(name, 1, np.empty(0, np.uint8), State.COMPLETE) for name in names}
        active = SimpleNamespace(round=index, result=made, members=members)
        site.run.scrutiny.committed(cast(OpenRound, active))
    assert [(event.node, event.cause) for event in site.told(NodeSuspected)] == [("node-3", "disagrees")]


def test_no_node_joins_with_a_weight_above_the_run_file_s() -> None:
    site = Site(3, present=0, max_weight=4)
    site.add(weight=4)
    with pytest.raises(Refused, match=r"1 to 4, not 5: .* \[byzantine\] max_weight"):
        site.add(weight=5)
