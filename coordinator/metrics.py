"""Prometheus metrics of the coordinator, in a registry of their own."""

from __future__ import annotations

import errno
import math
import os
from collections import Counter
from typing import get_args

from coordinator.hub import Hub
from coordinator.nodes import Node, NodeState
from coordinator.retally import OUTCOMES
from coordinator.run import Phase
from coordinator.status import parameters_of
from protos import exporting
from protos.address import Address
from protos.allreduce import ring_bytes
from protos.exporting import Exported, Scrape
from protos.refusal import DIGEST_MISMATCH
from protos.traffic import COORDINATOR
from protos.version import version_of


class MetricsError(OSError):
    """The metrics cannot be served; the text names the address, the cause and what to do."""


class Metrics:
    """The metrics of one hub; most are its own counters, read when they are scraped.

    Attributes:
        registry: what is served; nothing is added to prometheus_client's global registry.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._parameters = parameters_of(hub.tables)
        self._allreduce = 0.0  # bytes
        self.registry = Exported("coordinator", self._read)
        self._duration = self.registry.histogram("atoll_round_duration_seconds")
        self._closing = self.registry.histogram("atoll_round_closing_seconds")
        hub.run.on_commit = self._committed

    def _committed(self, total: float, after_first: float) -> None:
        self._duration.observe(total)
        self._closing.observe(after_first)
        plan, last = self._hub.plan, self._hub.run.round - 1
        steps = plan.samples(last) / plan.batch
        voters = self._voters()
        if voters:  # each of them sends as much as it receives
            self._allreduce += 2 * voters * steps * ring_bytes(self._parameters, voters)

    def _voters(self) -> int:
        run = self._hub.run
        result = run.results.get(run.round - 1)
        return 0 if result is None else len(result.voters)

    def _read(self, scrape: Scrape) -> None:
        hub, run, plan = self._hub, self._hub.run, self._hub.plan
        scrape.add("atoll_run_info", 1, plan.name, plan.method, plan.transport, version_of("atoll"))
        for phase in get_args(Phase):
            scrape.add("atoll_phase", float(run.phase == phase), phase)
        scrape.add("atoll_rounds_planned", plan.rounds)
        scrape.add("atoll_rounds_committed_total", run.round)
        scrape.add("atoll_round_voters", self._voters())
        counters = dict(run.counters)
        for kind, count in counters.items():
            scrape.add("atoll_refusals_total", count, kind)
        scrape.add("atoll_digest_mismatches_total", counters.get(DIGEST_MISMATCH, 0))
        self._read_learning(scrape)
        self._read_roster(scrape)
        for peer, direction, kind, nbytes in hub.traffic.counts():
            scrape.add("atoll_link_bytes_total", nbytes, COORDINATOR, peer, direction, kind)
        scrape.add("atoll_fp32_allreduce_bytes_total", self._allreduce)
        moved = run.moved_bytes
        scrape.add("atoll_compression_ratio", self._allreduce / moved if moved else math.nan)
        for outcome in OUTCOMES:
            scrape.add("atoll_retallies_total", run.training.inquiries.outcomes[outcome], outcome)
        scrape.add("atoll_tunnels", len(hub.tunnels))
        scrape.add("atoll_tunnels_opened_total", hub.tunnels.opened)

    def _read_learning(self, scrape: Scrape) -> None:
        run, history = self._hub.run, self._hub.run.history
        validation, bits = history.last_validation
        scrape.add("atoll_loss_nats", history.last_loss)
        scrape.add("atoll_validation_loss_nats", validation)
        scrape.add("atoll_validation_bits_per_byte", bits)
        scrape.add("atoll_vote_agreement_ratio", history.agreement)
        scrape.add("atoll_vote_margin_ratio", history.margin)
        scrape.add("atoll_tokens_trained_total", history.tokens)
        scrape.add("atoll_samples_trained_total", run.leases.trained)

    def _read_roster(self, scrape: Scrape) -> None:
        run = self._hub.run
        roster, nodes = run.registry.roster, list(run.registry.nodes.values())
        scrape.add("atoll_members", len(roster))
        scrape.add("atoll_roster_epoch", roster.epoch)
        reached = Counter(self._way(node.node) for node in nodes if node.node in roster)
        for way in ("direct", "swarm", "tunnel", "hub"):
            scrape.add("atoll_members_reachable", reached[way], way)
        states = Counter(node.state for node in nodes)
        for state in get_args(NodeState):
            if state != "left":
                scrape.add("atoll_nodes", states[state], state)
        for node in nodes:
            self._read_member(scrape, node)

    def _way(self, name: str) -> str:
        mesh = self._hub.run.mesh
        outside = self._hub.plan.transport == "hub" or mesh.endpoint(name) is None
        return "hub" if outside else mesh.way("", name)

    def _read_member(self, scrape: Scrape, node: Node) -> None:
        run, who = self._hub.run, (node.node, node.name)
        for name, value in (
            ("atoll_member_loss_nats", node.report.loss),
            ("atoll_member_vote_agreement_ratio", node.agreement),
            ("atoll_member_lag_rounds", max(0, run.round - node.position)),
            ("atoll_member_missed_rounds_total", node.missed),
            ("atoll_member_abstentions_total", node.abstained),
            ("atoll_member_retallies_unanswered_total", run.training.inquiries.unanswered[node.node]),
            ("atoll_member_ranks", node.ranks),
            ("atoll_member_weight", node.weight),
            ("atoll_member_silence_seconds", run.now() - node.seen_at),
            ("atoll_member_cpu_seconds_total", node.busy_seconds),
            ("atoll_member_compute_cpu_seconds_total", node.compute_seconds),
        ):
            scrape.add(name, value, *who)
        scrape.add("atoll_member_suspected", float(run.scrutiny.action(node.node) != "none"), *who)
        for cause, score in run.scrutiny.scores(node.node).items():
            scrape.add("atoll_member_suspicion_ratio", score, *who, cause)
        endpoint = run.mesh.endpoint(node.node)
        up, down = (endpoint.uplink, endpoint.downlink) if endpoint is not None else (0.0, 0.0)
        for direction, nbytes, capacity in (
            ("sent", node.report.bytes_up, up),
            ("received", node.report.bytes_down, down),
        ):
            scrape.add("atoll_member_bytes_total", nbytes, *who, direction)
            if capacity:
                scrape.add("atoll_member_link_capacity_bytes_per_second", capacity, *who, direction)


class MetricsServer(exporting.MetricsServer):
    """``/metrics`` of a coordinator over HTTP."""

    def __init__(self, metrics: Metrics, listen: Address) -> None:
        """Listen; port 0 takes a free one.

        Raises:
            MetricsError: the port is taken, or the address cannot be used.
        """
        try:
            super().__init__(metrics.registry, listen)
        except OSError as error:
            cause = "the port is in use" if error.errno == errno.EADDRINUSE else os.strerror(error.errno or 0)
            raise MetricsError(
                f"cannot serve metrics on {listen}: {cause}; choose another port with [coordinator] metrics "
                '(0 takes a free one, "off" serves none)'
            ) from error
