"""The table of metrics, its page, and what a coordinator and its nodes really export: all the same."""

from __future__ import annotations

import queue
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from coordinator.service import Started, run_coordinator
from deploy.costs import run_costs
from deploy.metric_table import markdown
from node.events import Event, Notice, RoundDone
from node.launch import Options, join
from protos.address import Address
from protos.exporting import Exported, Scrape
from protos.invite import Invite
from protos.metric_table import LABELS, OF_COORDINATOR, OF_NODE, OF_PROCESS, Exporter, exported_by
from protos.runfile import RunFile

LOOPBACK = Address("127.0.0.1", 0)
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
DEADLINE = 60.0
ROUNDS = 3


def test_the_page_is_made_of_the_table() -> None:
    assert PAGE.read_text() == markdown(), "python -m deploy.metric_table > docs/metrics.md"


def test_names_follow_the_conventions_and_every_label_is_explained() -> None:
    names = [spec.name for spec in (*OF_COORDINATOR, *OF_NODE)]
    assert len(names) == len(set(names))
    used = set()
    for exporter in ("coordinator", "node"):
        for spec in exported_by(exporter).values():
            assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
            assert spec.help.endswith(".") and len(set(spec.labels)) == len(spec.labels), spec.name
            used |= set(spec.labels)
    assert used == set(LABELS)


# ---------------------------------------------------------------------------------------- what is exported


class Watched:
    """A run of two nodes, real but for being in one process, and what all metrics said at its end."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = defaultdict(list)
        self._run = RunFile.parse(
            f"[run]\nnodes = 2\nrounds = {ROUNDS}\nvalidation_windows = 2\n"
            "[model]\nd_model = 16\nlayers = 1\nheads = 1\ncontext = 16\n[data]\nbatch = 2\n"
        )
        self._started: queue.Queue[Started] = queue.Queue()
        threads = [threading.Thread(target=self._coordinate, daemon=True)]
        threads[0].start()
        self.where = self._started.get(timeout=DEADLINE)
        self._both = threading.Barrier(2, timeout=DEADLINE)
        threads += [threading.Thread(target=self._join, args=(name,), daemon=True) for name in "ab"]
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        assert len(self.texts["node"]) == 2

    def _coordinate(self) -> None:
        run_coordinator(
            self._run,
            run_costs(self._run).tables,
            "token",
            listen=LOOPBACK,
            metrics_listen=LOOPBACK,
            on_started=self._started.put,
        )

    def _join(self, name: str) -> None:
        notices: list[str] = []

        def listen(event: Event) -> None:
            if isinstance(event, Notice):
                notices.append(event.text)
            elif isinstance(event, RoundDone) and event.round == ROUNDS - 2:
                self._both.wait()  # nothing of this round is on its way any more, nothing of the next one yet
                url = next(text for text in notices if "metrics are served" in text).split()[-1]
                self.texts["node"].append(fetch(url))
                self.texts["coordinator"].append(fetch(f"http://{self.where.metrics}/metrics"))
                self._both.wait()

        invite = Invite("token", "127.0.0.1", self.where.address.port)
        join(invite, Options(name=name, device="cpu", metrics=LOOPBACK), listen)


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=DEADLINE) as reply:
        return str(reply.read().decode())


def families(text: str) -> dict[str, Metric]:
    """By the name in the table."""
    found = {}
    for family in text_string_to_metric_families(text):
        found[family.name + "_total" * (family.type == "counter")] = family
    return found


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize("exporter", ["coordinator", "node"])
def test_the_table_is_what_is_exported(watched: Watched, exporter: Exporter) -> None:
    table = exported_by(exporter)
    if not sys.platform.startswith("linux"):
        table = {name: spec for name, spec in table.items() if spec not in OF_PROCESS}
    for text in watched.texts[exporter]:
        found = families(text)
        assert set(found) == set(table)
        for name, spec in table.items():
            family = found[name]
            assert family.type == spec.kind
            if spec not in OF_PROCESS:
                assert family.documentation == spec.help
            for sample in family.samples:
                assert set(sample.labels) - {"le"} == set(spec.labels), name
                assert not sample.name.endswith("_created")


def values(text: str, name: str) -> dict[tuple[str, ...], float]:
    return {tuple(sample.labels.values()): sample.value for sample in families(text)[name].samples}


def test_what_has_been_measured_has_a_value(watched: Watched) -> None:
    for text in watched.texts["node"]:
        assert values(text, "atoll_node_round") == {(): ROUNDS - 2}
        assert values(text, "atoll_node_update_norm")[()] > 0
        assert 0 < values(text, "atoll_node_waiting_ratio")[()] < 1
        assert values(text, "atoll_node_fp32_allreduce_bytes_total")[()] > 0
        assert values(text, "atoll_node_compression_ratio")[()] > 0
    for text in watched.texts["coordinator"]:
        agreement = values(text, "atoll_vote_agreement_ratio")[()]
        assert values(text, "atoll_vote_margin_ratio")[()] == pytest.approx(2 * agreement - 1)
        assert values(text, "atoll_members_reachable")[("hub",)] == 2
        assert values(text, "atoll_round_voters") == {(): 2}
        assert values(text, "atoll_fp32_allreduce_bytes_total")[()] == pytest.approx(
            sum(values(each, "atoll_node_fp32_allreduce_bytes_total")[()] for each in watched.texts["node"])
        )


def test_both_ends_of_a_link_count_the_same_bytes(watched: Watched) -> None:
    counted: dict[tuple[str, str], list[float]] = defaultdict(list)
    for text in [*watched.texts["node"], watched.texts["coordinator"][0]]:
        for sample in families(text)["atoll_link_bytes_total"].samples:
            node, peer, direction, kind = (
                sample.labels[name] for name in ("node", "peer", "direction", "kind")
            )
            if kind == "vote":
                counted[(node, peer) if direction == "sent" else (peer, node)].append(sample.value)
    links = {(f"node-{i}", "coordinator") for i in range(2)} | {
        ("coordinator", f"node-{i}") for i in range(2)
    }
    assert set(counted) == links
    for ends, both in counted.items():
        assert len(both) == 2 and both[0] == both[1] > 0, ends


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not here"
)
def test_promtool_finds_nothing_to_say_about_names(watched: Watched) -> None:
    for texts in watched.texts.values():
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=texts[0], text=True, capture_output=True
        )
        said = [line for line in checked.stderr.splitlines() if line.startswith("atoll")]
        said = [line for line in said if "bits_per_byte" not in line]  # a loss, and no size
        assert not said


def test_only_metrics_of_the_table_can_be_given_a_value() -> None:
    def read(scrape: Scrape) -> None:
        with pytest.raises(KeyError):
            scrape.add("atoll_surprises_total", 1)
        with pytest.raises(KeyError):
            scrape.add("atoll_node_round", 1)  # is told what happens
        with pytest.raises(ValueError, match="has the labels"):
            scrape.add("atoll_node_peers", 1)
        scrape.add("atoll_node_peers", 2, "swarm")

    registry = Exported("node", read)
    registry.gauge("atoll_node_round").set(4)
    assert registry.get_sample_value("atoll_node_peers", {"way": "swarm"}) == 2
    assert registry.get_sample_value("atoll_node_round") == 4
