"""The map, the charts, the tiles and the tables of the page, from made-up snapshots."""

from __future__ import annotations

import itertools
import json
import math

import pytest

from coordinator.dashboard import charts, rows
from coordinator.dashboard.recorder import CurvePoint, EventView, RoundView
from coordinator.dashboard.scene import CARD, CARDS, Scene, scene
from coordinator.dashboard.snapshot import COORDINATOR, LinkView
from coordinator.dashboard.tiles import tiles
from tests.coordinator.dashboard.dashboard_rig import STRANGER, node_view, snapshot


def star(count: int) -> Scene:
    nodes = tuple(node_view(index) for index in range(count))
    links = tuple(LinkView(f"node-{i}", COORDINATOR, 100.0 * i, 50.0, "coordinator") for i in range(count))
    return scene(snapshot(nodes=nodes, links=links))


@pytest.mark.parametrize("count", range(1, CARDS + 1))
def test_cards_lie_within_the_drawing_and_apart(count: int) -> None:
    drawn = star(count)
    cards = [mark for mark in drawn.marks if mark.shape == "card"]
    assert len(cards) == count and len(drawn.lines) == count
    for mark in cards:
        assert CARD[0] / 2 <= mark.x <= drawn.width - CARD[0] / 2
        assert CARD[1] / 2 <= mark.y <= drawn.height - CARD[1] / 2
    for one, other in itertools.combinations(drawn.marks, 2):
        assert abs(one.x - other.x) > CARD[0] or abs(one.y - other.y) > CARD[1], (one.id, other.id)


@pytest.mark.parametrize("count", [CARDS + 1, 50, 100])
def test_many_nodes_stand_on_a_ring_with_room_for_their_names(count: int) -> None:
    drawn = star(count)
    dots = [mark for mark in drawn.marks if mark.shape == "dot"]
    assert len(dots) == count and all(mark.text for mark in dots)
    nearest = min(math.hypot(a.x - b.x, a.y - b.y) for a, b in itertools.combinations(dots, 2))
    assert nearest > 13, "a line of text apart"
    assert all(-90.01 <= mark.angle <= 90.01 for mark in dots if mark.anchor == "start")


def test_a_link_is_wider_the_more_it_carries() -> None:
    drawn = star(4)
    widths = [line.width for line in drawn.lines]
    assert widths == sorted(widths) and widths[0] < widths[-1]
    assert drawn.lines[2].label == "↑ 200 B/s  ↓ 50 B/s" and drawn.lines[2].moving
    idle = scene(snapshot(links=(LinkView("node-0", COORDINATOR, 0.0, 0.0, "coordinator"),)))
    assert not idle.lines[0].moving


def test_two_directions_between_two_nodes_are_one_line() -> None:
    links = (
        LinkView("node-0", "node-1", 10.0, 20.0, "direct"),
        LinkView("node-1", "node-0", 1.0, 2.0, "direct"),
    )
    (line,) = scene(snapshot(links=links)).lines
    assert "12 B/s from node-0, 21 B/s to it" in line.title and line.kind == "direct"


def test_who_has_left_is_not_on_the_map() -> None:
    gone = node_view(1, state="left")
    links = (LinkView("node-1", COORDINATOR, 1.0, 1.0, "coordinator"),)
    drawn = scene(snapshot(nodes=(node_view(0), gone), links=links))
    assert [mark.id for mark in drawn.marks] == [COORDINATOR, "node-0"] and not drawn.lines


def test_everything_is_json() -> None:
    """And names of strangers stay what they are: text."""
    nodes = (node_view(0, name=STRANGER, loss=math.nan, agreement=math.nan, lag=None, trained=-1),)
    event = EventView(0, 0.0, "nodes", f"node-0 ({STRANGER}) has joined")
    view = snapshot(nodes=nodes, events=(event,), loss=math.nan, pace=math.nan, agreement=math.nan)
    for values in (
        scene(view).plain(),
        rows.node_rows(view),
        rows.facts(view.nodes[0]),
        rows.event_rows(view, rows.ALL, ""),
        charts.loss_by_round((CurvePoint(0, 1, math.nan, math.nan),)),
    ):
        json.dumps(values, allow_nan=False)
    assert rows.node_rows(view)[0]["name"] == STRANGER


def test_tiles() -> None:
    found = {tile.id: tile for tile in tiles(snapshot(validation_loss=2.75, bits_per_byte=1.5))}
    assert (found["round"].value, found["round"].share) == ("7 / 20", 0.35)
    assert found["round"].detail == "2 s each · 26 s left"
    assert (found["loss"].value, found["loss"].detail) == ("2.500", "val. 2.750 · 1.500 bits/byte")
    assert (found["agreement"].value, found["nodes"].detail) == ("75.0 %", "2 active")
    assert (found["traffic"].value, found["traffic"].detail) == ("900 B/s", "10 kB in · 20 kB out")
    assert found["payload"].detail == "32× less than fp32 gradients"
    assert [tile.id for tile in tiles(None)] == list(found)


def test_charts() -> None:
    points = (CurvePoint(0, 1_000_000, 4.0, math.nan), CurvePoint(1, 2_500_000, 3.5, 3.6))
    by_round, by_bytes = charts.loss_by_round(points), charts.loss_by_bytes(points)
    assert [series["data"] for series in by_round["series"]] == [[[1, 4.0], [2, 3.5]], [[2, 3.6]]]
    assert by_bytes["xAxis"]["name"] == "MB over all nodes' links"
    assert [series["data"] for series in by_bytes["series"]] == [[[1.0, 4.0], [2.5, 3.5]], [[2.5, 3.6]]]
    round_view = RoundView(0, 0.0, math.nan, 1.5, 0.5, 3, 3, 128, 0.75, "all are in")
    bars = charts.timeline((round_view, RoundView(1, 2.0, 0.25, 1.0, 0.5, 3, 3, 128, 0.75, "all are in")))
    assert [series["data"] for series in bars["series"]] == [[1.5, 1.0], [0.5, 0.5], [0.0, 0.25]]
    assert bars["xAxis"]["data"] == [1, 2]


def test_events_are_filtered() -> None:
    kinds = ("rounds", "nodes", "admin", "rounds")
    events = tuple(EventView(9 - i, float(i), kind, f"Event {i}") for i, kind in enumerate(kinds))
    view = snapshot(events=events)

    def texts(kind: str, text: str = "") -> list[str]:
        return [row["text"] for row in rows.event_rows(view, kind, text)]

    assert texts(rows.ALL) == ["Event 0", "Event 1", "Event 2", "Event 3"]
    assert texts(rows.FEW) == ["Event 1", "Event 2"]
    assert texts("rounds", " event 3 ") == ["Event 3"]


def test_lag_in_words() -> None:
    assert [rows.lag(node_view(lag=lag)) for lag in (0, 1, 1200, None)] == [
        "up to date",
        "1 round",
        "1,200 rounds",
        "–",
    ]
    assert rows.lag(node_view(state="left", lag=None)) == "gone"
