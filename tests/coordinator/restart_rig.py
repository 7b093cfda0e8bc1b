"""Nodes that come back with what they have in hand: to a round, or to the coordinator after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.exchange import Exchange
from protos import atoll_pb2 as pb
from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import FakeNode, Site


def payload(site: Site, node: int, round_index: int) -> bytes:
    return random_payload(100 * round_index + node, site.table)


def send_all(site: Site, orders: Sequence[pb.RoundOpen]) -> list[Exchange]:
    """Every node delivers what it has for the round of its order."""
    return [
        node.send(order, payload(site, i, order.round))
        for i, (node, order) in enumerate(zip(site.nodes, orders, strict=True))
    ]


def work(order: pb.RoundOpen | None) -> dict[str, Any]:
    """What a node that was given this order has in hand."""
    if order is None:
        return {}
    return {
        "lease_round": order.round,
        "lease_start": order.lease_start,
        "lease_count": order.lease_count,
        "samples": order.frontier,
    }


async def back(site: Site, lost: Sequence[FakeNode], claims: Sequence[dict[str, Any]]) -> list[pb.RoundOpen]:
    """All nodes join again, the last one first."""
    found = [
        node.again(site.hub, **claim) for node, claim in zip(reversed(lost), reversed(claims), strict=True)
    ]
    site.nodes = found[::-1]
    assert [node.id for node in site.nodes] == [node.id for node in lost]
    return await site.opened()


def lease_of(order: pb.RoundOpen | None) -> tuple[int, int]:
    assert order is not None
    return order.lease_start, order.lease_count
