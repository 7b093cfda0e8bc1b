"""Links that are measured before a run: again, if one seems to be off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from deploy.links.shape import Shape
from deploy.testbed import probing
from deploy.testbed.layout import layout
from deploy.testbed.network import Network
from deploy.testbed.probe import ALIKE, Rtt

RATE = 10**8
SHAPE = Shape(rate=RATE, delay=0.04)


class FakeNetwork:
    """Has places, and takes shapes."""

    def __init__(self) -> None:
        self.layout = layout(2, SHAPE)

    def place(self, name: str) -> str:
        return name

    def shape(self, *, lossless: bool = False) -> None:
        pass


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """How many transfers of a link are still to be held up."""
    held: dict[str, int] = {}

    def rate(near: str, far: str, address: str, *, up: bool, delay: float, windows: int) -> float:
        if windows == ALIKE:
            return 1e10
        if up and held.get(far, 0):
            held[far] -= 1
            return RATE / 4
        return RATE

    def round_trips(near: str, far: str, address: str, *, lossy: bool) -> Rtt:
        return Rtt(0.08, 0.08, 20, 20)

    monkeypatch.setattr(probing, "rate", rate)
    monkeypatch.setattr(probing, "round_trips", round_trips)
    yield held


def probed() -> tuple[probing.Probes, list[str]]:
    said: list[str] = []
    return probing.probe_links(cast(Network, cast(Any, FakeNetwork())), said.append), said


def test_links_that_are_right_are_measured_once(slow: dict[str, int]) -> None:
    probes, said = probed()
    assert not probes.problems and sorted(probes.readings) == ["site-a", "site-b"]
    assert said[-1] == "measuring site-a, site-b"


def test_a_transfer_that_was_held_up_is_measured_again(slow: dict[str, int]) -> None:
    slow["site-b"] = 1
    probes, said = probed()
    assert not probes.problems and probes.readings["site-b"].up == RATE
    assert said[-1] == "measuring site-b again: not yet what was asked for"


def test_a_link_that_stays_off_is_refused(slow: dict[str, int]) -> None:
    slow["site-b"] = 1000
    probes, said = probed()
    (problem,) = probes.problems
    assert problem == "site-b up: asked for 100 Mbit/s, measured 25 Mbit/s"
    assert len([text for text in said if "again" in text]) == probing.ATTEMPTS - 1


def test_without_a_shape_there_is_nothing_to_measure(slow: dict[str, int]) -> None:
    network = FakeNetwork()
    network.layout = layout(2, Shape())
    probes = probing.probe_links(cast(Network, cast(Any, network)), lambda text: None)
    assert probes.machine == 1e10 and not probes.readings
