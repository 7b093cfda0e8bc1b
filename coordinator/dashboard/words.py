"""Numbers as people read them."""

from __future__ import annotations

import datetime
import math
from typing import Final

from protos.units import format_bytes, format_duration

MISSING: Final = "–"


def number(value: float, digits: int = 3) -> str:
    """With so many decimals, or a dash where nothing was measured."""
    return f"{value:.{digits}f}" if math.isfinite(value) else MISSING


def percent(value: float) -> str:
    """A share of 1, or a dash."""
    return f"{100 * value:.1f} %" if math.isfinite(value) else MISSING


def rate(value: float) -> str:
    """Bytes per second."""
    return f"{format_bytes(round(value))}/s" if value >= 0.5 else "0 B/s"


def duration(seconds: float) -> str:
    """Seconds, or a dash."""
    return format_duration(seconds) if math.isfinite(seconds) else MISSING


def clock(at: float) -> str:
    """Time of day, UTC, of seconds since 1970."""
    return datetime.datetime.fromtimestamp(at, datetime.timezone.utc).strftime("%H:%M:%S")
