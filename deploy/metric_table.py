"""docs/metrics.md: what Prometheus sees, taken from the table of metrics itself.

``python -m deploy.metric_table > docs/metrics.md`` writes it anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from protos.metric_table import LABELS, OF_BOTH, OF_COORDINATOR, OF_NODE, OF_PROCESS, SECONDS, MetricSpec

_HEAD: Final = """# Metrics

Coordinators and nodes serve their metrics at `/metrics`, in the text format of Prometheus:

* a coordinator on port 9464 of all addresses, or where `[coordinator] metrics` of the run file or
  `atoll coordinator --metrics HOST:PORT` says (`off`: nowhere);
* a node where `atoll join --metrics HOST:PORT`, or `atoll train`, says; of several ranks the leader does.

A coordinator alone tells a lot of every node (`atoll_member_...`), also of volunteers that no Prometheus can
reach. Nothing in a metric is secret, but whoever reads them learns the nodes' names: serve them to your own
network, as they ask for no password.

Durations are in seconds, sizes in bytes, losses in nats per token (0.693 nats are a bit); rounds count from
0. A value that has not been measured is `NaN`. Ratios lie between 0 and 1, but for the two of compression.

## With your own Prometheus and Grafana

`deploy/monitoring/` holds everything that `docker compose up` uses; it works as well beside a Prometheus that
you have already. Add the jobs to its `scrape_configs`. The dashboards, rules and alerts know them by these
names:

```yaml
scrape_configs:
  - job_name: atoll-coordinator
    static_configs: [{targets: ["coordinator.example:9464"]}]
  - job_name: atoll-node
    static_configs: [{targets: ["site-a.example:9465", "site-b.example:9465"]}]
rule_files:
  - rules.yml   # the series that dashboards and alerts read
  - alerts.yml
```

In Grafana import the files of `deploy/monitoring/grafana/dashboards/` (Dashboards, New, Import); at the top
of each the Prometheus is chosen. Or let Grafana read them: put `deploy/monitoring/grafana/provisioning` to
`/etc/grafana/provisioning` and the dashboards to `/etc/grafana/dashboards`, and set `PROMETHEUS_URL`.

| dashboard | shows |
|---|---|
| Atoll: run | loss, rounds, members, agreement and margin of votes, compression, where the time goes |
| Atoll: links | bytes of every link by direction and kind, ways in use, capacities, what each node moves |
| Atoll: island | one node: phases, waiting, traffic between its ranks, update norm, CPU and memory |

They are made by `python -m deploy.monitoring.dashboards` (`make setup` has what it needs).

Useful queries:

```promql
# throughput of the link from site a's node to the coordinator, in bits per second
8 * sum by (node, peer) (rate(atoll_link_bytes_total{job="atoll-node", direction="sent"}[1m]))
# seconds of a round at the 95th percentile
histogram_quantile(0.95, sum by (le) (rate(atoll_round_duration_seconds_bucket[5m])))
# how many times fewer bytes than an fp32 all-reduce, in the last five minutes
atoll:compression:ratio_rate5m
```

Both ends of a link count the same bytes. What a node sends to the coordinator is
`atoll_link_bytes_total{node="node-0",peer="coordinator",direction="sent"}` at the node, and
`{node="coordinator",peer="node-0",direction="received"}` at the coordinator. Sum over one of the two jobs,
not over both. The headers of HTTP/2, TCP and IP come on top.

"""


def markdown() -> str:
    """The whole page."""
    parts = [_HEAD + "## Labels\n\n" + _rows(("label", "values"), _labels())]
    for title, specs in (
        ("Of coordinators and nodes", OF_BOTH),
        ("Of the coordinator", OF_COORDINATOR),
        ("Of a node", OF_NODE),
        ("Of any process, on Linux", OF_PROCESS),
    ):
        parts.append(f"## {title}\n\n{_rows(('metric', 'type', 'labels', 'meaning'), map(_cells, specs))}")
    bounds = ", ".join(f"{bound:g}" for bound in SECONDS)
    parts.append(f"Buckets of all histograms end at {bounds} seconds.\n")
    return "\n".join(parts)


def _labels() -> Iterable[tuple[str, str]]:
    return ((f"`{name}`", text) for name, text in sorted(LABELS.items()))


def _cells(spec: MetricSpec) -> tuple[str, ...]:
    return f"`{spec.name}`", spec.kind, ", ".join(f"`{label}`" for label in spec.labels), spec.help


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    print(markdown(), end="")
