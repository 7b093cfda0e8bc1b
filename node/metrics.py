"""Prometheus metrics of a node, in a registry of their own, fed by its events and read from its counters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from node.events import (
    Abstained,
    Evaluated,
    Event,
    Joined,
    Replayed,
    RoundDone,
    RoundMissed,
    Started,
    StateLoaded,
    StateSent,
    TransferFailed,
)
from node.exchange.connections import Connections
from protos.allreduce import ring_bytes
from protos.buckets import TableSchedule
from protos.exporting import Exported, Scrape
from protos.traffic import COORDINATOR, Traffic
from protos.version import version_of

PHASES = ("data", "compute", "propose", "exchange", "apply", "digest", "evaluate")
_TRANSFERS = {Replayed: "replayed", StateLoaded: "loaded", StateSent: "sent", TransferFailed: "failed"}


class NodeMetrics:
    """Call :meth:`observe` with every event; :meth:`watch` says what is read at each scrape.

    Attributes:
        registry: what is served; nothing is added to prometheus_client's global registry.
    """

    def __init__(self) -> None:
        self._traffic: list[Traffic] = []
        self._connections: Callable[[], Connections] = Connections
        self._island: Callable[[], Mapping[str, tuple[int, int]]] = dict
        self._started: Started | None = None
        self._name = ""  # within the run
        self._others: tuple[Traffic, TableSchedule] | None = None
        self._counted_of_others = (0, 0)
        self._spared = 0.0  # bytes of all-reduces

        self.registry = registry = Exported("node", self._read)
        gauge, counter = registry.gauge, registry.counter
        self._round = gauge("atoll_node_round")
        self._loss = gauge("atoll_node_loss_nats")
        self._validation = gauge("atoll_node_validation_loss_nats")
        self._bits_per_byte = gauge("atoll_node_validation_bits_per_byte")
        self._agreement = gauge("atoll_node_vote_agreement_ratio")
        self._voters = gauge("atoll_node_voters")
        self._update = gauge("atoll_node_update_norm")
        self._waiting = gauge("atoll_node_waiting_ratio")
        self._compression = gauge("atoll_node_compression_ratio")
        for unmeasured in (
            self._loss,
            self._validation,
            self._bits_per_byte,
            self._agreement,
            self._update,
            self._waiting,
            self._compression,
        ):
            unmeasured.set(math.nan)  # 0 would read as a perfect loss
        self._tokens = counter("atoll_node_tokens_total")
        phases = registry.histogram("atoll_node_phase_seconds")
        self._phases = {phase: phases.labels(phase) for phase in PHASES}
        self._compute = counter("atoll_node_compute_cpu_seconds_total")
        self._busy = counter("atoll_node_cpu_seconds_total")
        self._abstained = counter("atoll_node_abstentions_total")
        self._skipped = counter("atoll_node_skipped_micro_steps_total")
        self._uncounted = counter("atoll_node_uncounted_rounds_total")
        self._missed = counter("atoll_node_missed_rounds_total")
        transfers = counter("atoll_node_state_transfers_total")
        self._transfers = {kind: transfers.labels(name) for kind, name in _TRANSFERS.items()}
        self._allreduce = counter("atoll_node_fp32_allreduce_bytes_total")

    def watch(
        self,
        traffic: Traffic | None = None,
        connections: Callable[[], Connections] = Connections,
        transfers: Callable[[], Mapping[str, tuple[int, int]]] = dict,
    ) -> None:
        """Read these at each scrape, on the server's thread.

        Args:
            traffic: bytes of this process.
            connections: how the node is connected.
            transfers: by the kind of an island's collective, how often, and bytes.
        """
        if traffic is not None:
            self._traffic.append(traffic)
        self._connections, self._island = connections, transfers

    def lanes_of_others(self, tables: TableSchedule) -> None:
        """What the ranks that do not lead exchange with the coordinator; how much that was, rounds tell."""
        self._others = Traffic(), tables
        self._traffic.append(self._others[0])

    # ------------------------------------------------------------------------------- events

    def observe(self, event: Event) -> None:
        """Update from an event."""
        if isinstance(event, RoundDone):
            self._observe_round(event)
        elif isinstance(event, Started):
            self._started = event
        elif isinstance(event, Joined):
            self._name = event.node
        elif isinstance(event, Evaluated):
            self._validated(event.validation_loss, event.bits_per_byte)
        elif isinstance(event, Abstained):
            self._abstained.inc()
        elif isinstance(event, RoundMissed):
            self._missed.inc()
        elif (transfer := self._transfers.get(type(event))) is not None:
            transfer.inc()

    def _observe_round(self, event: RoundDone) -> None:
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
        if event.update_norm is not None:
            self._update.set(event.update_norm)
        for phase, seconds in event.seconds.items():
            self._phases[phase].observe(seconds)
        whole = sum(event.seconds.values())
        if whole:
            self._waiting.set(event.seconds.get("exchange", 0.0) / whole)
        if event.validation_loss is not None and event.bits_per_byte is not None:
            self._validated(event.validation_loss, event.bits_per_byte)
        self._observe_bytes(event)

    def _observe_bytes(self, event: RoundDone) -> None:
        started, voters = self._started, len(event.voters)
        if started is not None and voters:
            nbytes = 2 * event.micro_steps * ring_bytes(started.parameters, voters)
            self._allreduce.inc(nbytes)
            self._spared += nbytes
        moved = event.bytes_up + event.bytes_down
        if moved:
            self._compression.set(self._spared / moved)
        if self._others is None:
            return
        traffic, tables = self._others
        traffic.compose(tables.of(event.round))
        up, down = self._counted_of_others
        traffic.count(COORDINATOR, "sent", "contribution", max(0, event.others_up - up))
        traffic.count(COORDINATOR, "received", "result", max(0, event.others_down - down))
        self._counted_of_others = event.others_up, event.others_down

    def _validated(self, loss: float, bits_per_byte: float) -> None:
        self._validation.set(loss)
        self._bits_per_byte.set(bits_per_byte)

    # ------------------------------------------------------------------------------- scrapes

    def _read(self, scrape: Scrape) -> None:
        connections = self._connections()
        node, started = connections.node or self._name, self._started
        if started is not None:
            about = (started.run, started.method, started.device, version_of("atoll"))
            scrape.add("atoll_node_info", 1, node, *about)
            scrape.add("atoll_node_ranks", started.ranks)
            scrape.add("atoll_node_parameters", started.parameters)
        totals: dict[tuple[str, str, str], float] = {}
        for traffic in self._traffic:
            for peer, direction, kind, nbytes in traffic.counts():
                totals[peer, direction, kind] = totals.get((peer, direction, kind), 0.0) + nbytes
        for key, nbytes in totals.items():
            scrape.add("atoll_link_bytes_total", nbytes, node, *key)
        for way, count in connections.ways.items():
            scrape.add("atoll_node_peers", count, way)
        for direction, rate in (("sent", connections.uplink), ("received", connections.downlink)):
            if rate is not None:
                scrape.add("atoll_node_link_capacity_bytes_per_second", rate, direction)
        for kind, (count, nbytes) in self._island().items():
            scrape.add("atoll_island_transfers_total", count, kind)
            scrape.add("atoll_island_bytes_total", nbytes, kind)
