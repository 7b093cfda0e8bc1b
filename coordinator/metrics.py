"""Prometheus metrics of the coordinator, in a registry of their own."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from coordinator.hub import Hub
from protos.address import Address
from protos.refusal import DIGEST_MISMATCH

_BUCKETS: Final = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    20,
    60,
    120,
    300,
    600,
    math.inf,
)


class MetricsError(OSError):
    """The metrics cannot be served; the text names the address, the cause and what to do."""


class _HubCollector(Collector):
    """Reads the hub's own counters when it is scraped."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        hub, run = self._hub, self._hub.run
        yield CounterMetricFamily("atoll_rounds_committed", "Rounds committed.", value=run.round)
        yield GaugeMetricFamily("atoll_rounds", "Rounds of the whole run.", value=run.plan.rounds)
        yield GaugeMetricFamily("atoll_roster_size", "Members of the roster.", value=len(run.registry.roster))
        yield CounterMetricFamily(
            "atoll_roster_epoch", "Epoch of the roster.", value=run.registry.roster.epoch
        )
        phase = GaugeMetricFamily("atoll_phase", "1 for the phase that the run is in.", labels=["phase"])
        for name in ("gathering", "syncing", "training", "done", "failed", "suspended"):
            phase.add_metric([name], float(run.phase == name))
        yield phase
        yield from self._learning()
        yield from self._traffic()
        refused = CounterMetricFamily(
            "atoll_refused", "Messages and streams refused or ignored, by kind.", labels=["kind"]
        )
        counters = dict(run.counters)
        for kind, count in counters.items():
            refused.add_metric([kind], count)
        yield refused
        yield CounterMetricFamily(
            "atoll_digest_mismatches",
            "Nodes that left the common state.",
            value=counters.get(DIGEST_MISMATCH, 0),
        )
        yield CounterMetricFamily(
            "atoll_samples_trained", "Samples counted in commits.", value=run.leases.trained
        )
        yield CounterMetricFamily(
            "atoll_bytes_received", "Message bytes received in all calls.", value=hub.bytes_in
        )
        yield CounterMetricFamily("atoll_bytes_sent", "Message bytes sent in all calls.", value=hub.bytes_out)

    def _learning(self) -> Iterator[Metric]:
        history = self._hub.run.history
        validation, bits = history.last_validation
        yield GaugeMetricFamily("atoll_loss", "Mean training loss, nats per token.", value=history.last_loss)
        yield GaugeMetricFamily("atoll_validation_loss", "Validation loss, nats per token.", value=validation)
        yield GaugeMetricFamily("atoll_validation_bits_per_byte", "Validation bits per byte.", value=bits)
        yield GaugeMetricFamily(
            "atoll_agreement",
            "Share of voted bits that equal the result, mean over voters.",
            value=history.agreement,
        )

    def _traffic(self) -> Iterator[Metric]:
        labels = ["node", "name"]
        received = CounterMetricFamily(
            "atoll_node_bytes_received", "Message bytes from a node.", labels=labels
        )
        sent = CounterMetricFamily("atoll_node_bytes_sent", "Message bytes to a node.", labels=labels)
        missed = CounterMetricFamily("atoll_node_missed", "Rounds without this member's vote.", labels=labels)
        abstained = CounterMetricFamily(
            "atoll_node_abstained", "Rounds in which a member abstained.", labels=labels
        )
        agreement = GaugeMetricFamily(
            "atoll_node_agreement", "Agreement of a node's last vote.", labels=labels
        )
        ranks = GaugeMetricFamily("atoll_node_ranks", "Processes of a node.", labels=labels)
        for node in list(self._hub.run.registry.nodes.values()):
            values = [node.node, node.name]
            received.add_metric(values, node.bytes_in)
            sent.add_metric(values, node.bytes_out)
            missed.add_metric(values, node.missed)
            abstained.add_metric(values, node.abstained)
            agreement.add_metric(values, node.agreement)
            ranks.add_metric(values, node.ranks)
        yield from (received, sent, missed, abstained, agreement, ranks)


class Metrics:
    """The metrics of one hub.

    Attributes:
        registry: what is served; nothing is added to prometheus_client's global registry.
    """

    def __init__(self, hub: Hub) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_HubCollector(hub))
        self._open_to_commit = Histogram(
            "atoll_round_seconds",
            "From the opening of a round to its commit.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._arrival_to_commit = Histogram(
            "atoll_round_closing_seconds",
            "From a round's first contribution to its commit.",
            buckets=_BUCKETS,
            registry=self.registry,
        )
        hub.run.on_commit = self._committed

    def _committed(self, total: float, after_first: float) -> None:
        self._open_to_commit.observe(total)
        self._arrival_to_commit.observe(after_first)


class MetricsServer:
    """``/metrics`` over HTTP on a thread.

    Attributes:
        address: where it listens, with the real port.
    """

    def __init__(self, metrics: Metrics, listen: Address) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            MetricsError: the port is taken, or the address cannot be used.
        """
        self._server: WSGIServer
        self._thread: threading.Thread
        try:
            self._server, self._thread = start_http_server(listen.port, listen.host, metrics.registry)
        except OSError as error:
            cause = "the port is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise MetricsError(
                f"cannot serve metrics on {listen}: {cause}; choose another port with [coordinator] metrics "
                '(0 takes a free one, "off" serves none)'
            ) from error
        self.address = Address(listen.host, self._server.server_port)

    def close(self) -> None:
        """Close the port and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
