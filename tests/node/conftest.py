"""Fixtures of the tests of a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from node.exchange.hub import HubExchange
from tests.node.fake_hub import DEADLINE, FakeHub
from tests.node.hub_rig import CLAIM, LIMITS, SMALL, TIMING, Make, tables

if TYPE_CHECKING:
    from tests.node.fleet import Fleet


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """A coordinator that listens and follows a script."""
    fake = FakeHub().start()
    yield fake
    fake.close()


@pytest.fixture
def make(hub: FakeHub) -> Iterator[Make]:
    """Makes exchanges that have joined ``hub``; they are closed at the end."""
    made: list[HubExchange] = []

    def build(nbytes: int = SMALL, **options: Any) -> HubExchange:
        exchange = HubExchange(hub.invite, limits=LIMITS, timing=options.pop("timing", TIMING), **options)
        made.append(exchange)
        exchange.join(CLAIM, tables(nbytes))
        hub.sessions.get(timeout=DEADLINE)
        return exchange

    yield build
    for exchange in made:
        exchange.close("test over")


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Starts coordinators and nodes, and ends them all."""
    from tests.node.fleet import Fleet  # and with it all of the coordinator, which few tests here need

    made = Fleet()
    yield made
    made.close()
