"""`docker compose up`, as a user starts it: metrics, bytes, killed sites and coordinators, no trace left.

`make test-docker` runs it; one bed serves all tests, which come in this order.
"""

from __future__ import annotations

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.docker_bed import BUILD_SECONDS, SITES, DockerBed, why_not

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(3600)]

ROUNDS = 30  # in which a loss falls by half a nat
SHARE = 0.03  # by which the node's count may differ from the kernel's, which has HTTP/2's frames as well
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
    before = bed.look(site)
    bed.until(
        lambda: (
            min(bed.look(site).kernel[way][0] - before.kernel[way][1] for way in before.kernel) >= MEASURED
        ),
        f"{MEASURED} bytes at {site}",
    )
    after = bed.look(site)
    for direction in ("sent", "received"):
        metered = after.node[direction] - before.node[direction]
        least = after.kernel[direction][0] - before.kernel[direction][1]
        most = after.kernel[direction][1] - before.kernel[direction][0]
        assert most - least < SHARE * least, "the counters moved too much while they were read"
        assert least * (1 - SHARE) <= metered <= most * (1 + SHARE), (direction, metered, least, most)


def test_links_are_shaped_and_only_links_may_shape(bed: DockerBed) -> None:
    shown = bed.compose("exec", "-T", "link-b", "tc", "qdisc", "show")
    assert "tbf" in shown and "rate 200Mbit" in shown
    assert bed.compose("exec", "-T", "site-b", "sh", "-c", "tc qdisc show | grep -c tbf").strip() != "0"
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
        return entry.get("state") == "active" and entry.get("round", 0) > gone + 10

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
    status = bed.status()
    assert {node(status, site).get("state") for site in SITES} == {"active"}, status
    assert "going on from round" in bed.compose("logs", "--no-color", "coordinator")


def test_volunteers_come_and_are_found(bed: DockerBed) -> None:
    bed.compose("up", "--detach", "--no-recreate", "--scale", "volunteer=2")
    bed.until(
        lambda: [entry["state"] for entry in present(bed.status())] == ["active"] * 5,
        "two volunteers as voters",
    )
    bed.until(lambda: bed.targets().get("atoll-node") == ["up"] * 5, "them among Prometheus' targets")


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
