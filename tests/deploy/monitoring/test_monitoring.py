"""Prometheus' rules and Grafana's dashboards: sound, tested, and about metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from protos.metric_table import exported_by

HERE = Path(__file__).parent
MONITORING = HERE.parents[2] / "deploy" / "monitoring"
BOARDS = MONITORING / "grafana" / "dashboards"
NAMES = ("island", "links", "run")

EXPORTED = {
    name: spec for exporter in ("coordinator", "node") for name, spec in exported_by(exporter).items()
}
OF_PROMETHEUS = {"up": {"job", "instance"}}
INNER = (
    promql_parser.AggregateExpr,
    promql_parser.ParenExpr,
    promql_parser.UnaryExpr,
    promql_parser.SubqueryExpr,
)
TARGET = {"job", "instance", "site"}


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> set[str]:
    return {rule["record"] for rule in rules("rules.yml")}


def selectors(expr: Any) -> Iterator[Any]:
    """All selectors of series in a parsed expression."""
    if isinstance(expr, promql_parser.VectorSelector):
        yield expr
    elif isinstance(expr, promql_parser.MatrixSelector):
        yield expr.vector_selector
    elif isinstance(expr, promql_parser.BinaryExpr):
        yield from selectors(expr.lhs)
        yield from selectors(expr.rhs)
    elif isinstance(expr, promql_parser.Call):
        for argument in expr.args:
            yield from selectors(argument)
    elif isinstance(expr, INNER):
        yield from selectors(expr.expr)
    else:
        assert isinstance(expr, (promql_parser.NumberLiteral, promql_parser.StringLiteral)), type(expr)


def check(text: str) -> set[str]:
    """Parse an expression, and see that the table has each of its metrics, with the labels that it selects
    by. Returns the names."""
    found = set()
    for selector in selectors(promql_parser.parse(text)):
        name = selector.name
        base = re.sub("_(bucket|sum|count)$", "", name)
        if name in EXPORTED:
            assert EXPORTED[name].kind != "histogram", name
            known = set(EXPORTED[name].labels)
        elif base in EXPORTED:
            assert EXPORTED[base].kind == "histogram", name
            known = {*EXPORTED[base].labels, "le"}
        elif name in OF_PROMETHEUS:
            known = set()
        else:
            assert name in recorded(), f"nobody exports or records {name}"
            known = {"node", "peer", "direction", "kind", "name"}
        for matcher in selector.matchers.matchers:
            assert matcher.name in known | TARGET, f"{name} has no label {matcher.name}"
        found.add(name)
    return found


@pytest.mark.parametrize("name", ["rules.yml", "alerts.yml"])
def test_rules_are_about_metrics_that_there_are(name: str) -> None:
    for rule in rules(name):
        assert check(rule["expr"])


def test_a_metric_that_nobody_exports_is_found() -> None:
    with pytest.raises(AssertionError, match="nobody exports or records atoll_surprises_total"):
        check("rate(atoll_surprises_total[1m])")
    with pytest.raises(AssertionError, match="atoll_members has no label node"):
        check('atoll_members{node="node-0"} > 1')


def test_every_alert_says_what_happens_and_what_to_do() -> None:
    for rule in rules("alerts.yml"):
        assert rule["labels"]["severity"] in ("page", "ticket")
        for text in (rule["annotations"]["summary"], rule["annotations"]["description"]):
            assert text.endswith((".", "better method.")), rule["alert"]


def test_every_rule_and_alert_has_a_test() -> None:
    tests = (HERE / "rules_test.yml").read_text()
    for rule in (*rules("rules.yml"), *rules("alerts.yml")):
        assert rule.get("record", rule.get("alert")) in tests


def test_the_jobs_are_those_that_rules_and_dashboards_know() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    assert jobs == {"atoll-coordinator", "atoll-node"}
    texts = [path.read_text() for path in (*MONITORING.glob("*.yml"), *BOARDS.glob("*.json"))]
    named = {job for text in texts for job in re.findall(r'job=\\?"([^"\\]+)', text)}
    assert named == jobs
    assert all((MONITORING / name).is_file() for name in config["rule_files"])


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not here"
)
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(MONITORING / "prometheus.yml")),
        ("check", "rules", str(MONITORING / "rules.yml"), str(MONITORING / "alerts.yml")),
        ("test", "rules", str(HERE / "rules_test.yml")),
    ],
    ids=["config", "rules", "test"],
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    checked = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stdout + checked.stderr


# -------------------------------------------------------------------------------------------- dashboards


def panels(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((BOARDS / f"{name}.json").read_text())["panels"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_what_the_code_makes(name: str) -> None:
    dashboards = pytest.importorskip(
        "deploy.monitoring.dashboards",
        reason="grafana-foundation-sdk is not here (it needs Python 3.11)",
        exc_type=ImportError,
    )
    assert set(dashboards.DASHBOARDS) == set(NAMES) == {path.stem for path in BOARDS.glob("*.json")}
    model = dashboards.built(dashboards.DASHBOARDS[name])
    text = dashboards.text_of(model)
    assert (BOARDS / f"{name}.json").read_text() == text, "python -m deploy.monitoring.dashboards"
    read = type(model).from_json(json.loads(text))  # by the types that are made of Grafana's own schema
    assert dashboards.text_of(read) == text


@pytest.mark.parametrize("name", NAMES)
def test_dashboards_are_about_metrics_that_there_are(name: str) -> None:
    used = set()
    variables = {
        each["name"] for each in json.loads((BOARDS / f"{name}.json").read_text())["templating"]["list"]
    }
    for panel in panels(name):
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "1m")
            assert set(re.findall(r"\$(\w+)", expr)) <= variables
            used |= check(expr)
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= {
                *(label for spec in EXPORTED.values() for label in spec.labels)
            }
    assert len(used) > 8


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_numbers_titles_and_places_of_their_own(name: str) -> None:
    found = panels(name)
    assert [panel["id"] for panel in found] == list(range(1, len(found) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in found:
        place = panel["gridPos"]
        assert panel["title"] and place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        letters = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(letters)) == len(letters) and all(letters)
        assert all(target["datasource"]["uid"] == "${source}" for target in panel.get("targets", ()))


def test_grafana_is_given_the_prometheus_and_the_dashboards() -> None:
    folder = MONITORING / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "${PROMETHEUS_URL}", True)
    (provider,) = yaml.safe_load((folder / "dashboards" / "atoll.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
