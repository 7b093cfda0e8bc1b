"""The bench of exchanges: its figures and bars from made-up calls, and a small real run on loopback."""

from __future__ import annotations

import argparse
import socket

import pytest
import torch.distributed

from bench import exchange, namespaces
from bench.exchange import BARE, GLOO, HIVEMIND, NODES, PLACES, THIN, Outcome, fill, link_bytes, node_bytes
from bench.exchange_work import Call
from bench.island_ranks import Member, world
from bench.namespaces import NamespacesUnavailable
from bench.report import Report

MEGA = 1_000_000
SLOW = PLACES[-1]
FLOORS = {"hub": 2.0, "direct": 0.75, "swarm": 0.75}  # seconds of 50 M votes behind 100 Mbit/s


def calls(seconds: float, data: float, control: int = 0) -> list[Call]:
    """A round in which the last node was ready and done half a second after the others."""
    half = round(data / 2)
    late = Call(0.5, seconds, round(data), half, half, control, cpu=0.5)
    return [Call(0.0, seconds - 0.5, round(data), half, half, control, cpu=0.1)] * (NODES - 1) + [late]


def outcome(place: exchange.Place = SLOW, **slower: float) -> Outcome:
    spans = {**{name: 1.2 * floor for name, floor in FLOORS.items()}, THIN: 0.95, HIVEMIND: 12.0, GLOO: 24.0}
    rounds = {}
    for name, seconds in spans.items():
        data = 2 * node_bytes(name, NODES, exchange.PARAMETERS)
        rounds[name] = [calls(seconds * slower.get(name, 1.0), data, 100)] * 3
    coordinators = {"hub": [0.1, 3.0, 9.0], "direct": [0.1] * 3, "swarm": [0.1] * 3}
    return Outcome(place, exchange.PARAMETERS, rounds, coordinators=coordinators)


def test_a_butterfly_moves_two_bits_a_parameter_and_a_hub_as_many_as_it_has_nodes() -> None:
    assert node_bytes("direct", 2, 8 * MEGA) == MEGA
    assert node_bytes("swarm", 8, 8 * MEGA) == 1.75 * MEGA
    assert node_bytes("hub", 8, 8 * MEGA) == MEGA
    assert link_bytes("hub", 8, 8 * MEGA) == 8 * MEGA
    assert {name: outcome().floor(name) for name in FLOORS} == FLOORS


def test_figures_are_of_the_slowest_node_and_hold_their_bars() -> None:
    report = Report("exchange")
    fill(report, [outcome()], bars=True)
    figures = report.figures
    assert figures["hub_over_floor_100m"] == pytest.approx(1.2)
    assert figures["hivemind_over_swarm_100m"] == pytest.approx(12.0 / 0.9)
    assert figures["gloo_over_direct_100m"] == pytest.approx(24.0 / 0.9)
    assert figures["direct_thin_coordinator_100m"] == pytest.approx(0.95 / 0.9)
    assert figures["bytes_over_formula_swarm_down_100m"] == pytest.approx(1.0)
    assert figures["direct_cpu_seconds_100m"] == pytest.approx(0.2)
    assert figures["hub_coordinator_cpu_seconds_100m"] == 3.0
    assert figures["direct_cpu_over_floor_100m"] == pytest.approx(0.2 / 0.75)
    assert figures["hub_cpu_over_floor_100m"] == pytest.approx(1.5)
    assert report.missed() == []
    slow = Report("exchange")
    fill(slow, [outcome(swarm=1.5)], bars=True)
    assert [text.split()[0] for text in slow.missed()] == [
        "hivemind_over_swarm_100m",
        "swarm_over_floor_100m",
    ]


def test_what_is_the_transports_stands_beside_what_is_ours() -> None:
    report, place = Report("exchange"), outcome()
    data = 2 * node_bytes("direct", NODES, exchange.PARAMETERS)
    bare = {name: [calls(0.9 / (index + 1.0), data)] * 3 for index, name in enumerate(BARE)}
    fill(
        report,
        [Outcome(SLOW, exchange.PARAMETERS, {**place.calls, **bare}, "", place.coordinators)],
        bars=True,
    )
    figures = report.figures
    assert figures["direct_bare_over_floor_100m"] == pytest.approx(1.2)
    assert figures["direct_over_bare_100m"] == pytest.approx(1.0)
    assert figures["swarm_bare_over_floor_100m"] == pytest.approx(0.6)
    assert figures["swarm_over_bare_100m"] == pytest.approx(2.0)
    assert figures["swarm_bare_cpu_seconds_100m"] == pytest.approx(0.2)
    assert not any("bare" in name for name in report.bars)


def congestion(member: Member) -> str:
    """What TCP goes by between two ranks, at this end of a connection."""
    with socket.create_server((namespaces.address(member.rank), 0)) as listener:
        ports = [0] * 2
        torch.distributed.all_gather_object(ports, listener.getsockname()[1], member.group)
        if member.rank:
            end = socket.create_connection((namespaces.address(0), ports[0]))
        else:
            end, _ = listener.accept()
        with end:
            return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


@pytest.mark.root
@pytest.mark.skipif(namespaces.why_not() is not None, reason=str(namespaces.why_not()))
def test_links_have_the_congestion_control_that_is_asked_for() -> None:
    with namespaces.linked(2, 100_000_000, "reno") as spaces, world(2, spaces) as ranks:
        assert ranks.run(congestion, 2) == ["reno", "reno"]


def test_loopback_has_no_floor_and_a_quick_run_no_bars() -> None:
    report = Report("exchange")
    fill(report, [outcome(PLACES[0])], bars=True)
    assert not any("over_floor" in name for name in report.figures)
    quick = Report("exchange")
    fill(quick, [outcome(swarm=9.0)], bars=False)
    assert not quick.bars


def test_places_without_namespaces_are_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(place: exchange.Place, contenders: object, parameters: int) -> Outcome:
        if place.rate is not None:
            raise NamespacesUnavailable("they need root")
        return outcome(place)

    monkeypatch.setattr(exchange, "measure", measure)
    report = exchange.run(quick=False)
    assert {name.rpartition("_")[2] for name in report.figures} == {"loopback"}
    assert sum("they need root" in note for note in report.notes) == sum(p.rate is not None for p in PLACES)


@pytest.mark.slow
def test_nodes_vote_by_hub_and_direct_and_count_the_formulas_bytes() -> None:
    options = argparse.Namespace(only=None, without=["hivemind", "swarm"])
    report = exchange.run(True, options)
    for name in ("hub", "direct"):
        assert report.figures[f"{name}_seconds_loopback"] > 0
        for way in ("up", "down"):
            assert report.figures[f"bytes_over_formula_{name}_{way}_loopback"] == pytest.approx(1, abs=0.01)
        assert 0 < report.figures[f"control_share_{name}_loopback"] < 0.01
    assert report.figures["gloo_over_direct_loopback"] > 0
