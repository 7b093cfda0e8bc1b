"""What the tests of newcomers share: a state to load, rounds without them, and results that are gone."""

from __future__ import annotations

from collections.abc import Sequence

from tests.coordinator.contribution_rig import random_payload
from tests.coordinator.coordinator_rig import FakeNode, Site
from tests.coordinator.state_rig import SharedState

STATE = SharedState.of(7)


async def commit(site: Site, nodes: Sequence[FakeNode], digest: str) -> None:
    """One round of ``nodes``, whose state has ``digest`` after it."""
    orders = [await node.opened() for node in nodes]
    for node, order in zip(nodes, orders, strict=True):
        node.send(order, random_payload(order.round, site.table))
    for node, order in zip(nodes, orders, strict=True):
        node.report(order.round, digest)


def forget(site: Site, before: int) -> None:
    """The journal and the ring have dropped the results of the first rounds."""
    for index in range(before):
        site.journal.rounds.pop(index, None)
        site.run.results._kept.pop(index, None)
