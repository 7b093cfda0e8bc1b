"""What Prometheus sees."""

from __future__ import annotations

import math
import socket
import urllib.request

import numpy as np
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from coordinator.history import margin
from coordinator.hub import Hub
from coordinator.metrics import Metrics, MetricsError, MetricsServer
from coordinator.run import Run
from optim.bits import tally
from protos.address import Address
from tests.coordinator.contribution_rig import random_payload, schedule, voted_table
from tests.coordinator.coordinator_rig import FakeNode, InlinePool, Site, VirtualTimer, make_plan

LOOPBACK = Address("127.0.0.1", 0)


def scrape(address: Address) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def bytes_of(peer: str, direction: str, kind: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    labels = {"node": "coordinator", "peer": peer, "direction": direction, "kind": kind}
    return "atoll_link_bytes_total", tuple(sorted(labels.items()))


async def test_a_run_in_figures() -> None:
    timer, table = VirtualTimer(), voted_table()
    hub = Hub(Run(make_plan(nodes=2, rounds=3), schedule(table), timer=timer, pool=InlinePool(), tally=tally))
    metrics = MetricsServer(Metrics(hub), LOOPBACK)
    try:
        before = scrape(metrics.address)
        assert before["atoll_phase", (("phase", "gathering"),)] == 1
        assert before["atoll_rounds_committed_total", ()] == 0
        nodes = [FakeNode(hub, name=f"host-{i}") for i in range(2)]
        orders = [await node.opened() for node in nodes]
        timer.advance(2.0)
        nodes[0].send(orders[0], random_payload(0, table))
        timer.advance(0.5)
        nodes[1].send(orders[1], random_payload(1, table))
        first = scrape(metrics.address)
        agreement = first["atoll_vote_agreement_ratio", ()]
        nodes[0].report(0, "a", loss=3.0, evaluated=True, validation_loss=2.5, bits_per_byte=3.6)
        nodes[1].report(0, "b", loss=1.0)
        nodes[0].feed(b"garbage")  # node-1 is out: this ends round 1 without a contribution
        hub.received(6, "contribution", "node-0")
        hub.sent(3)
        found = scrape(metrics.address)
    finally:
        metrics.close()
    both = (("name", "host-0"), ("node", "node-0"))
    expected = {
        ("atoll_rounds_committed_total", ()): 2,
        ("atoll_rounds_planned", ()): 3,
        ("atoll_members", ()): 1,
        ("atoll_roster_epoch", ()): 2,
        ("atoll_phase", (("phase", "training"),)): 1,
        ("atoll_phase", (("phase", "gathering"),)): 0,
        ("atoll_loss_nats", ()): 2.0,
        ("atoll_validation_loss_nats", ()): 2.5,
        ("atoll_validation_bits_per_byte", ()): 3.6,
        ("atoll_digest_mismatches_total", ()): 1,
        ("atoll_refusals_total", (("kind", "bad-frame"),)): 1,
        ("atoll_samples_trained_total", ()): 8,
        bytes_of("node-0", "received", "vote"): 11,
        bytes_of("others", "sent", "control"): 8,
        ("atoll_round_voters", ()): 0,
        ("atoll_nodes", (("state", "joining"),)): 1,
        ("atoll_members_reachable", (("way", "hub"),)): 1,
        ("atoll_member_loss_nats", both): 3.0,
        ("atoll_member_weight", both): 1,
        ("atoll_round_duration_seconds_sum", ()): 2.5,
        ("atoll_round_duration_seconds_count", ()): 2,
        ("atoll_round_closing_seconds_sum", ()): 0.5,
    }
    assert {key: found[key] for key in expected} == pytest.approx(expected)
    assert first["atoll_vote_margin_ratio", ()] == pytest.approx(2 * agreement - 1)
    assert first["atoll_fp32_allreduce_bytes_total", ()] == 2 * 2 * table.elements * 4
    assert agreement == pytest.approx(hub.status().curve[0].agreement) and 0.5 <= agreement <= 1.0
    assert 0.5 <= found["atoll_member_vote_agreement_ratio", both] <= 1.0
    assert found["atoll_member_ranks", both] == 1


async def test_nothing_enters_the_global_registry_and_the_port_is_freed() -> None:
    before = {family.name for family in REGISTRY.collect()}
    hub = Hub(Run(make_plan(), schedule(voted_table()), timer=VirtualTimer(), pool=InlinePool(), tally=tally))
    server = MetricsServer(Metrics(hub), LOOPBACK)
    assert server.address.port
    assert {family.name for family in REGISTRY.collect()} == before
    server.close()
    with socket.socket() as probe:
        probe.bind((server.address.host, server.address.port))


async def test_a_busy_port_is_named() -> None:
    hub = Hub(Run(make_plan(), schedule(voted_table()), timer=VirtualTimer(), pool=InlinePool(), tally=tally))
    server = MetricsServer(Metrics(hub), LOOPBACK)
    try:
        with pytest.raises(MetricsError, match=f"{server.address}: the port is in use; choose another"):
            MetricsServer(Metrics(hub), server.address)
    finally:
        server.close()


async def test_a_restarted_and_a_suspended_coordinator_in_figures() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    site.restart()
    server = MetricsServer(Metrics(site.hub), LOOPBACK)
    try:
        found = scrape(server.address)
        assert found["atoll_phase", (("phase", "gathering"),)] == 1
        assert (
            found["atoll_rounds_committed_total", ()] == 1 and found["atoll_samples_trained_total", ()] == 8
        )
        site.hub.suspend("SIGTERM")
        assert scrape(server.address)["atoll_phase", (("phase", "suspended"),)] == 1
    finally:
        server.close()


@pytest.mark.parametrize("weights", [[1], [1, 1], [1, 1, 1], [3, 1, 1], [2, 1, 1], [5, 4, 3, 2, 1]])
def test_the_margin_of_votes_follows_from_their_agreement_with_the_result(weights: list[int]) -> None:
    random = np.random.default_rng(len(weights))
    votes = [random.integers(0, 256, 64, np.uint8) for _ in weights]
    result = np.unpackbits(tally(votes, weights, casting=0))
    signs = np.array([2 * np.unpackbits(vote).astype(int) - 1 for vote in votes])
    by_definition = np.abs(np.array(weights) @ signs).mean() / sum(weights)
    agreements = [float((np.unpackbits(vote) == result).mean()) for vote in votes]
    assert margin(agreements, weights) == pytest.approx(by_definition)
    assert math.isnan(margin([], [])) and math.isnan(margin([math.nan], [1]))


async def test_bytes_that_nodes_report_are_added_up_but_for_what_came_before() -> None:
    site = Site(nodes=2, rounds=9)
    await site.play()
    nodes = site.nodes
    for node, nbytes in zip(nodes, (100, 300), strict=True):
        node.report(0, "state-1", bytes_up=nbytes, bytes_down=nbytes)
    assert site.hub.run.moved_bytes == 800
    nodes[0].report(0, "state-1", bytes_up=150, bytes_down=100)
    nodes[1].report(0, "state-1", bytes_up=10, bytes_down=10)  # begun anew
    assert site.hub.run.moved_bytes == 850
    server = MetricsServer(Metrics(site.hub), LOOPBACK)
    try:
        labels = (("direction", "sent"), ("name", nodes[0].node.name), ("node", "node-0"))
        assert scrape(server.address)["atoll_member_bytes_total", labels] == 150
    finally:
        server.close()
