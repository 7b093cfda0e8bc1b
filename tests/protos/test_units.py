"""Units: what is written can be read again, and what cannot be read is refused with an example."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.units import (
    UnitError,
    format_bytes,
    format_count,
    format_duration,
    format_rate,
    parse_bytes,
    parse_count,
    parse_duration,
    parse_rate,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (999.9, "1 kB"),
        (1000, "1 kB"),
        (5_057_320, "5.06 MB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (15_500_000, "15.5 MB"),
        (4_000_000_000, "4 GB"),
        (-2_500_000, "-2.5 MB"),
        (12_345 * 10**15, "12345 PB"),
    ],
)
def test_bytes_are_written_with_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("64MiB", 64 << 20),
        ("1.5 GB", 1_500_000_000),
        ("512k", 512_000),
        (" 2 kib ", 2048),
        ("1_000 B", 1000),
        ("1e3", 1000),
        ("9007199254740993 B", 9007199254740993),
    ],
)
def test_bytes_are_read_in_usual_spellings(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("bits", "text"), [(0, "0 bit/s"), (56_000, "56 kbit/s"), (2e7, "20 Mbit/s"), (2.5e9, "2.5 Gbit/s")]
)
def test_rates_are_written_in_bits(bits: float, text: str) -> None:
    assert format_rate(bits) == text


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("20 Mbit/s", 20_000_000),
        ("20mbit", 20_000_000),
        ("2.5Gbps", 2_500_000_000),
        ("100 MB/s", 800_000_000),
        ("1 MiB/s", 8 << 20),
        ("9600 bit/s", 9600),
    ],
)
def test_rates_are_read_in_usual_spellings(text: str, bits: int) -> None:
    assert parse_rate(text) == bits


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-9, "2.5 ns"),
        (1e-12, "0.001 ns"),
        (0.000_25, "250 us"),
        (0.85, "850 ms"),
        (0.9999, "1 s"),
        (4.2, "4.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (65, "1 min 5 s"),
        (3599.6, "1 h"),
        (7380, "2 h 3 min"),
        (86_399, "1 d"),
        (100 * 86_400 + 3600, "100 d 1 h"),
        (-90, "-1 min 30 s"),
    ],
)
def test_durations_are_written_in_two_units_at_most(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.5", 1.5),
        ("90s", 90),
        ("1 min 30 s", 90),
        ("1h30m", 5400),
        ("250ms", 0.25),
        ("2 days", 172_800),
        ("10 µs", 1e-5),
        ("1e-3 s", 1e-3),
    ],
)
def test_durations_are_read_in_usual_spellings(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "MB", "1,5 GB", "-3 MB", "3 parsecs", "0x10", "nan", "inf B", "1 MB 2 kB"]
)
def test_what_is_not_a_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UnitError, match="64MiB"):
        parse_bytes(text)


def test_a_rate_that_may_be_bits_or_bytes_is_refused() -> None:
    for text in ("20 Mb/s", "20mb/s"):
        with pytest.raises(UnitError, match="may mean bits or bytes"):
            parse_rate(text)


@pytest.mark.parametrize(
    "text", ["", " ", "s", "-1 s", "1 s 2", "1 s 2 s", "5 s 1 min", "soon", "1 fortnight"]
)
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(UnitError):
        parse_duration(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(value: float) -> None:
    for write in (format_bytes, format_rate, format_duration):
        with pytest.raises(UnitError):
            write(value)


@given(st.integers(0, 10**20))
def test_bytes_round_trip_within_their_digits(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=5.1e-3)


@given(st.integers(0, 999))
def test_small_counts_round_trip_exactly(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count
    assert parse_rate(format_rate(count)) == count


@given(st.floats(0, 1e15))
def test_rates_round_trip_within_their_digits(bits: float) -> None:
    assert parse_rate(format_rate(bits)) == pytest.approx(bits, rel=5.1e-3, abs=0.6)


@given(st.floats(1e-9, 1e9))
def test_durations_round_trip_within_their_digits(seconds: float) -> None:
    # Below a minute three digits; above it half of the smaller unit: at worst 0.5 h of a day.
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=2.2e-2)


@given(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9))
def test_a_longer_duration_never_reads_shorter(first: float, second: float) -> None:
    short, long = sorted((first, second))
    assert parse_duration(format_duration(short)) <= parse_duration(format_duration(long)) * (1 + 1e-12)


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (parse_bytes, parse_rate, parse_duration):
        try:
            assert read(text) >= 0
        except UnitError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("720M", 720_000_000),
        ("1.5B", 1_500_000_000),
        ("1.5 g", 1_500_000_000),
        ("117_056", 117_056),
        ("3k", 3000),
    ],
)
def test_counts_are_read(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "M", "-3M", "3 apples", "3 MB"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match="'720M'"):
        parse_count(text)


@given(st.integers(0, 10**15))
def test_a_written_count_reads_as_nearly_the_same(count: int) -> None:
    assert parse_count(format_count(count)) == pytest.approx(count, rel=6e-3)
    assert " " not in format_count(count)


def test_a_count_is_not_negative() -> None:
    with pytest.raises(UnitError, match="negative"):
        format_count(-1)
