"""Prometheus metrics of a node, in a registry of their own, fed by its events and its byte meter."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from node.events import (
    Abstained,
    Evaluated,
    Event,
    Replayed,
    RoundDone,
    RoundMissed,
    StateLoaded,
    StateSent,
    TransferFailed,
)
from node.exchange.meter import Direction, Kind
from protos.address import Address


class NodeMetrics:
    """Call :meth:`observe` with every event and :meth:`count_bytes` with every message."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"atoll_node_{name}", text, registry=self.registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"atoll_node_{name}", text, labels, registry=self.registry)

        self._round = gauge("round", "Last round applied")
        self._loss = gauge("loss_nats", "Loss of the node's last batch, nats per token")
        self._validation = gauge("validation_loss_nats", "Last validation loss measured here, nats per token")
        self._bits_per_byte = gauge("validation_bits_per_byte", "The same in bits per byte of text")
        self._agreement = gauge("agreement", "Share of the node's voted bits that equalled the last result")
        self._voters = gauge("voters", "Contributions in the last result")
        for unmeasured in (self._loss, self._validation, self._bits_per_byte, self._agreement):
            unmeasured.set(math.nan)  # 0 would read as a perfect loss
        self._tokens = counter("tokens", "Tokens trained on")
        self._seconds = counter("phase_seconds", "Wall time by phase of a round", "phase")
        self._compute = counter("compute_cpu_seconds", "CPU time in forward and backward")
        self._busy = counter("cpu_seconds", "CPU time of the process")
        self._abstained = counter(
            "abstentions", "Rounds without a contribution of this node, by its own choice"
        )
        self._skipped = counter("skipped_micro_steps", "Steps left out, as a gradient was not finite")
        self._uncounted = counter("uncounted_rounds", "Rounds whose result does not contain this node")
        self._missed = counter("missed_rounds", "Rounds that went on without this node")
        self._transfers = counter("state_transfers", "Transfers of the shared state", "kind")
        self._bytes = counter("bytes", "Bytes at the transport", "direction", "kind")

    def observe(self, event: Event) -> None:
        """Update from an event."""
        if isinstance(event, RoundDone):
            self._round.set(event.round)
            self._voters.set(len(event.voters))
            self._tokens.inc(event.tokens)
            self._compute.inc(event.compute_seconds)
            self._busy.inc(event.busy_seconds)
            self._skipped.inc(event.skipped)
            if event.tokens:
                self._loss.set(event.loss)
            if event.counted:
                self._agreement.set(event.agreement)
            else:
                self._uncounted.inc()
            for phase, seconds in event.seconds.items():
                self._seconds.labels(phase).inc(seconds)
            if event.validation_loss is not None and event.bits_per_byte is not None:
                self._validated(event.validation_loss, event.bits_per_byte)
        elif isinstance(event, Evaluated):
            self._validated(event.validation_loss, event.bits_per_byte)
        elif isinstance(event, Abstained):
            self._abstained.inc()
        elif isinstance(event, RoundMissed):
            self._missed.inc()
        elif isinstance(event, (Replayed, StateLoaded, StateSent, TransferFailed)):
            kinds = {
                Replayed: "replayed",
                StateLoaded: "loaded",
                StateSent: "sent",
                TransferFailed: "failed",
            }
            self._transfers.labels(kinds[type(event)]).inc()

    def _validated(self, loss: float, bits_per_byte: float) -> None:
        self._validation.set(loss)
        self._bits_per_byte.set(bits_per_byte)

    def count_bytes(self, direction: Direction, kind: Kind, nbytes: int) -> None:
        """Hook of the byte meter."""
        self._bytes.labels(direction, kind).inc(nbytes)


class MetricsServer:
    """Serves a registry over HTTP in a thread of its own.

    Args:
        metrics: what to serve.
        address: where to listen; port 0 takes a free one.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, metrics: NodeMetrics, address: Address) -> None:
        server, thread = start_http_server(address.port, addr=address.host, registry=metrics.registry)
        self._server: Any = server
        self._thread = thread
        self.address = Address(address.host, int(server.server_port))

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
