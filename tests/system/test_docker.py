"""`docker compose up`, as a user starts it: metrics, bytes, killed sites and coordinators, no trace left.

`make test-docker` runs it; one bed serves all tests, which come in this order.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.links.measuring import rate
from tests.system.docker_bed import BUILD_SECONDS, SITES, DockerBed, Look, why_not

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(3600)]

ROUNDS = 30  # in which a loss falls by half a nat
SHARE = 0.03  # by which the node's count may differ from the kernel's, which has HTTP/2's frames as well
VOTERS = ("active", "lagging")  # on a busy machine one or the other is late all the time
DIRECTIONS = ("sent", "received")
MEASURED = 4_000_000  # bytes of a site in one direction that are compared


@pytest.fixture(scope="module")
def bed() -> Iterator[DockerBed]:
    if reason := why_not():
        pytest.skip(reason)
    bed = DockerBed(
        f"atoll-test-{os.getpid()}",
        ROUNDS="1000000",
        NODES="3",
        METHOD="sign-muon",
        LINK_RATE="200mbit",
        LINK_DELAY="2ms",
        HUB_RATE="1gbit",
        VOLUNTEER_RATE="100mbit",
        SETTINGS="model.d_model=256 model.heads=4 run.evaluate_every=0 method.schedule=constant",
        BATCH="2",
    )
    bridges: set[Path] = set()
    try:
        bed.compose("build", seconds=BUILD_SECONDS)
        bed.compose("up", "--detach")
        bridges = bed.bridges()
        assert len(bridges) == 6 and all(path.exists() for path in bridges)
        yield bed
    finally:
        bed.down()
    assert bed.left() == []
    assert not any(path.exists() for path in bridges)


def present(status: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The nodes that have not left."""
    return [entry for entry in (status or {}).get("nodes", ()) if entry["state"] != "left"]


def node(status: dict[str, Any] | None, name: str) -> dict[str, Any]:
    """A node's entry; empty without one."""
    return next((entry for entry in present(status) if entry["name"] == name), {})


def round_of(bed: DockerBed) -> int:
    """Rounds that are committed; -1 while nobody answers."""
    status = bed.status()
    return -1 if status is None else int(status["round"])


def buckets(bed: DockerBed, service: str) -> list[float]:
    """Mbit/s of a container's token buckets: of what goes out and of what comes in."""
    shown = json.loads(bed.compose("exec", "-T", service, "tc", "-j", "qdisc", "show"))
    return [entry["options"]["rate"] / 125_000 for entry in shown if entry["kind"] == "tbf"]


def test_every_site_trains_and_every_target_is_up(bed: DockerBed) -> None:
    bed.until(lambda: round_of(bed) >= ROUNDS, f"round {ROUNDS}")
    status = bed.status()
    assert status is not None
    assert {site: node(status, site).get("ranks") for site in SITES} == {
        "site-a": 2,
        "site-b": 2,
        "site-c": 1,
    }
    bed.until(
        lambda: (
            {job: sorted(health) for job, health in bed.targets().items()}
            == {"atoll-coordinator": ["up"], "atoll-node": ["up"] * 3}
        ),
        "Prometheus' targets",
    )
    bed.until(
        lambda: max(bed.query("atoll_rounds_committed_total").values(), default=0) >= ROUNDS,
        "the rounds there",
    )


def test_the_dashboard_is_served(bed: DockerBed) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{bed.dashboard_port}/", timeout=60) as answer:
        assert "Atoll" in answer.read().decode()


def test_the_loss_falls(bed: DockerBed) -> None:
    status = bed.status()
    assert status is not None
    losses = [point["loss"] for point in status["curve"] if point["loss"] is not None]
    assert len(losses) >= ROUNDS
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5


@pytest.mark.parametrize("site", SITES)
def test_metered_bytes_are_what_the_kernel_counts(bed: DockerBed, site: str) -> None:
    before, after = bed.look(site), None

    def bounds(after: Look, direction: str) -> tuple[int, int]:
        """Bytes in between, at least and at most: the kernel's counters move while the node's are read."""
        first, last = before.kernel[direction], after.kernel[direction]
        return last[0] - first[1], last[1] - first[0]

    def enough() -> bool:
        nonlocal after
        after = bed.look(site)
        both = [bounds(after, direction) for direction in DIRECTIONS]
        return all(least >= MEASURED and most - least < SHARE / 2 * least for least, most in both)

    bed.until(enough, f"{MEASURED} bytes at {site}")
    assert after is not None
    for direction in DIRECTIONS:
        metered = after.node[direction] - before.node[direction]
        least, most = bounds(after, direction)
        assert least * (1 - SHARE) <= metered <= most * (1 + SHARE), (direction, metered, least, most)


def test_links_are_shaped_and_only_links_may_shape(bed: DockerBed) -> None:
    for link, limit in (("link-a", 200), ("link-b", 200), ("link-c", 200), ("link-hub", 1000)):
        assert buckets(bed, link) == [limit] * 2, link
    refused = bed.compose(
        "exec", "-T", "site-b", "sh", "-c",
        "! tc qdisc del dev eth0 root 2>&1; ! touch /usr/written 2>&1; id -u; grep CapEff /proc/self/status",
    )  # fmt: skip
    assert "not permitted" in refused and "Read-only" in refused
    assert "10001" in refused and "CapEff:\t0000000000000000" in refused


def test_a_killed_site_comes_back_and_catches_up(bed: DockerBed) -> None:
    bed.compose("kill", "site-b")
    bed.until(lambda: not node(bed.status(), "site-b"), "the loss of site-b")
    gone = round_of(bed)
    bed.until(lambda: round_of(bed) >= gone + 10, "ten rounds without it")
    bed.compose("start", "site-b")

    def back() -> bool:
        entry = node(bed.status(), "site-b")
        return entry.get("state") in VOTERS and entry.get("round", 0) > gone + 10

    bed.until(back, "site-b as a voter")
    assert "replay" in bed.compose("logs", "--no-color", "site-b") or "loaded" in bed.logs("site-b")


def test_a_killed_coordinator_goes_on(bed: DockerBed) -> None:
    bed.until(lambda: round_of(bed) >= 5, "rounds to go on from")
    before = round_of(bed)
    bed.compose("kill", "coordinator")
    bed.compose("start", "coordinator")
    bed.until(lambda: round_of(bed) >= 0, "the coordinator")
    again = round_of(bed)
    assert again >= before
    bed.until(lambda: round_of(bed) >= again + 5, "five rounds more")
    bed.until(lambda: all(node(bed.status(), site).get("state") in VOTERS for site in SITES), "all sites")
    assert "going on from round" in bed.compose("logs", "--no-color", "coordinator")


def test_volunteers_come_and_are_found(bed: DockerBed) -> None:
    bed.compose("up", "--detach", "--no-recreate", "--scale", "volunteer=2")
    bed.until(
        lambda: [entry["state"] in VOTERS for entry in present(bed.status())] == [True] * 5,
        "two volunteers as voters",
    )
    bed.until(lambda: bed.targets().get("atoll-node") == ["up"] * 5, "them among Prometheus' targets")


def test_a_volunteer_shapes_its_link_and_gives_up_the_right_to(bed: DockerBed) -> None:
    assert buckets(bed, "volunteer") == [100] * 2
    joined = bed.compose(
        "exec", "-T", "volunteer", "sh", "-c",
        "cat $(grep -l '^Name:.atoll' /proc/[0-9]*/status | head -1)",
    )  # fmt: skip
    for line in ("Uid:\t10001\t10001\t10001\t10001", "CapPrm:\t0000000000000000", "NoNewPrivs:\t1"):
        assert line in joined, joined


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root enters the containers' networks"
)
@pytest.mark.parametrize(("other", "limit"), [("link-a", 200e6), ("volunteer", 100e6)])
def test_no_more_passes_than_a_link_lets_through(bed: DockerBed, other: str, limit: float) -> None:
    far, hub = bed.network(other), bed.network("link-hub")
    for sender, receiver in ((far, hub), (hub, far)):
        assert rate(sender.namespace, receiver.namespace, receiver.address) < 1.05 * limit


def test_values_in_the_environment_reach_the_run(bed: DockerBed) -> None:
    text = bed.compose("exec", "-T", "coordinator", "cat", "/tmp/run.toml")
    for line in ('name = "sign-muon"', "d_model = 256", "rounds = 1000000", "batch = 2"):
        assert line in text


def test_the_image_is_small(bed: DockerBed) -> None:
    done = subprocess.run(
        ["docker", "image", "inspect", "-f", "{{.Size}}", "atoll:cpu"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 1.6e9
