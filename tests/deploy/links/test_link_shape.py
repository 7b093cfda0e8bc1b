from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.links.commands import emulator, token_bucket
from deploy.links.shape import FASTEST, LONGEST, SLOWEST, Shape


def test_texts_are_read_with_their_units() -> None:
    shape = Shape.parse("10gbit", "40ms", "2ms", "1%")
    assert shape == Shape(rate=10**10, delay=0.04, jitter=0.002, loss=0.01)
    assert str(shape) == "10 Gbit/s, 40 ms ± 2 ms delay, 1 % loss"
    assert Shape.parse(loss="0.005").loss == 0.005


def test_nothing_given_is_an_open_link() -> None:
    assert Shape.parse() == Shape() == Shape.parse("unlimited", " ", "", "")
    assert not Shape() and str(Shape()) == "not shaped"
    assert Shape(rate=SLOWEST) and not Shape(rate=SLOWEST).held
    assert Shape(loss=0.1) and Shape(loss=0.1).held


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("fast",), "'20 Mbit/s'"),
        (("10 Mb/s",), "bits or bytes"),
        (("1bit",), "between 8 kbit/s"),
        (("", "40"), "between 0 and 10 s"),  # a bare number is seconds
        (("", "10ms", "20ms"), "before they were sent"),
        (("", "", "5ms"), "before they were sent"),
        (("", "", "", "101%"), "share between 0 and 1"),
        (("", "", "", "-1%"), "share of packets"),
        (("", "", "", "a bit"), "'1%' or '0.01'"),
    ],
)
def test_what_no_link_has_is_refused_in_words(texts: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Shape.parse(*texts)


SHAPES = st.builds(
    lambda rate, delay, part, loss: Shape(rate, delay, delay * part, loss),
    st.none() | st.integers(SLOWEST, FASTEST),
    st.floats(0, LONGEST),
    st.floats(0, 1),
    st.floats(0, 1),
)


@given(SHAPES)
def test_a_netem_queue_holds_what_is_under_way(shape: Shape) -> None:
    words = emulator(shape)
    limit = int(words[words.index("limit") + 1])
    assert limit >= (shape.rate or 0) * (shape.delay + shape.jitter) / 8 / 1500
    assert ("delay" in words) == bool(shape.delay) and ("loss" in words) == bool(shape.loss)


@given(st.integers(SLOWEST, FASTEST), st.integers(82, 9014))
def test_every_frame_fits_into_the_bucket(rate: int, frame: int) -> None:
    words = token_bucket(rate, frame)
    burst = int(words[words.index("burst") + 1])
    assert words[2] == f"{rate}bit"
    assert burst >= 3 * frame and burst >= rate // 8 // 500
    assert rate < 50_000_000 or burst >= 65536


def test_a_fast_link_queues_for_less_time() -> None:
    assert token_bucket(1_000_000_000)[-1] == "50ms"
    assert token_bucket(10_000_000_000)[-1] == "20ms"
