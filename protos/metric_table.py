"""Every metric that coordinators and nodes export: its name, type, labels and meaning. Data only.

Whoever exports a metric takes these from here (:mod:`protos.exporting`), docs/metrics.md is made of it
(``python -m deploy.metric_table``), and dashboards and rules are checked against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]
Exporter = Literal["coordinator", "node"]

SECONDS: Final = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, math.inf)
"""Upper bounds of the buckets of every histogram."""


@dataclass(frozen=True)
class MetricSpec:
    """One metric.

    Attributes:
        name: as it is exported: with its unit, and ``_total`` behind that of a counter.
        kind: its type.
        help: what it says.
        labels: their names, in the order in which values are given.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()


LABELS: Final = {
    "cause": "of suspicion: `disagrees`, `constant`, `copies`, `replays`, `invalid`, `abstains` or `lies`",
    "collective": "`gather` (weights, received), `reduce` (gradients, sent) or `scalar` (a norm, or a flag)",
    "device": "where the node trains, as torch names it",
    "direction": "`sent` or `received`, as `node` sees it",
    "kind": "of bytes: `vote` and `mean` (contributions and results), `state` (snapshots, and what nodes "
    "fetch of each other to catch up), `control` (all else) or `relay` (between two nodes, through the "
    "coordinator); of refusals: what was wrong; of transfers: `loaded`, `sent`, `replayed` or `failed`",
    "method": "name of the training method",
    "name": "what its user calls a node",
    "node": "identity within the run, such as `node-0`, or `coordinator`; empty before a node has joined",
    "outcome": "of a second reduction: `clear`, `unknown`, `disputed`, `evaded` or `lied`",
    "peer": "the other end: `coordinator`, a node's identity, or `others` (callers that are no nodes yet, "
    "and the nodes beyond the first 1024)",
    "phase": "of a run: `gathering`, `syncing`, `training`, `paused`, `done`, `failed` or `suspended`; of a "
    "round: "
    "`data`, `compute`, `propose`, `exchange` (a wait), `apply`, `digest` or `evaluate`",
    "run": "name of the run",
    "state": "`joining`, `loading`, `replaying`, `active` or `lagging`",
    "transport": "of the run file: `hub`, `direct`, `swarm` or `auto`",
    "version": "of Atoll; empty where it is not installed as a package",
    "way": "`direct`, `swarm`, `tunnel` (through the coordinator) or `hub` (no streams with other nodes)",
}
"""What the values of each label say."""

OF_BOTH: Final = (
    MetricSpec(
        "atoll_link_bytes_total",
        "counter",
        "Bytes of gRPC messages, and the 5 bytes before each, between this process and another one.",
        ("node", "peer", "direction", "kind"),
    ),
)

OF_PROCESS: Final = (  # of prometheus_client, on Linux
    MetricSpec("process_cpu_seconds_total", "counter", "Total user and system CPU time spent in seconds."),
    MetricSpec("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    MetricSpec("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    MetricSpec(
        "process_start_time_seconds", "gauge", "Start time of the process since unix epoch in seconds."
    ),
    MetricSpec("process_open_fds", "gauge", "Number of open file descriptors."),
    MetricSpec("process_max_fds", "gauge", "Maximum number of open file descriptors."),
)

_MEMBER: Final = ("node", "name")

OF_COORDINATOR: Final = (
    MetricSpec("atoll_run_info", "gauge", "Always 1.", ("run", "method", "transport", "version")),
    MetricSpec("atoll_phase", "gauge", "1 for the phase that the run is in, 0 for the others.", ("phase",)),
    MetricSpec("atoll_rounds_planned", "gauge", "Rounds of the whole run."),
    MetricSpec("atoll_rounds_committed_total", "counter", "Rounds committed, from the run's first one on."),
    MetricSpec("atoll_round_duration_seconds", "histogram", "From the opening of a round to its commit."),
    MetricSpec(
        "atoll_round_closing_seconds", "histogram", "From the first contribution to a round to its commit."
    ),
    MetricSpec("atoll_round_voters", "gauge", "Contributions in the result of the last round."),
    MetricSpec("atoll_members", "gauge", "Nodes on the roster."),
    MetricSpec(
        "atoll_members_reachable", "gauge", "Members, by the best way for others to reach them.", ("way",)
    ),
    MetricSpec("atoll_nodes", "gauge", "Nodes that are here.", ("state",)),
    MetricSpec("atoll_roster_epoch", "gauge", "How often the roster has changed."),
    MetricSpec("atoll_tunnels", "gauge", "Streams between nodes through the coordinator that are open."),
    MetricSpec("atoll_tunnels_opened_total", "counter", "Such streams that both nodes have come to."),
    MetricSpec(
        "atoll_retallies_total",
        "counter",
        "Rounds between nodes of which drawn lines were reduced a second time and all was clear, or unknown; "
        "and reducers for whom it was not clear, see docs/security.md.",
        ("outcome",),
    ),
    MetricSpec("atoll_loss_nats", "gauge", "Training loss of a token in the last round, mean over nodes."),
    MetricSpec("atoll_validation_loss_nats", "gauge", "Validation loss of a token, as measured last."),
    MetricSpec("atoll_validation_bits_per_byte", "gauge", "The same in bits per byte of text."),
    MetricSpec(
        "atoll_vote_agreement_ratio",
        "gauge",
        "Share of the voted bits that equal the result, mean over the voters of the last round.",
    ),
    MetricSpec(
        "atoll_vote_margin_ratio",
        "gauge",
        "Sum of the weighted votes, without its sign, over the sum of the weights: mean over the bits of the "
        "last round. 1: unanimous, 0: a tie.",
    ),
    MetricSpec("atoll_tokens_trained_total", "counter", "Tokens in reports of nodes to this process."),
    MetricSpec("atoll_samples_trained_total", "counter", "Sequences whose gradients are in commits."),
    MetricSpec("atoll_digest_mismatches_total", "counter", "Times that a node has left the common state."),
    MetricSpec("atoll_refusals_total", "counter", "Messages and streams refused or ignored.", ("kind",)),
    MetricSpec(
        "atoll_fp32_allreduce_bytes_total",
        "counter",
        "What all voters would have sent and received to average gradients in fp32 by a ring all-reduce in "
        "every micro-step, since this process started.",
    ),
    MetricSpec(
        "atoll_compression_ratio",
        "gauge",
        "That over all bytes that nodes have sent and received since then, as they report.",
    ),
    MetricSpec(
        "atoll_member_loss_nats", "gauge", "Training loss of a token, as a node reported last.", _MEMBER
    ),
    MetricSpec(
        "atoll_member_vote_agreement_ratio",
        "gauge",
        "Share of the bits of a node's last vote that equalled the result.",
        _MEMBER,
    ),
    MetricSpec(
        "atoll_member_lag_rounds",
        "gauge",
        "Committed rounds whose results a node has not been given.",
        _MEMBER,
    ),
    MetricSpec(
        "atoll_member_missed_rounds_total",
        "counter",
        "Rounds without the contribution of a member, since it joined.",
        _MEMBER,
    ),
    MetricSpec(
        "atoll_member_abstentions_total", "counter", "Of those, the ones in which it abstained.", _MEMBER
    ),
    MetricSpec(
        "atoll_member_suspicion_ratio",
        "gauge",
        "How far a node is under suspicion by its last rounds, see docs/security.md: of `disagrees` 0 like "
        "the others, 1 as a coin, 2 the opposite; of `lies` 2 once it is certain; else the share of these "
        "rounds.",
        (*_MEMBER, "cause"),
    ),
    MetricSpec(
        "atoll_member_suspected",
        "gauge",
        "1 for a node whose suspicion has reached the run file's [byzantine] warn, else 0.",
        _MEMBER,
    ),
    MetricSpec(
        "atoll_member_retallies_unanswered_total",
        "counter",
        "Questions for drawn lines of its contribution that a node has not answered in time.",
        _MEMBER,
    ),
    MetricSpec("atoll_member_ranks", "gauge", "Processes of a node.", _MEMBER),
    MetricSpec("atoll_member_weight", "gauge", "Weight of a node's vote.", _MEMBER),
    MetricSpec("atoll_member_silence_seconds", "gauge", "Since a node was last heard of.", _MEMBER),
    MetricSpec(
        "atoll_member_cpu_seconds_total",
        "counter",
        "CPU time of a node's processes, as it reported since it joined.",
        _MEMBER,
    ),
    MetricSpec(
        "atoll_member_compute_cpu_seconds_total", "counter", "Of that, in forward and backward.", _MEMBER
    ),
    MetricSpec(
        "atoll_member_bytes_total",
        "counter",
        "All bytes of a node, with whomever, as it reported since its process started.",
        (*_MEMBER, "direction"),
    ),
    MetricSpec(
        "atoll_member_link_capacity_bytes_per_second",
        "gauge",
        "What a node's link carries, as far as it has told.",
        (*_MEMBER, "direction"),
    ),
)

OF_NODE: Final = (
    MetricSpec("atoll_node_info", "gauge", "Always 1.", ("node", "run", "method", "device", "version")),
    MetricSpec("atoll_node_round", "gauge", "The last round applied, from 0 on."),
    MetricSpec("atoll_node_ranks", "gauge", "Processes of the node."),
    MetricSpec("atoll_node_parameters", "gauge", "Parameters that are trained."),
    MetricSpec("atoll_node_loss_nats", "gauge", "Training loss of a token of the node's last batch."),
    MetricSpec("atoll_node_validation_loss_nats", "gauge", "Validation loss of a token, measured here last."),
    MetricSpec("atoll_node_validation_bits_per_byte", "gauge", "The same in bits per byte of text."),
    MetricSpec(
        "atoll_node_vote_agreement_ratio",
        "gauge",
        "Share of the bits of the node's last vote that equalled the result.",
    ),
    MetricSpec("atoll_node_voters", "gauge", "Contributions in the last result."),
    MetricSpec("atoll_node_tokens_total", "counter", "Tokens trained on."),
    MetricSpec(
        "atoll_node_update_norm",
        "gauge",
        "Euclidean norm of the last change of all weights by a round's result, from a sample of them.",
    ),
    MetricSpec("atoll_node_phase_seconds", "histogram", "Wall time of a round's phases.", ("phase",)),
    MetricSpec("atoll_node_waiting_ratio", "gauge", "Share of the last round in which the node waited."),
    MetricSpec("atoll_node_cpu_seconds_total", "counter", "CPU time of the node's processes in rounds."),
    MetricSpec("atoll_node_compute_cpu_seconds_total", "counter", "Of that, in forward and backward."),
    MetricSpec("atoll_node_abstentions_total", "counter", "Rounds to which the node brought nothing."),
    MetricSpec("atoll_node_uncounted_rounds_total", "counter", "Rounds whose result lacks the node."),
    MetricSpec("atoll_node_missed_rounds_total", "counter", "Rounds that went on without the node."),
    MetricSpec(
        "atoll_node_skipped_micro_steps_total",
        "counter",
        "Micro-steps that were left out, as a gradient was not finite.",
    ),
    MetricSpec("atoll_node_state_transfers_total", "counter", "Transfers of the shared state.", ("kind",)),
    MetricSpec(
        "atoll_node_fp32_allreduce_bytes_total",
        "counter",
        "What the node would have sent and received to average gradients in fp32 by a ring all-reduce in "
        "every micro-step.",
    ),
    MetricSpec(
        "atoll_node_compression_ratio",
        "gauge",
        "That over all bytes that its processes have sent to, and received from, other nodes and the "
        "coordinator.",
    ),
    MetricSpec("atoll_node_peers", "gauge", "Other nodes, by the way that has last led there.", ("way",)),
    MetricSpec(
        "atoll_node_link_capacity_bytes_per_second",
        "gauge",
        "What the link of the node carries, as far as its transfers have shown.",
        ("direction",),
    ),
    MetricSpec(
        "atoll_island_bytes_total",
        "counter",
        "Bytes of tensors between this rank and the others of its node.",
        ("collective",),
    ),
    MetricSpec(
        "atoll_island_transfers_total",
        "counter",
        "Collectives of the sharded model on this rank.",
        ("collective",),
    ),
)


def exported_by(exporter: Exporter) -> dict[str, MetricSpec]:
    """All metrics that a coordinator, or a node, exports, by name."""
    own = OF_COORDINATOR if exporter == "coordinator" else OF_NODE
    return {spec.name: spec for spec in (*OF_BOTH, *own, *OF_PROCESS)}
