"""The charts as ECharts options. Colours are legible on light and dark ground alike. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from coordinator.dashboard.recorder import CurvePoint, RoundView

TRAINING: Final = "#2f9fd0"
CLOSING: Final = "#e0913a"
BETWEEN: Final = "#8b93a5"
VALIDATION: Final = "#d9534f"
_TEXT: Final = "#8791a3"
_LINE: Final = "rgba(135,145,163,0.35)"
_GRID: Final = "rgba(135,145,163,0.16)"
_FONT: Final = "system-ui, 'Segoe UI', Roboto, sans-serif"

Options = dict[str, Any]


def _axis(name: str, **more: Any) -> Options:
    return {
        "name": name,
        "nameLocation": "middle",
        "nameGap": 26,
        "nameTextStyle": {"color": _TEXT, "fontSize": 11},
        "axisLabel": {"color": _TEXT, "fontSize": 11, "hideOverlap": True},
        "axisLine": {"lineStyle": {"color": _LINE}},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": _GRID}},
        **more,
    }


def _chart(label: str, x: Options, y: Options, series: list[Options]) -> Options:
    return {
        "animation": False,
        "textStyle": {"fontFamily": _FONT},
        "aria": {"enabled": True, "label": {"description": label}},
        "grid": {"left": 8, "right": 14, "top": 34, "bottom": 28, "containLabel": True},
        "legend": {
            "top": 0,
            "right": 4,
            "itemWidth": 14,
            "itemHeight": 8,
            "icon": "roundRect",
            "textStyle": {"color": _TEXT, "fontSize": 11},
        },
        # rendered on the canvas: nothing in a tooltip is taken for markup
        "tooltip": {
            "trigger": "axis",
            "renderMode": "richText",
            "confine": True,
            "textStyle": {"fontSize": 12},
        },
        "xAxis": x,
        "yAxis": y,
        "series": series,
    }


def _line(name: str, color: str, data: list[list[float]], **more: Any) -> Options:
    return {
        "name": name,
        "type": "line",
        "data": data,
        "showSymbol": False,
        "lineStyle": {"width": 1.8, "color": color},
        "itemStyle": {"color": color},
        "emphasis": {"disabled": True},
        **more,
    }


def _losses(label: str, x: Options, points: Sequence[tuple[float, CurvePoint]]) -> Options:
    trained = [[at, round(p.loss, 5)] for at, p in points if math.isfinite(p.loss)]
    measured = [[at, round(p.validation_loss, 5)] for at, p in points if math.isfinite(p.validation_loss)]
    y = _axis("", type="value", scale=True)
    validation = _line(
        "validation", VALIDATION, measured, showSymbol=True, symbol="circle", symbolSize=6, z=3
    )
    return _chart(label, x, y, [_line("training", TRAINING, trained), validation])


def loss_by_round(points: Sequence[CurvePoint]) -> Options:
    """Losses over the rounds, counted from 1."""
    x = _axis("round", type="value", min="dataMin", max="dataMax", minInterval=1)
    return _losses("Loss over rounds", x, [(p.round + 1, p) for p in points])


def byte_unit(nbytes: int) -> tuple[str, int]:
    """The unit in which so many bytes are written."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return unit, factor
    return "B", 1


def loss_by_bytes(points: Sequence[CurvePoint]) -> Options:
    """Losses over the bytes that the nodes' links have carried."""
    unit, factor = byte_unit(points[-1].nbytes if points else 0)
    x = _axis(f"{unit} over all nodes' links", type="value", min=0, max="dataMax")
    x["axisLabel"] = {**x["axisLabel"], "showMaxLabel": False}
    return _losses("Loss over bytes", x, [(round(p.nbytes / factor, 4), p) for p in points])


def timeline(rounds: Sequence[RoundView]) -> Options:
    """The phases of the last rounds as stacked bars, in seconds."""
    parts = (
        ("computing, until the first contribution", TRAINING, [r.training for r in rounds]),
        ("exchanging, until the commit", CLOSING, [r.closing for r in rounds]),
        ("between rounds", BETWEEN, [r.between if math.isfinite(r.between) else 0.0 for r in rounds]),
    )
    series = [
        {
            "name": name,
            "type": "bar",
            "stack": "round",
            "data": [round(value, 4) for value in values],
            "itemStyle": {"color": color},
            "barCategoryGap": "22%",
            "emphasis": {"disabled": True},
        }
        for name, color, values in parts
    ]
    x = _axis("round", type="category", data=[r.round + 1 for r in rounds])
    return _chart("Phases of the last rounds", x, _axis("", type="value"), series)
