"""The links bench on measurements that are made up: its figures, its bars, and what it says without root."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest

from bench import links
from deploy.links.kernel import Kernel
from deploy.links.shape import OPEN, Shape


class Cable:
    """Measures what is set, ``off`` by a share, late by ``late`` seconds."""

    def __init__(self, off: float = 0.0, late: float = 0.0) -> None:
        self.off, self.late, self.set, self.free = off, late, OPEN, 40e9

    @contextlib.contextmanager
    def shape(self, name: str, out: Shape | None, into: Shape | None, **_: object) -> Iterator[None]:
        self.set = out or into or OPEN
        yield
        self.set = OPEN

    def rate(self, *_: object, **__: object) -> float:
        return self.free if self.set.rate is None else min(self.free, self.set.rate * (1 + self.off))

    def round_trips(self, *_: object, count: int, interval: float) -> list[float]:
        lost = round(count * self.set.loss * (1 + 10 * self.off))
        return [math.inf] * lost + [self.set.delay + self.late] * (count - lost)


@pytest.fixture
def cable(monkeypatch: pytest.MonkeyPatch) -> Cable:
    made_up = Cable()
    monkeypatch.setattr(links, "why_not", lambda: None)
    monkeypatch.setattr(links, "probe_apart", Kernel)
    monkeypatch.setattr(links, "_cable", lambda: contextlib.nullcontext(("here", "there")))
    for name in ("shape", "rate", "round_trips"):
        monkeypatch.setattr(links, name, getattr(made_up, name))
    return made_up


def test_links_as_asked_for_hold_all_bars(cable: Cable) -> None:
    report = links.run(quick=False)
    assert report.missed() == []
    assert report.figures["rate_in_10000mbit"] == 1 and report.figures["lost_10_percent"] == 0.1
    assert "rate_out_10000mbit" in report.bars


def test_a_rate_that_the_machine_hardly_does_has_no_bar(
    cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cable, "free", 8e9)
    report = links.run(quick=False)
    assert "rate_out_1000mbit" in report.bars and "rate_out_10000mbit" not in report.bars
    assert report.figures["rate_out_10000mbit"] == 0.8


def test_links_that_are_off_miss_their_bars(cable: Cable) -> None:
    cable.off, cable.late = 0.06, 0.003
    missed = {sentence.split(" is ")[0] for sentence in links.run(quick=False).missed()}
    assert {
        "rate_out_1mbit",
        "rate_in_1000mbit",
        "excess_ms_50ms",
        "rate_50ms_100mbit",
        "lost_10_percent",
    } <= missed


def test_a_kernel_without_ifb_and_delays_leaves_these_out(
    cable: Cable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "probe_apart", lambda: Kernel(netem="no", ifb="no", nfqueue="no"))
    report = links.run(quick=True)
    assert set(report.figures) == {
        "rate_out_10mbit",
        "rate_out_100mbit",
        "rate_out_1000mbit",
        "unshaped_gbit",
    }
    assert any("ifb" in note for note in report.notes)


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "why_not", lambda: "network namespaces need root")
    report = links.run(quick=True)
    assert report.figures == {} and report.notes == ["no figures: network namespaces need root"]
