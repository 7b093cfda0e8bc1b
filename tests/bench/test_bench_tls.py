"""The bench of TLS: its figures from made-up calls, which ways take turns, and a small real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from bench import tls
from bench.exchange_work import Call
from bench.report import Report
from bench.tls import NAMES, NODES, Measured

GIGABYTE = 10**9


def voted(cpu: float, late: float = 0.0) -> list[Call]:
    """A round of half a second, or longer, in which each node moves a gigabyte."""
    calls = [Call(1.0, 1.4, 0, GIGABYTE // 4, 3 * GIGABYTE // 4, cpu=cpu)] * (NODES - 1)
    return [*calls, Call(1.1, 1.5 + late, 0, GIGABYTE // 4, 3 * GIGABYTE // 4, cpu=cpu)]


def measured(**cpu: float) -> dict[str, Measured]:
    """Two rounds like each other and one that was held up."""
    found = {}
    for name in NAMES:
        spent = cpu.get(name.replace("-", "_"), 1.0)
        calls = [voted(spent), voted(9.0, late=9.0), voted(spent)]
        found[name] = Measured(calls, [spent / 2, 9.0, spent / 2])
    return found


def test_figures_are_medians_of_a_node_and_of_the_coordinator() -> None:
    report = tls.fill(Report("tls"), 50_000_000, measured(hub_tls=1.5, direct=2.0, direct_tls=2.5))
    assert list(report.figures)[:2] == [
        "hub_cpu_with_over_without",
        "hub_coordinator_cpu_with_over_without",
    ]
    assert report.figures == pytest.approx(
        {
            "hub_cpu_with_over_without": 1.5,
            "hub_coordinator_cpu_with_over_without": 1.5,
            "hub_added_cpu_seconds_a_gigabyte": 0.5,
            "direct_cpu_with_over_without": 1.25,
            "direct_added_cpu_seconds_a_gigabyte": 0.5,
            "hub_cpu_seconds": 1.0,
            "hub_coordinator_cpu_seconds": 0.5,
            "hub_tls_cpu_seconds": 1.5,
            "hub_tls_coordinator_cpu_seconds": 0.75,
            "direct_cpu_seconds": 2.0,
            "direct_coordinator_cpu_seconds": 1.0,
            "direct_tls_cpu_seconds": 2.5,
            "direct_tls_coordinator_cpu_seconds": 1.25,
        }
    )
    (table,) = report.tables
    assert [row[0] for row in table.rows] == list(NAMES) and "50 M" in table.title
    assert [row[1] for row in table.rows] == pytest.approx([0.5] * len(NAMES))


def test_less_with_tls_than_without_is_noise_and_no_gain() -> None:
    report = tls.fill(Report("tls"), 8_000_000, measured(hub_tls=0.9))
    assert report.figures["hub_added_cpu_seconds_a_gigabyte"] == 0.0


def test_a_coordinator_whose_cpu_is_too_little_to_measure_has_no_ratio() -> None:
    idle = {name: Measured(one.calls, [0.0] * 3) for name, one in measured().items()}
    figures = tls.fill(Report("tls"), 8_000_000, idle).figures
    assert "hub_coordinator_cpu_with_over_without" not in figures
    assert figures["hub_tls_coordinator_cpu_seconds"] == 0.0


class Told:
    """Ranks and coordinators that only keep a record of what they are told."""

    alive = True

    def __init__(self) -> None:
        self.led: list[tuple[str, bool]] = []
        self.done: list[tuple[str, str]] = []

    @contextmanager
    def started(self, context: object, lead: partial[None], carried: str, *rest: object) -> Iterator[Any]:
        self.led.append((carried, lead.keywords["secure"]))
        yield f"invite {len(self.led)}", len(self.led)

    def run(self, work: Callable[..., object], ranks: int, name: str = "", *rest: object) -> list[Call]:
        self.done.append((work.__name__, name))
        return voted(float(len(self.done)))


def test_ways_take_turns_and_warm_rounds_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()

    @contextmanager
    def world(*arguments: object) -> Iterator[Told]:
        yield told

    monkeypatch.setattr(tls, "world", world)
    monkeypatch.setattr(tls, "started", told.started)
    monkeypatch.setattr(tls, "cpu_seconds", lambda pid: 10.0 * pid + len(told.done) * pid)
    found = tls.measure(1 << 16, 2)
    assert told.led == [("hub", False), ("hub", True), ("direct", False), ("direct", True)]
    votes = [("vote", name) for name in NAMES] * (tls.WARM + 2)
    assert told.done == [*(("join", name) for name in NAMES), *votes, ("leave", "")]
    first = len(NAMES) * (1 + tls.WARM)  # the calls of joining and of the warm rounds
    for place, name in enumerate(NAMES, 1):
        assert [calls[0].cpu for calls in found[name].calls] == [first + place, first + place + len(NAMES)]
        assert found[name].coordinator == [place, place], "of its own coordinator, while it voted"


@pytest.mark.slow
def test_a_small_vote_carries_as_many_bytes_with_tls_as_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "NODES", 2)
    monkeypatch.setattr(tls, "WARM", 1)
    parameters = 1 << 22
    found = tls.measure(parameters, 2)
    assert {name: len(one.calls) for name, one in found.items()} == dict.fromkeys(NAMES, 2)
    for carried in tls.TRANSPORTS:
        assert found[f"{carried}-tls"].nbytes == pytest.approx(found[carried].nbytes, rel=1e-3)
        assert found[carried].nbytes >= 2 * parameters / 8, "a vote up, a result down, each of one bit"
    report = tls.fill(Report("tls"), parameters, found)
    assert report.figures["hub_cpu_with_over_without"] > 0
