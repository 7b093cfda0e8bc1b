"""The panels that Atoll's dashboards in Grafana are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from grafana_foundation_sdk.builders import bargauge, common, stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${source}")

Query = tuple[str, str]  # expression, legend


def query(expr: str, legend: str, *, instant: bool = False) -> Dataquery:
    query = Dataquery().datasource(SOURCE).ref_id("A").expr(expr).legend_format(legend)
    return query.instant().format(PromQueryFormat.TABLE) if instant else query.range()


def number(
    title: str, expr: str, unit: str = "short", *, text: str = "", decimals: int | None = None
) -> stat.Panel:
    """One figure, over its curve."""
    panel = stat.Panel().title(title).description(text).datasource(SOURCE).unit(unit).span(4).height(4)
    if decimals is not None:
        panel = panel.decimals(decimals)
    return panel.with_target(query(expr, title)).no_value("-")


def curves(
    title: str,
    *queries: Query,
    unit: str = "short",
    text: str = "",
    span: int = 12,
    stacked: bool = False,
    at_most: float | None = None,
) -> timeseries.Panel:
    """Curves over time."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(text)
        .datasource(SOURCE)
        .unit(unit)
        .min(0)
        .span(span)
        .height(8)
        .fill_opacity(30 if stacked else 5)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL))
    if at_most is not None:
        panel = panel.max(at_most)
    for index, (expr, legend) in enumerate(queries):
        panel = panel.with_target(query(expr, legend).ref_id("ABCDEFGH"[index]))
    return panel


def bars(title: str, expr: str, legend: str, unit: str = "short", *, text: str = "") -> bargauge.Panel:
    """A bar for each series, as it is now."""
    panel = bargauge.Panel().title(title).description(text).datasource(SOURCE).unit(unit).min(0)
    return panel.span(12).height(8).with_target(query(expr, legend))


def dashboard(title: str, text: str, variables: Mapping[str, str]) -> Dashboard:
    """An empty dashboard.

    Args:
        title: behind ``Atoll: ``.
        text: what it shows.
        variables: by name, of which metric the ``instance`` is chosen.
    """
    page = (
        Dashboard(f"Atoll: {title}")
        .uid(f"atoll-{title}")
        .description(text)
        .tags(["atoll"])
        .readonly()
        .refresh("5s")
        .time("now-30m", "now")
        .with_variable(DatasourceVariable("source").label("Prometheus").type("prometheus"))
    )
    for name, metric in variables.items():
        choice = QueryVariable(name).label(name).datasource(SOURCE).query(f"label_values({metric}, instance)")
        page = page.with_variable(choice.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED))
    return page
