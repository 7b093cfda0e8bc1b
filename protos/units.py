"""Units for people: bytes, bit rates, durations and counts as text, and back.

Formatting keeps three significant digits; parsing takes what formatting writes and the usual spellings of it.
Bytes are decimal (1 MB = 10^6 bytes) when written; the binary units (MiB) are understood when read.
"""

from __future__ import annotations

import math
import re
from typing import Final

BYTES: Final[dict[str, int]] = {
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "TiB": 1 << 40,
    "PiB": 1 << 50,
}
BITS_PER_SECOND: Final[dict[str, int]] = {
    "bit/s": 1,
    "kbit/s": 10**3,
    "Mbit/s": 10**6,
    "Gbit/s": 10**9,
    "Tbit/s": 10**12,
}
_COUNTS: Final[dict[str, int]] = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
SECONDS: Final[dict[str, float]] = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}

_NUMBER: Final = r"[0-9](?:[0-9_]*[0-9])?(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
_QUANTITY: Final = re.compile(rf"\s*({_NUMBER})\s*([A-Za-zµ/]*)\s*")
_DURATION_PART: Final = re.compile(rf"\s*({_NUMBER})\s*([A-Za-zµ]+)")
_DECIMAL_BYTES: Final = ("B", "kB", "MB", "GB", "TB", "PB")

_BYTE_UNITS: Final = {name.lower(): factor for name, factor in BYTES.items()} | {
    "": 1,
    "byte": 1,
    "bytes": 1,
    **{letter: factor for letter, factor in zip("kmgtp", (10**3, 10**6, 10**9, 10**12, 10**15), strict=True)},
}
_RATE_UNITS: Final = {
    spelling: factor
    for prefix, factor in (("", 1), ("k", 10**3), ("m", 10**6), ("g", 10**9), ("t", 10**12))
    for spelling in (f"{prefix}bit/s", f"{prefix}bit", f"{prefix}bps")
} | {f"{name.lower()}/s": factor * 8 for name, factor in BYTES.items()}
_TIME_UNITS: Final = SECONDS | {
    "µs": 1e-6,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "m": 60.0,
    "minute": 60.0,
    "minutes": 60.0,
    "hour": 3600.0,
    "hours": 3600.0,
    "day": 86400.0,
    "days": 86400.0,
}


class UnitError(ValueError):
    """A quantity that cannot be read; the text quotes it and shows spellings that work."""


def _three_digits(value: float) -> str:
    """``value`` >= 0 to three significant digits, without an exponent and without trailing zeros."""
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(value))
    if decimals <= 0:
        return f"{value:.0f}"
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".")


def _scaled(value: float, units: tuple[str, ...], step: float) -> str:
    """``value`` with the largest of ``units``, each ``step`` times the last, that leaves it at 1 or more."""
    index = 0
    while index + 1 < len(units) and float(f"{value:.3g}") >= step:
        value /= step
        index += 1
    return f"{_three_digits(float(f'{value:.3g}') if value < 1000 else value)} {units[index]}"


def _magnitude(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise UnitError(f"{what} must be a finite number, not {value}")
    return abs(value)


def format_bytes(count: float) -> str:
    """Bytes as text, decimal units: ``5057320`` becomes ``"5.06 MB"``. Negative differences keep their minus.

    Raises:
        UnitError: ``count`` is NaN or infinite.
    """
    text = _scaled(_magnitude(count, "a number of bytes"), _DECIMAL_BYTES, 1000)
    return f"-{text}" if count < 0 else text


def format_rate(bits_per_second: float) -> str:
    """A bit rate as text: ``2e7`` becomes ``"20 Mbit/s"``.

    Raises:
        UnitError: not a finite number, or negative.
    """
    if bits_per_second < 0:
        raise UnitError(f"a rate cannot be negative: {bits_per_second}")
    return _scaled(_magnitude(bits_per_second, "a rate"), tuple(BITS_PER_SECOND), 1000)


def format_duration(seconds: float) -> str:
    """Seconds as text: ``"850 ms"``, ``"4.2 s"``, ``"1 min 5 s"``, ``"2 h 3 min"``, ``"3 d 4 h"``.

    Below a minute three significant digits; from a minute on two neighbouring whole units, rounded.

    Raises:
        UnitError: not a finite number.
    """
    value = _magnitude(seconds, "a duration")
    sign = "-" if seconds < 0 else ""
    if float(f"{value:.3g}") < 1:
        for unit in ("ms", "us", "ns"):
            scaled = value / SECONDS[unit]
            if float(f"{scaled:.3g}") >= 1 or unit == "ns":
                if value == 0:
                    return "0 s"
                return f"{sign}{_three_digits(float(f'{scaled:.3g}'))} {unit}"
    if value < 59.95:
        return f"{sign}{_three_digits(float(f'{value:.3g}'))} s"
    big, small = "min", "s"
    if round(value) >= 3600:
        big, small = "h", "min"
    if round(value / 60) >= 24 * 60:
        big, small = "d", "h"
    whole, rest = divmod(round(value / SECONDS[small]), round(SECONDS[big] / SECONDS[small]))
    return f"{sign}{whole} {big} {rest} {small}" if rest else f"{sign}{whole} {big}"


def _quantity(text: str, units: dict[str, int], what: str, examples: str) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise UnitError(f"{text!r} is not {what}; write for example {examples}")
    number, unit = match.groups()
    factor = units.get(unit.lower())
    if factor is None:
        wrong = f"unknown unit {unit!r}" if unit else "there is no unit"
        raise UnitError(f"{text!r}: {wrong} for {what}; write for example {examples}")
    digits = number.replace("_", "")
    return int(digits) * factor if digits.isdigit() else float(digits) * factor


def parse_bytes(text: str) -> int:
    """Read a number of bytes: ``"64MiB"``, ``"1.5 GB"``, ``"512k"``, ``"4096"``. Rounded to a whole byte.

    Raises:
        UnitError: not a number with a unit of bytes.
    """
    return round(_quantity(text, _BYTE_UNITS, "a number of bytes", "'64MiB', '1.5 GB' or '4096'"))


def parse_rate(text: str) -> int:
    """Read a rate into whole bits per second: ``"20 Mbit/s"``, ``"20mbit"``, ``"2.5Gbps"``, ``"100 MB/s"``.

    Raises:
        UnitError: not a number with a unit of bits or bytes per second.
    """
    if re.search(
        r"i?b/s\s*$", text
    ):  # lower-case b: bits to some, bytes to others, and a factor of 8 between them
        raise UnitError(f"{text!r} may mean bits or bytes; write 'Mbit/s' or 'MB/s'")
    return round(_quantity(text, _RATE_UNITS, "a rate", "'20 Mbit/s', '20mbit' or '100 MB/s'"))


def parse_duration(text: str) -> float:
    """Read a duration into seconds: ``"90s"``, ``"1 min 30 s"``, ``"1h30m"``, ``"250ms"``, ``"1.5"``.

    Raises:
        UnitError: not a number, or not a sequence of numbers with units of time from large to small.
    """
    bare = text.strip()
    if re.fullmatch(_NUMBER, bare):
        return float(bare.replace("_", ""))
    total, position, previous = 0.0, 0, math.inf
    while position < len(bare):
        match = _DURATION_PART.match(bare, position)
        if match is None:
            raise UnitError(f"{text!r} is not a duration; write for example '60s', '1 min 30 s' or '250ms'")
        number, unit = match.groups()
        factor = _TIME_UNITS.get(unit.lower())
        if factor is None:
            raise UnitError(f"{text!r}: unknown unit of time {unit!r}; write ms, s, min, h or d")
        if factor >= previous:
            raise UnitError(f"{text!r}: write each unit of time once, from large to small")
        total += float(number.replace("_", "")) * factor
        position, previous = match.end(), factor
    if position == 0:
        raise UnitError("an empty text is not a duration; write for example '60s'")
    return total


def format_count(count: float) -> str:
    """A number of things as text, three significant digits: ``719_650_816`` becomes ``"720M"``.

    Raises:
        UnitError: NaN or infinite, or negative.
    """
    if count < 0:
        raise UnitError(f"a count cannot be negative: {count}")
    return _scaled(_magnitude(count, "a count"), ("", "k", "M", "B", "T"), 1000).replace(" ", "")


def parse_count(text: str) -> int:
    """Read a number of things: ``"720M"``, ``"1.5B"``, ``"117_056"``. Rounded to a whole number.

    Raises:
        UnitError: not a number with k, M, B (10^9) or T.
    """
    return round(_quantity(text, _COUNTS, "a count", "'720M', '1.5B' or '117056'"))
