"""What a check of `atoll doctor` has found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warn", "bad"]


@dataclass(frozen=True)
class Finding:
    """What a check has found, and what to do about it; ``ok`` needs no advice."""

    level: Level
    text: str
    advice: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """In the order in which people should read them."""
    return sorted(findings, key=lambda finding: ("bad", "warn", "ok").index(finding.level))
