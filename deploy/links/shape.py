"""What one direction of a link lets through: rate, delay, jitter, loss."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from protos.units import UnitError, format_duration, format_rate, parse_duration, parse_rate

SLOWEST: Final = 8_000  # bit/s; a frame of 1500 bytes takes 1.5 s
FASTEST: Final = 10**12
LONGEST: Final = 10.0  # seconds; a bare number is read as seconds, and nobody means 40 of them
_PERCENT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(%?)\s*")


@dataclass(frozen=True)
class Shape:
    """One direction of a link. The default lets everything through at once.

    Attributes:
        rate: bits per second, with Ethernet headers; ``None`` if not limited.
        delay: seconds one way.
        jitter: seconds by which the delay is longer or shorter at random; never more than the delay.
        loss: share of the packets that get lost, 0 to 1.

    Raises:
        ValueError: a value that no link has.
    """

    rate: int | None = None
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if self.rate is not None and not SLOWEST <= self.rate <= FASTEST:
            limits = f"{format_rate(SLOWEST)} and {format_rate(FASTEST)}"
            raise ValueError(f"a rate of {self.rate} bit/s; it must lie between {limits}")
        for name, value in (("delay", self.delay), ("jitter", self.jitter)):
            if not (math.isfinite(value) and 0 <= value <= LONGEST):
                raise ValueError(f"a {name} of {value:g} s; it must lie between 0 and {LONGEST:g} s")
        if self.jitter > self.delay:
            raise ValueError(
                f"a jitter of {format_duration(self.jitter)} around {format_duration(self.delay)} of delay: "
                "packets would arrive before they were sent; raise the delay or lower the jitter"
            )
        if not 0 <= self.loss <= 1:
            raise ValueError(
                f"a loss of {self.loss:g}; it must be a share between 0 and 1, or '0%' to '100%'"
            )

    @classmethod
    def parse(cls, rate: str = "", delay: str = "", jitter: str = "", loss: str = "") -> Shape:
        """Read ``"10gbit"``, ``"40ms"``, ``"2ms"``, ``"1%"``; an empty text leaves the default.

        Raises:
            ValueError: a text that is not such a quantity, or a value that no link has.
        """
        return cls(
            rate=None if rate.strip().lower() in ("", "unlimited") else parse_rate(rate),
            delay=parse_duration(delay) if delay.strip() else 0.0,
            jitter=parse_duration(jitter) if jitter.strip() else 0.0,
            loss=_share(loss) if loss.strip() else 0.0,
        )

    @property
    def held(self) -> bool:
        """Whether packets must be held back or lost at random, which a rate alone does not need."""
        return bool(self.delay or self.jitter or self.loss)

    def __bool__(self) -> bool:
        return self.rate is not None or self.held

    def __str__(self) -> str:
        words = [format_rate(self.rate)] if self.rate is not None else []
        if self.delay:
            spread = f" ± {format_duration(self.jitter)}" if self.jitter else ""
            words.append(f"{format_duration(self.delay)}{spread} delay")
        if self.loss:
            words.append(f"{self.loss * 100:.6g} % loss")
        return ", ".join(words) or "not shaped"


OPEN: Final = Shape()


def _share(text: str) -> float:
    match = _PERCENT.fullmatch(text)
    if match is None:
        raise UnitError(f"{text!r} is not a share of packets; write for example '1%' or '0.01'")
    return float(match[1]) / 100 if match[2] else float(match[1])
