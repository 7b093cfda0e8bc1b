"""Grafana's dashboards as code.

``python -m deploy.monitoring.dashboards`` writes deploy/monitoring/grafana/dashboards/*.json anew. It needs
grafana-foundation-sdk (``make setup``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import table
from grafana_foundation_sdk.builders.dashboard import Dashboard, Row
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as DashboardModel

from deploy.monitoring.panels import SOURCE, bars, curves, dashboard, number, query

FOLDER: Final = Path(__file__).with_name("grafana") / "dashboards"

RUN: Final = '{job="atoll-coordinator",instance="$coordinator"}'
NODE: Final = '{job="atoll-node",instance="$node"}'
NAMED: Final = "* on (job, instance) group_left (node) atoll_node_info"  # a series of a node, by its name


def run_overview() -> Dashboard:
    """What a coordinator tells of its run."""
    page = dashboard(
        "run",
        "A run as its coordinator sees it: what it learns, who takes part, and where the time goes.",
        {"coordinator": "atoll_run_info"},
    )
    figures = (
        number("Round", f"atoll_rounds_committed_total{RUN}", text="Rounds committed."),
        number("Loss", f"atoll_loss_nats{RUN}", text="Training loss, nats per token.", decimals=3),
        number("Validation", f"atoll_validation_loss_nats{RUN}", text="Nats per token.", decimals=3),
        number("Members", f"atoll_members{RUN}"),
        number("Tokens per second", f"atoll:tokens:rate5m{RUN}"),
        number(
            "Compression",
            f"atoll_compression_ratio{RUN}",
            text="How many times fewer bytes than by an fp32 ring all-reduce in every micro-step.",
            decimals=0,
        ),
    )
    for figure in figures:
        page = page.with_panel(figure)
    return (
        page.with_row(Row("Learning"))
        .with_panel(
            curves(
                "Loss",
                (f"atoll_loss_nats{RUN}", "training"),
                (f"atoll_validation_loss_nats{RUN}", "validation"),
                text="Nats per token.",
            )
        )
        .with_panel(
            curves(
                "Votes",
                (f"atoll_vote_agreement_ratio{RUN}", "agreement"),
                (f"atoll_vote_margin_ratio{RUN}", "margin"),
                unit="percentunit",
                at_most=1,
                text="Agreement: bits of a vote that equal the result. Margin: distance from a tie.",
            )
        )
        .with_panel(curves("Loss by node", (f"atoll_member_loss_nats{RUN}", "{{node}} {{name}}")))
        .with_panel(
            curves(
                "Update norm",
                (f'atoll_node_update_norm{{job="atoll-node"}} {NAMED}', "{{node}}"),
                text="What the last result has changed of all weights. All nodes change them alike.",
            )
        )
        .with_row(Row("Rounds"))
        .with_panel(
            curves(
                "Duration of rounds",
                (f"atoll:round_duration_seconds:p50_rate5m{RUN}", "median"),
                (f"atoll:round_duration_seconds:p95_rate5m{RUN}", "95th percentile"),
                unit="s",
            )
        )
        .with_panel(
            curves(
                "Where rounds spend their time",
                (
                    'sum by (phase) (rate(atoll_node_phase_seconds_sum{job="atoll-node"}[$__rate_interval]))'
                    " / on () group_left () count(atoll_node_info)",
                    "{{phase}}",
                ),
                unit="percentunit",
                stacked=True,
                text="Seconds a second, mean over the nodes that are scraped.",
            )
        )
        .with_panel(
            curves("Waiting", (f"atoll:node_waiting:ratio_rate5m {NAMED}", "{{node}}"), unit="percentunit")
        )
        .with_panel(curves("Rounds per second", (f"atoll:rounds:rate5m{RUN}", "rounds")))
        .with_row(Row("Members"))
        .with_panel(curves("Nodes", (f"atoll_nodes{RUN}", "{{state}}"), stacked=True))
        .with_panel(
            curves("Members by the way to them", (f"atoll_members_reachable{RUN}", "{{way}}"), stacked=True)
        )
        .with_panel(bars("Rounds behind", f"atoll_member_lag_rounds{RUN}", "{{node}} {{name}}"))
        .with_panel(
            bars(
                "Rounds without a member",
                f"atoll:member_missed:ratio_rate5m{RUN}",
                "{{node}} {{name}}",
                "percentunit",
            )
        )
        .with_panel(
            curves(
                "Refusals per second",
                (f"rate(atoll_refusals_total{RUN}[$__rate_interval])", "{{kind}}"),
            )
        )
        .with_panel(
            curves(
                "Nodes that left the common state",
                (f"increase(atoll_digest_mismatches_total{RUN}[$__rate_interval])", "mismatches"),
            )
        )
    )


def links() -> Dashboard:
    """What travels, as nodes and coordinator count it."""
    page = dashboard(
        "links",
        "Bytes between nodes and coordinator. Each message is counted at both of its ends.",
        {"coordinator": "atoll_run_info"},
    )
    return (
        page.with_row(Row("At the nodes"))
        .with_panel(
            curves(
                "Sent, by link",
                (
                    'sum by (node, peer) (atoll:link_bytes:rate1m{direction="sent"})',
                    "{{node}} to {{peer}}",
                ),
                unit="Bps",
            )
        )
        .with_panel(
            curves(
                "Received, by link",
                (
                    'sum by (node, peer) (atoll:link_bytes:rate1m{direction="received"})',
                    "{{node}} from {{peer}}",
                ),
                unit="Bps",
            )
        )
        .with_panel(
            curves(
                "What is sent",
                ('sum by (kind) (atoll:link_bytes:rate1m{direction="sent"})', "{{kind}}"),
                unit="Bps",
                stacked=True,
            )
        )
        .with_panel(
            curves(
                "Streams to other nodes",
                ("sum by (way) (atoll_node_peers)", "{{way}}"),
                stacked=True,
                text="Nodes that a node calls, by the way that has last led there.",
            )
        )
        .with_panel(
            bars(
                "Capacity, as transfers have shown",
                f"8 * atoll_node_link_capacity_bytes_per_second {NAMED}",
                "{{node}} {{direction}}",
                "bps",
            )
        )
        .with_panel(
            bars(
                "Compression against an fp32 ring all-reduce",
                f"atoll_node_compression_ratio {NAMED}",
                "{{node}}",
            )
        )
        .with_row(Row("At the coordinator"))
        .with_panel(
            curves(
                "What moves",
                (
                    f"sum by (direction, kind) (atoll:coordinator_bytes:rate1m{RUN})",
                    "{{direction}} {{kind}}",
                ),
                unit="Bps",
                stacked=True,
                text="relay: between two nodes that cannot reach each other.",
            )
        )
        .with_panel(
            curves(
                "By node",
                (
                    f"sum by (peer, direction) (atoll:coordinator_bytes:rate1m{RUN})",
                    "{{peer}} {{direction}}",
                ),
                unit="Bps",
            )
        )
        .with_panel(
            curves(
                "All traffic of each node",
                (f"rate(atoll_member_bytes_total{RUN}[$__rate_interval])", "{{node}} {{direction}}"),
                unit="Bps",
                text="By its own word, with whomever: also of nodes that are not scraped.",
            )
        )
        .with_panel(curves("Tunnels", (f"atoll_tunnels{RUN}", "open")))
        .with_panel(
            curves(
                "Compression against an fp32 ring all-reduce",
                (f"atoll:compression:ratio_rate5m{RUN}", "times fewer bytes"),
                span=24,
            )
        )
    )


def island() -> Dashboard:
    """One node."""
    page = dashboard(
        "island",
        "A node, or an island of several ranks, whose leader is scraped.",
        {"node": "atoll_node_info"},
    )
    facts = (
        table.Panel()
        .title("Node")
        .datasource(SOURCE)
        .span(24)
        .height(4)
        .with_target(query(f"atoll_node_info{NODE}", "node", instant=True))
    )
    page = page.with_panel(facts)
    figures = (
        number("Round", f"atoll_node_round{NODE}"),
        number("Loss", f"atoll_node_loss_nats{NODE}", text="Nats per token.", decimals=3),
        number("Tokens per second", f"rate(atoll_node_tokens_total{NODE}[$__rate_interval])"),
        number("Ranks", f"atoll_node_ranks{NODE}"),
        number("Waiting", f"atoll_node_waiting_ratio{NODE}", "percentunit"),
        number(
            "Agreement", f"atoll_node_vote_agreement_ratio{NODE}", "percentunit", text="Of the last vote."
        ),
    )
    for figure in figures:
        page = page.with_panel(figure)
    failures = (
        ("abstentions", "abstained"),
        ("missed_rounds", "missed"),
        ("uncounted_rounds", "not counted"),
        ("skipped_micro_steps", "micro-steps left out"),
    )
    return (
        page.with_row(Row("Rounds"))
        .with_panel(
            curves(
                "Phases",
                (
                    f"sum by (phase) (rate(atoll_node_phase_seconds_sum{NODE}[$__rate_interval]))",
                    "{{phase}}",
                ),
                unit="percentunit",
                stacked=True,
                text="Seconds a second.",
            )
        )
        .with_panel(
            curves(
                "Phases, 95th percentile",
                (
                    "histogram_quantile(0.95, sum by (phase, le) "
                    f"(rate(atoll_node_phase_seconds_bucket{NODE}[$__rate_interval])))",
                    "{{phase}}",
                ),
                unit="s",
            )
        )
        .with_panel(
            curves(
                "Rounds that lack the node",
                *(
                    (f"increase(atoll_node_{name}_total{NODE}[$__rate_interval])", legend)
                    for name, legend in failures
                ),
            )
        )
        .with_panel(curves("Update norm", (f"atoll_node_update_norm{NODE}", "of the last result")))
        .with_row(Row("Between its ranks"))
        .with_panel(
            curves(
                "Bytes of this rank",
                (f"rate(atoll_island_bytes_total{NODE}[$__rate_interval])", "{{collective}}"),
                unit="Bps",
                stacked=True,
                text="Weights that are gathered and gradients that are reduced.",
            )
        )
        .with_panel(
            curves(
                "Collectives per second",
                (f"rate(atoll_island_transfers_total{NODE}[$__rate_interval])", "{{collective}}"),
            )
        )
        .with_row(Row("With others"))
        .with_panel(
            curves(
                "Bytes of the node",
                (f"sum by (direction, kind) (atoll:link_bytes:rate1m{NODE})", "{{direction}} {{kind}}"),
                unit="Bps",
                stacked=True,
            )
        )
        .with_panel(
            curves(
                "Transfers of state",
                (f"increase(atoll_node_state_transfers_total{NODE}[$__rate_interval])", "{{kind}}"),
            )
        )
        .with_row(Row("Process"))
        .with_panel(
            curves(
                "CPUs in use",
                (f"rate(process_cpu_seconds_total{NODE}[$__rate_interval])", "of the leader"),
                (f"rate(atoll_node_cpu_seconds_total{NODE}[$__rate_interval])", "of all ranks, in rounds"),
                (
                    f"rate(atoll_node_compute_cpu_seconds_total{NODE}[$__rate_interval])",
                    "of all ranks, forward and backward",
                ),
            )
        )
        .with_panel(curves("Memory", (f"process_resident_memory_bytes{NODE}", "resident"), unit="bytes"))
    )


DASHBOARDS: Final[Mapping[str, Callable[[], Dashboard]]] = {
    "run": run_overview,
    "links": links,
    "island": island,
}


def built(make: Callable[[], Dashboard]) -> DashboardModel:
    """A dashboard whose panels have numbers, as Grafana's links to them need."""
    model = make().build()
    for index, panel in enumerate(model.panels or (), 1):
        panel.id_val = index
    return model


def text_of(model: DashboardModel) -> str:
    """The JSON of a dashboard, as it is provisioned."""
    return JSONEncoder(sort_keys=True, indent=1).encode(model) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in DASHBOARDS.items():
        (FOLDER / f"{name}.json").write_text(text_of(built(make)))
