"""Snapshots of runs that are played without a network."""

from __future__ import annotations

import pytest

from coordinator.dashboard.recorder import Recorder
from coordinator.dashboard.snapshot import COORDINATOR, Camera, Rates
from coordinator.events import ignore
from deploy.event_words import sentence
from protos import atoll_pb2 as pb
from tests.coordinator.coordinator_rig import Site


def watched(site: Site) -> Camera:
    recorder = Recorder(sentence, ignore, now=site.timer.now, wall=lambda: 0.0)
    camera = Camera(site.hub, recorder)
    site.run.tell = recorder
    return camera


async def test_a_run_as_it_is() -> None:
    site = Site(nodes=2, rounds=9)
    camera = watched(site)
    for seed in range(3):
        await site.play(seed=seed)
        site.timer.advance(2.0)
    orders = await site.opened()
    site.nodes[0].send(orders[0], bytes(site.table.nbytes))
    view = camera.take()
    assert (view.phase, view.round, view.rounds, view.members, view.present) == ("training", 3, 9, 2, 2)
    assert view.loss == 2.0 and view.agreement == pytest.approx(site.run.history.agreement)
    assert (view.payload_bytes, view.result_bytes, view.parameters) == (128, 128, 1024)
    first, second = view.nodes
    assert (first.seat, second.seat) == ("complete", "expected")
    assert (first.trained, first.lag, first.loss, first.host) == (3, 0, 2.0, "127.0.0.1:1")
    assert [(link.source, link.target, link.way) for link in view.links] == [
        ("node-0", COORDINATOR, "coordinator"),
        ("node-1", COORDINATOR, "coordinator"),
    ]
    assert [point.round for point in view.curve] == [0, 1, 2]
    assert [r.round for r in view.timeline] == [0, 1, 2] and view.pace == pytest.approx(2.0)
    assert view.events[0].text.startswith("round 4 opens")


async def test_rates_are_those_of_the_counters() -> None:
    site = Site(nodes=2, rounds=9)
    camera = watched(site)
    camera.take()
    site.timer.advance(2.0)
    site.nodes[1].node.bytes_in += 4000
    site.hub.bytes_out += 1000
    view = camera.take()
    assert (view.nodes[0].rate_up, view.nodes[1].rate_up, view.rate_out) == (0.0, 2000.0, 500.0)
    assert view.links[1].rate_up == 2000.0


async def test_a_pause_an_expulsion_and_who_has_left() -> None:
    site = Site(nodes=3, rounds=9)
    camera = watched(site)
    await site.play()
    site.run.administration.expel("node-2", "why")
    site.run.administration.pause("night")
    assert [node.state for node in camera.take().nodes] == ["active", "active", "leaving"]
    site.nodes[2].leave()
    view = camera.take()
    assert view.paused == "night" and view.expelled == (("node-2", "host", "why"),)
    assert [(node.node, node.state, node.lag) for node in view.nodes][-1] == ("node-2", "left", None)
    assert [link.source for link in view.links] == ["node-0", "node-1"]
    assert {event.category for event in view.events} >= {"admin", "nodes", "rounds"}


async def test_links_between_nodes_follow_the_slices() -> None:
    site = Site(nodes=3, rounds=9, transport="direct", present=0)
    camera = watched(site)
    for index in range(3):
        endpoint = pb.Endpoint(direct=f"192.0.2.{index}:5000", uplink=1e6, downlink=1e6)
        site.add(name=f"host-{index}", endpoint=endpoint)
    view = camera.take()
    assert view.transport == "direct" and view.ways
    shares = {node.node: node.reduces for node in view.nodes}
    assert sum(shares.values()) == pytest.approx(1.0) and len([s for s in shares.values() if s]) > 1
    assert {node.way for node in view.nodes} == {"direct"}
    between = {(link.source, link.target) for link in view.links if link.target != COORDINATOR}
    reducers = [node for node, share in shares.items() if share]
    assert between == {(m, r) for r in reducers for m in shares if m != r}


def test_rates_over_a_window() -> None:
    rates = Rates(seconds=4.0)
    assert rates.take(0.0, {"a": 100}) == {"a": 0.0}
    assert rates.take(0.0, {"a": 100}) == {"a": 0.0}
    assert rates.take(2.0, {"a": 300, "b": 7}) == {"a": 100.0, "b": 0.0}
    for second in range(3, 9):
        found = rates.take(float(second), {"a": 300})
    assert found == {"a": 0.0}, "what is older than the window counts no more"
    assert rates.take(9.0, {"a": 50}) == {"a": 0.0}, "a counter that began anew"
    rates.take(1000.0, {"a": 60})
    assert rates.take(1001.0, {"a": 70}) == {"a": 10.0}, "nobody looked in between"
