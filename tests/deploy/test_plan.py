"""The arithmetic of `atoll plan`: seconds, utilisation, and the recommendation with its reason."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.costs import Costs
from deploy.memory import StateBytes
from deploy.plan import HEADERS, Estimate, Offer, Situation, both_ways, bottleneck, estimate, recommend
from deploy.ranking import CANDIDATES
from protos.buckets import Bucket, BucketTable, TableSchedule
from protos.method_section import MethodConfig
from protos.methods import PRESETS
from protos.upload import chunk_bytes

MEGABIT = 1_000_000
SITUATION = Situation(
    nodes=4,
    uplink=8 * MEGABIT,
    downlink=16 * MEGABIT,
    hub_uplink=1000 * MEGABIT,
    hub_downlink=1000 * MEGABIT,
    step_seconds=2.0,
    latency=0.0,
)


def _table(megabytes_up: int, megabytes_down: int) -> BucketTable:
    """A bucket with so many bytes: bf16 both ways, or int8 up where the result has more."""
    codec = "fp32" if megabytes_up == megabytes_down else "bf16"
    entries = megabytes_up * 1_000_000 // (4 if codec == "fp32" else 2)
    assert megabytes_down in (megabytes_up, 2 * megabytes_up)
    return BucketTable((Bucket.of("w", "mean", [("w", (entries,))], codec=codec, result="fp32"),))


def _offer(
    *tables: BucketTable, steps: int = 1, overlap: int = 0, loss: float = 2.0, label: str = "m"
) -> Offer:
    schedule = TableSchedule(tables, tuple(range(len(tables))))
    return Offer(label, Costs(1_000_000, schedule, steps, StateBytes(8_000_000, 0)), overlap, loss)


def test_a_node_needs_the_longer_of_its_two_ways() -> None:
    even = estimate(_offer(_table(4, 4)), SITUATION)
    chunk = chunk_bytes(4_000_000) / 4_000_000
    assert even.node_seconds == pytest.approx(HEADERS * (4 + chunk * 2), rel=1e-4), "and a chunk at 16 Mbit/s"
    assert even.exchange_seconds == even.node_seconds
    assert even.utilisation == pytest.approx(2 / (2 + even.exchange_seconds))
    wide = estimate(_offer(_table(4, 8)), SITUATION)
    assert wide.node_seconds == pytest.approx(HEADERS * 4 * (1 + chunk), rel=1e-4), "8 MB at 16 Mbit/s"
    slow = estimate(_offer(_table(4, 8)), replace(SITUATION, downlink=8 * MEGABIT))
    assert slow.node_seconds == pytest.approx(HEADERS * (8 + chunk * 4), rel=1e-4), "a chunk up, and all down"


def test_what_fits_into_one_chunk_goes_there_and_back_one_after_the_other() -> None:
    assert both_ways(3.0, 5.0, 1.0) == 8.0
    assert both_ways(3.0, 5.0, 0.0) == 5.0
    small = BucketTable((Bucket.of("w", "mean", [("w", (1024,))], codec="fp32", result="fp32"),))
    one = estimate(_offer(small), replace(SITUATION, downlink=8 * MEGABIT))
    assert one.node_seconds == pytest.approx(2 * HEADERS * 8 * 4096 / (8 * MEGABIT))


def test_the_coordinator_carries_the_bytes_of_all_nodes() -> None:
    situation = replace(SITUATION, hub_downlink=8 * MEGABIT)
    one = estimate(_offer(_table(4, 4)), situation)
    chunk = chunk_bytes(4_000_000) / 4_000_000
    assert one.hub_seconds == pytest.approx(4 * HEADERS * 4.0 * (1 + chunk / 125), rel=1e-4)
    assert one.exchange_seconds == one.hub_seconds > one.node_seconds
    assert "--hub 64Mbit/s" in bottleneck([one], situation)
    assert bottleneck([one, estimate(_offer(_table(4, 4)), SITUATION)], situation) == ""
    assert bottleneck([], situation) == ""
    patient = replace(situation, latency=20.0)
    assert bottleneck([estimate(_offer(_table(4, 4)), patient)], patient) == "", "the latency is longer"


def test_steps_share_an_exchange_and_overlap_hides_it() -> None:
    plain = estimate(_offer(_table(4, 4), steps=8), SITUATION)
    assert (plain.compute_seconds, plain.waiting_seconds) == (16.0, plain.exchange_seconds)
    assert plain.utilisation == pytest.approx(16 / (16 + plain.exchange_seconds))
    assert plain.bits == pytest.approx(8 * 4 / 8)
    half = estimate(_offer(_table(4, 4), steps=8, overlap=1), SITUATION)
    assert half.waiting_seconds == pytest.approx(plain.exchange_seconds - 2.0)
    assert half.exchange_seconds == plain.exchange_seconds
    hidden = estimate(_offer(_table(4, 4), steps=8, overlap=3), SITUATION)
    assert (hidden.waiting_seconds, hidden.utilisation) == (0.0, 1.0)


def test_rounds_of_unlike_size_wait_each_for_itself() -> None:
    offer = _offer(_table(1, 1), _table(7, 7), steps=2, overlap=1)
    one = estimate(offer, SITUATION)
    short, long = (estimate(_offer(_table(size, size)), SITUATION).exchange_seconds for size in (1, 7))
    assert one.exchange_seconds == pytest.approx((short + long) / 2)
    assert one.waiting_seconds == pytest.approx((long - 2) / 2), "the short one hides behind a step of 2 s"
    assert one.peak_bytes == pytest.approx(7_000_000, rel=1e-4)


def test_latency_is_part_of_every_exchange() -> None:
    one = estimate(_offer(_table(4, 4)), replace(SITUATION, latency=0.5))
    assert one.exchange_seconds == pytest.approx(0.5 + one.node_seconds)


rates = st.floats(1e3, 1e12)


@given(rates, rates, rates, st.integers(1, 1000), st.integers(1, 500), st.floats(1e-3, 1e3))
def test_utilisation_is_a_share_and_grows_with_bandwidth(
    uplink: float, downlink: float, hub: float, nodes: int, steps: int, step: float
) -> None:
    situation = Situation(nodes, uplink, downlink, hub, hub, step)
    offer = _offer(_table(4, 8), steps=steps)
    one = estimate(offer, situation)
    assert 0 < one.utilisation <= 1
    faster = replace(
        situation, uplink=2 * uplink, downlink=2 * downlink, hub_uplink=2 * hub, hub_downlink=2 * hub
    )
    assert estimate(offer, faster).utilisation >= one.utilisation
    assert estimate(_offer(_table(4, 8), steps=2 * steps), situation).utilisation >= one.utilisation


def _estimate(label: str, loss: float, megabytes: int, steps: int = 1) -> Estimate:
    return estimate(_offer(_table(megabytes, megabytes), steps=steps, loss=loss, label=label), SITUATION)


def test_the_best_measured_method_that_keeps_nodes_busy_is_recommended() -> None:
    found = [
        _estimate("every-step", 1.8, 4),
        _estimate("good", 1.9, 4, steps=32),
        _estimate("better-on-bytes", 2.0, 4, steps=64),
        _estimate("unmeasured", math.nan, 4, steps=512),
    ]
    choice = recommend(found)
    assert choice.label == "good"
    assert "of 2 methods the one with the lowest loss in the benchmark (1.900 nats)" in choice.reason
    assert "93.8 %" in choice.reason
    assert (
        "every-step (1.800) would compute for 32.0 %, as an exchange takes 4.25 s over a node's link"
        in choice.reason
    )
    assert recommend(found, busy=0.3).label == "every-step"
    only = recommend(found, busy=0.95)
    assert only.label == "better-on-bytes" and only.reason.startswith("the only measured method")


def test_where_none_keeps_nodes_busy_the_fewest_bytes_win() -> None:
    choice = recommend([_estimate("a", 1.8, 4), _estimate("b", 1.9, 8, steps=4), _estimate("c", 2.0, 40)])
    assert choice.label == "b", "2 MB a step"
    assert "4 MB a step both ways" in choice.reason and "more local_steps" in choice.reason
    with pytest.raises(ValueError, match="no method"):
        recommend([])


def test_a_method_of_unknown_loss_is_recommended_only_where_no_measured_one_keeps_nodes_busy() -> None:
    found = [
        _estimate("measured", 1.8, 4),
        _estimate("short", math.nan, 4, steps=32),
        _estimate("long", math.nan, 4, steps=64),
    ]
    choice = recommend(found)
    assert choice.label == "long" and "more local_steps" not in choice.reason
    assert "of 2 that do without a measured loss it moves the fewest bytes, 125 kB a step" in choice.reason
    assert "computes for 96.8 %; 'atoll compare' measures its loss" in choice.reason
    assert "this one moves the fewest bytes" in recommend(found[:2]).reason


def test_the_ranking_is_in_order_and_of_methods_that_can_be_chosen() -> None:
    losses = [one.loss for one in CANDIDATES]
    assert losses == sorted(losses)
    assert {one.name for one in CANDIDATES} == set(PRESETS), "every preset is compared"
    for one in CANDIDATES:
        assert MethodConfig.model_validate({"name": one.name, **dict(one.values)}).name == one.name


def test_the_ranking_is_what_the_benchmark_published() -> None:
    path = Path(__file__).parents[2] / "docs" / "results" / "methods.json"
    figures = json.loads(path.read_text())["figures"]
    published = [one for one in CANDIDATES if one.figure in figures]
    assert len(published) >= 3
    for one in published:
        assert one.loss == pytest.approx(figures[one.figure], abs=5e-4), one.label
