"""The compose project under a name, a subnet and ports of its own, driven as by a user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import free_port, until

ROOT = Path(__file__).resolve().parents[2]
SITES = ("site-a", "site-b", "site-c")
BUILD_SECONDS = 1800.0  # an image from nothing, with everything to fetch
SECONDS = (
    600.0  # for whatever else is waited for; a loaded machine takes minutes to load torch in six processes
)

# Read where the site's network is, counters around the metrics: one look at both.
_LOOK = r"""
import json, pathlib, subprocess, sys, urllib.request
found = json.loads(subprocess.check_output(["ip", "-j", "-4", "address", "show", "to", sys.argv[1]]))
name = next(entry["ifname"] for entry in found if entry)
folder = pathlib.Path("/sys/class/net", name, "statistics")
names = ["rx_bytes", "rx_packets", "tx_bytes", "tx_packets"]
read = lambda: [int((folder / each).read_text()) for each in names]
before = read()
text = urllib.request.urlopen("http://127.0.0.1:9465/metrics", timeout=20).read().decode()
after = read()
print(json.dumps({"counters": dict(zip(names, ([a, b] for a, b in zip(before, after)))), "metrics": text}))
"""


def why_not() -> str:
    """Why there is no engine to test with; empty if there is one."""
    if sys.platform != "linux":
        return "links are shaped on Linux only"
    if shutil.which("docker") is None:
        return "docker is not installed"
    for words, what in ((["compose", "version"], "Compose v2"), (["info"], "a Docker engine")):
        try:
            done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            return f"{what} does not answer"
        if done.returncode:
            return f"there is no {what}: {(done.stderr or done.stdout).strip()[-200:]}"
    return ""


@dataclass(frozen=True)
class Look:
    """A site at one time: its bytes as the kernel and as the node count them, sent and received.

    ``kernel`` is (least, most): the counters before and after the node's metrics were read. Headers of
    Ethernet, IP and TCP (14 + 20 + 32 bytes for each packet that the kernel counts) are taken off.
    """

    kernel: dict[str, tuple[int, int]]
    node: dict[str, float]


@dataclass(frozen=True)
class Network:
    """Where a container's network is: the path of its namespace, its address in the WAN."""

    namespace: str
    address: str


class DockerBed:
    """Brings the bed up and down, and looks at it."""

    def __init__(self, name: str, **settings: str) -> None:
        self.name = name
        self.prometheus_port, self.dashboard_port = free_port(), free_port()
        self.subnet = settings.pop("WAN_SUBNET", "10.91.0.0/24")
        self._environment = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": name,
            "COMPOSE_ANSI": "never",
            "COMPOSE_PROGRESS": "plain",
            "WAN_SUBNET": self.subnet,
            "PROMETHEUS_PORT": str(self.prometheus_port),
            "DASHBOARD_PORT": str(self.dashboard_port),
            **settings,
        }

    def compose(self, *words: str, seconds: float = SECONDS) -> str:
        """Run `docker compose` and return what it prints; fails with what it says."""
        done = subprocess.run(
            ["docker", "compose", *words],
            cwd=ROOT, env=self._environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=seconds,
        )  # fmt: skip
        assert done.returncode == 0, (
            f"docker compose {' '.join(words)}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
        )
        return done.stdout

    def logs(self, *services: str) -> str:
        """The last lines of services."""
        return self.compose("logs", "--no-color", "--tail", "30", *services)

    def until(self, holds: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
        """Wait for ``holds()``; fails with the logs."""
        until(holds, what, deadline=seconds, fate=self.logs, pause=2.0)

    def status(self) -> dict[str, Any] | None:
        """What `atoll status` says in the coordinator's container; None while nobody answers."""
        try:
            text = self.compose(
                "exec", "-T", "coordinator", "atoll", "status", "@/run/atoll/invite", "--json"
            )
        except AssertionError:
            return None
        found: dict[str, Any] = json.loads(text)
        return found

    def query(self, expression: str) -> dict[str, float]:
        """Values in Prometheus by the series' instance; empty if there are none or it does not answer."""
        url = f"/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        answer = self._ask(url)
        results = answer["data"]["result"] if answer else []
        return {result["metric"].get("instance", ""): float(result["value"][1]) for result in results}

    def targets(self) -> dict[str, list[str]]:
        """The health of Prometheus' targets, by job."""
        answer = self._ask("/api/v1/targets?state=active")
        found: dict[str, list[str]] = {}
        for target in answer["data"]["activeTargets"] if answer else ():
            found.setdefault(target["labels"]["job"], []).append(target["health"])
        return found

    def _ask(self, path: str) -> dict[str, Any] | None:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.prometheus_port}{path}", timeout=20
            ) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def look(self, site: str) -> Look:
        """A site's counters."""
        seen = json.loads(self.compose("exec", "-T", site, "python", "-c", _LOOK, self.subnet))
        counters: dict[str, list[int]] = seen["counters"]
        kernel = {}
        for direction, prefix in (("sent", "tx"), ("received", "rx")):
            of, packets = counters[f"{prefix}_bytes"], counters[f"{prefix}_packets"]
            kernel[direction] = (of[0] - 66 * packets[0], of[1] - 66 * packets[1])
        return Look(kernel, _bytes(seen["metrics"]))

    def network(self, service: str) -> Network:
        """The network of a service's first container; root may enter it."""
        container = self.compose("ps", "--quiet", service).split()[0]
        done = subprocess.run(
            ["docker", "container", "inspect", container],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        found = json.loads(done.stdout)[0]
        address = found["NetworkSettings"]["Networks"][f"{self.name}_wan"]["IPAddress"]
        return Network(f"/proc/{found['State']['Pid']}/ns/net", address)

    def left(self) -> list[str]:
        """Containers, networks and volumes of this project that are there."""
        found = []
        for kind in (["ps", "-aq"], ["network", "ls", "-q"], ["volume", "ls", "-q"]):
            done = subprocess.run(
                ["docker", *kind, "--filter", f"label=com.docker.compose.project={self.name}"],
                capture_output=True, text=True, timeout=60, check=True,
            )  # fmt: skip
            found += [f"{kind[0]} {line}" for line in done.stdout.split()]
        return found

    def bridges(self) -> set[Path]:
        """This machine's interfaces that the project's networks are made of."""
        networks = [entry.split()[1] for entry in self.left() if entry.startswith("network ")]
        return {Path("/sys/class/net", f"br-{network}") for network in networks}

    def down(self) -> None:
        """End it and remove all of it but the image."""
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "20")


def _bytes(metrics: str) -> dict[str, float]:
    """Bytes by direction, over all kinds and peers, of a node's metrics."""
    found = {"sent": 0.0, "received": 0.0}
    for line in metrics.splitlines():
        if line.startswith("atoll_link_bytes_total{"):
            labels, _, value = line.rpartition("} ")
            for direction in found:
                if f'direction="{direction}"' in labels:
                    found[direction] += float(value)
    return found
