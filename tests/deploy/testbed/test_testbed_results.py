from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from deploy.event_log import Line
from deploy.links.shape import Shape
from deploy.testbed.layout import layout
from deploy.testbed.network import Counters
from deploy.testbed.probe import Reading, Rtt
from deploy.testbed.probing import Probes
from deploy.testbed.results import Deed, Results, agreement, metered, rounds_from, summary, utilisation, write


def _opened(index: int, second: int) -> dict[str, Any]:
    return {"time": f"2026-05-01T12:00:{second:02d}.000Z", "event": "RoundOpened", "round": index}


def _committed(index: int, second: int) -> dict[str, Any]:
    return {
        "time": f"2026-05-01T12:00:{second:02d}.000Z",
        "event": "RoundCommitted",
        "round": index,
        "voters": ["a", "b"],
    }


def _done(
    index: int, up: int, loss: float | None, exchange: float, digest: str = "d", **more: Any
) -> dict[str, Any]:
    return {
        "event": "RoundDone",
        "round": index,
        "loss": loss,
        "tokens": 64,
        "counted": True,
        "digest": digest,
        "bytes_up": up,
        "bytes_down": 2 * up,
        "seconds": {"compute": 1.0, "exchange": exchange, "evaluate": 50.0},
        **more,
    }


COORDINATOR = [_opened(0, 10), _committed(0, 20), _opened(1, 20), _committed(1, 24), _committed(2, 28)]
NODES = {
    "site-a": [_done(0, 100, 5.0, 9.0), _done(1, 220, 4.0, 3.0), _done(2, 340, 3.0, 3.0)],
    "site-b": [_done(0, 100, 7.0, 9.0), _done(1, 220, None, 1.0), _done(2, 50, 5.0, 1.0, counted=False)],
}


@pytest.fixture
def results() -> Results:
    rounds, _ = rounds_from(COORDINATOR, NODES)
    bed = layout(2, Shape(rate=10**8, delay=0.04))
    reading = Reading(0.99e8, 1e8, Rtt(0.0805, 0.081, 20, 20))
    return Results(
        run={"method": "sign-muon", "nodes": 2},
        layout=bed,
        probes=Probes(1e10, {"site-a": reading}, {}),
        deeds=[Deed(math.nan, 0, "site-a: cut", "site-a")],
        rounds=rounds,
        agreement=agreement(NODES),
        traffic={"site-a": Counters(360, 700)},
        metered=metered(bed, NODES),
        parameters=1000,
    )


def test_rounds_have_the_coordinators_times_and_the_nodes_bytes() -> None:
    rounds, begun = rounds_from(COORDINATOR, NODES)
    assert begun == Line(1, "", COORDINATOR[0]).at and rounds_from([], {}) == ([], None)
    assert [one.ended for one in rounds] == pytest.approx([10.0, 14.0, 18.0])
    assert [one.seconds for one in rounds] == pytest.approx([10.0, 4.0, 4.0])
    assert [one.tokens for one in rounds] == [128, 128, 64], "who was not counted has read for nothing"
    assert [one.loss for one in rounds] == [6.0, 4.0, 4.0]
    assert [one.nodes["site-a"]["bytes_up"] for one in rounds] == [100, 120, 120]
    assert rounds[2].nodes["site-b"]["bytes_up"] == 50, "another life of the node counts from 0"


def test_the_first_round_is_left_out_of_the_speed(results: Results) -> None:
    assert results.tokens_per_second == pytest.approx(192 / 8)
    assert results.round_seconds == pytest.approx(4.0)
    assert results.utilisation == pytest.approx(4 / 12)


def test_utilisation_leaves_validation_out() -> None:
    assert utilisation([{"compute": 3.0, "exchange": 1.0, "evaluate": 100.0}]) == 0.75
    assert math.isnan(utilisation([]))


def test_states_are_compared_round_by_round() -> None:
    assert agreement(NODES).holds
    other = {**NODES, "site-b": [_done(1, 1, 1.0, 1.0, digest="other")]}
    assert agreement(other).equal == 2 and not agreement(other).holds
    assert not agreement({}).holds


def test_the_json_says_everything_and_no_nan(results: Results) -> None:
    values = json.loads(write(results))
    assert values["links"]["site-a"]["asked"] == {"rate": 10**8, "delay": 0.04, "jitter": 0, "loss": 0}
    assert values["links"]["site-a"]["interface"] == {"sent": 360, "received": 700}
    assert values["links"]["site-a"]["metered"] == {"sent": 340, "received": 680}
    assert values["links"]["site-a"]["probe"]["rtt"]["least"] == 0.0805
    assert values["events"] == [{"seconds": None, "round": 0, "what": "site-a: cut", "link": "site-a"}]
    assert values["shaped"] and values["probed"] and values["digests_equal"]
    assert len(values["rounds"]) == 3


def test_the_summary_shows_links_or_why_there_are_none(results: Results) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(summary(results))
    text = console.export_text()
    assert "100 Mbit/s, 40 ms" in text and "99 Mbit/s" in text and "80.5 ms" in text and "33.3 %" in text
    results.why_plain = "network namespaces need root"
    console.print(summary(results))
    assert "no links: network namespaces need root" in console.export_text()


def test_a_bed_without_rounds_still_has_a_summary() -> None:
    empty = Results(run={"method": "sign-muon", "nodes": 2}, layout=layout(2, Shape()))
    Console(file=io.StringIO()).print(summary(empty))
    assert json.loads(write(empty))["tokens_per_second"] is None
