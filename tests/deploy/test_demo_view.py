from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from deploy.demo_view import line, outlook, pace, spark, view
from deploy.history import WINDOW_SECONDS, History
from deploy.table import MISSING
from protos import atoll_pb2 as pb

PARAMETERS = 8 * 512 * 10
PAYLOAD = PARAMETERS // 8


def _reply(rounds: int, first: int = 0) -> pb.StatusReply:
    """A run of 3 nodes after ``rounds`` rounds that shows its curve from ``first`` on."""
    return pb.StatusReply(
        phase="training",
        round=rounds,
        rounds=100,
        parameters=PARAMETERS,
        payload_bytes=PAYLOAD,
        agreement=0.75,
        nodes=[
            pb.NodeStatus(
                node=f"node-{i}",
                name=f"island-{i}",
                state="active",
                round=rounds - 1,
                loss=2.0 + i,
                bytes_up=rounds * PAYLOAD,
                bytes_down=rounds * PAYLOAD,
                compute_share=0.9,
            )
            for i in range(3)
            if rounds
        ],
        curve=[
            pb.Curve(
                round=r,
                loss=5.0 / (1 + r),
                validation_loss=4.0 if r % 8 == 0 else math.nan,
                bits_per_byte=5.77 if r % 8 == 0 else math.nan,
                tokens=(r + 1) * 600,
            )
            for r in range(first, rounds)
        ],
    )


def _history() -> History:
    history = History()
    history.add(_reply(10), 100.0)
    history.add(_reply(20, first=5), 102.0)
    return history


def test_the_curve_is_put_together_from_tails() -> None:
    history = _history()
    assert [point.round for point in history.points] == list(range(20))
    assert [point.round for point in history.checks] == [0, 8, 16]
    assert history.loss == pytest.approx(5.0 / 20)


def test_pace() -> None:
    history = _history()
    assert history.rounds_per_second == pytest.approx(5.0)
    assert pace(history) == "5.0 rounds/s, 16 s left"
    assert history.tokens_per_second == pytest.approx(10 * 600 / 2.0)
    for second in range(1, 40):
        history.add(_reply(20 + 2 * second), 102.0 + second)
    assert history.rounds_per_second == pytest.approx(2.0), f"of the last {WINDOW_SECONDS} s only"


def test_rounds_that_take_longer_than_the_window_have_a_pace() -> None:
    history = History()
    for second in range(61):  # a round every 20 s, after 40 s for the processes to come up
        history.add(_reply(0 if second < 40 else 1), float(second))
    assert math.isnan(history.rounds_per_second), "the start is no round"
    for second in range(61, 125):
        history.add(_reply(1 + (second - 40) // 20), float(second))
    assert history.rounds_per_second == pytest.approx(1 / 20)
    assert pace(history) == "0.1 rounds/s, 31 min 40 s left"


def test_a_long_demo_says_how_long_it_will_take() -> None:
    history = History()
    for index in range(1, 4):
        history.add(_reply(index), 20.0 * index)
    told = outlook(history, baseline=True)
    assert told.startswith("a round takes 20 s: the 97 rounds that are left take about 32 min 20 s, and the")
    assert told.endswith("; --rounds or --no-baseline makes it shorter")
    assert "single process" not in outlook(history, baseline=False)
    assert outlook(_history(), baseline=True) == "", "16 s are not worth a word"
    assert outlook(History(), baseline=True) == ""


def test_the_pace_of_a_run_that_is_done_is_that_of_all_of_it() -> None:
    history, reply = _history(), _reply(100, first=20)
    reply.phase, reply.seconds = "done", 25.0
    history.add(reply, 190.0)
    assert history.rounds_per_second == pytest.approx(4.0)
    assert history.tokens_per_second == pytest.approx(100 * 600 / 25.0)


def test_bytes_are_those_counted_at_the_nodes() -> None:
    traffic = _history().traffic
    assert traffic is not None
    assert traffic.bits_per_parameter == pytest.approx(2.0)
    assert traffic.ring_up == pytest.approx(8 * PARAMETERS * 2 / 3)
    assert _history().compute_share == pytest.approx(0.9)


def test_before_the_first_report_nothing_is_claimed() -> None:
    history = History()
    history.add(_reply(0), 0.0)
    assert history.traffic is None and math.isnan(history.loss) and math.isnan(history.rounds_per_second)
    assert "nan" not in line(history) and MISSING in line(history)
    assert pace(history) == ""


@pytest.mark.parametrize("width", [80, 100, 200])
def test_the_view_fits_the_terminal(width: int) -> None:
    console = Console(width=width, no_color=True, color_system=None)
    with console.capture() as capture:
        console.print(view(_history(), "atoll demo"))
    text = capture.get()
    assert max(map(len, text.splitlines())) <= width
    for expected in ("atoll demo", "round 20/100", "island-2", "75.0 %", "0.250"):
        assert expected in text
    if width >= 100:
        assert "5.12 kB sent, 5.12 kB received (1.00 + 1.00 bits a parameter)" in text
        assert "218 kB sent, as much received: 43 times as much" in text
        assert "5.770 bits per byte, 4.000 nats (round 17)" in text


def test_the_line() -> None:
    text = line(_history())
    assert "\n" not in text
    assert text.startswith(
        "round 20/100 loss 0.250 validation 5.770 bits/byte 10.2 kB/step 2.00 bits/parameter"
    )


@given(st.lists(st.floats(allow_nan=True), max_size=300), st.integers(1, 60))
def test_a_spark_has_a_block_for_each_value_up_to_its_width(values: list[float], width: int) -> None:
    values = [value if abs(value) < 1e300 else math.nan for value in values]
    finite = [value for value in values if math.isfinite(value)]
    text = spark(values, width)
    assert len(text) == min(width, len(finite))
    assert set(text) <= set("▁▂▃▄▅▆▇█")


def test_a_falling_curve_falls() -> None:
    assert spark([3.0, 2.0, 1.0], 3) == "█▅▁"
    assert spark([2.0, 2.0], 9) == "▁▁"
