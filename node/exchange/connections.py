"""How a node is connected, for those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Connections:
    """At one moment.

    Attributes:
        node: its name within the run; empty before it has joined.
        ways: how many other nodes were last called by each way.
        uplink, downlink: bytes per second that its link carries, as its transfers have shown or its user
            has said; ``None``: not known.
    """

    node: str = ""
    ways: Mapping[str, int] = field(default_factory=dict)
    uplink: float | None = None
    downlink: float | None = None
