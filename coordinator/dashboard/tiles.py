"""The figures at the top of the page. Pure."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from coordinator.dashboard.snapshot import Snapshot
from coordinator.dashboard.words import MISSING, duration, number, percent, rate
from protos.units import format_bytes


@dataclass(frozen=True)
class Tile:
    """A figure; ``share`` of 1 is drawn as a bar, ``None`` is not."""

    id: str
    title: str
    value: str = MISSING
    detail: str = ""
    share: float | None = None


def tiles(snapshot: Snapshot | None) -> list[Tile]:
    """Of a run; of none as long as nothing is known."""
    if snapshot is None:
        titles = {
            "round": "Rounds",
            "loss": "Training loss",
            "agreement": "Agreement",
            "nodes": "Nodes",
            "traffic": "Coordinator traffic",
            "payload": "A round at each node",
        }
        return [Tile(name, title) for name, title in titles.items()]
    return [
        Tile(
            "round", "Rounds", f"{snapshot.round:,} / {snapshot.rounds:,}", _pace(snapshot), _done(snapshot)
        ),
        Tile("loss", "Training loss", number(snapshot.loss), _validation(snapshot)),
        Tile("agreement", "Agreement", percent(snapshot.agreement), "votes equal to the result"),
        Tile("nodes", "Nodes", str(snapshot.present), _states(snapshot)),
        Tile(
            "traffic",
            "Coordinator traffic",
            rate(snapshot.rate_in + snapshot.rate_out),
            f"{format_bytes(snapshot.bytes_in)} in · {format_bytes(snapshot.bytes_out)} out",
        ),
        Tile(
            "payload",
            "A round at each node",
            f"↑ {format_bytes(snapshot.payload_bytes)}  ↓ {format_bytes(snapshot.result_bytes)}",
            _against_exact(snapshot),
        ),
    ]


def _done(snapshot: Snapshot) -> float:
    return min(1.0, snapshot.round / snapshot.rounds) if snapshot.rounds else 0.0


def _pace(snapshot: Snapshot) -> str:
    if not math.isfinite(snapshot.pace):
        return f"{duration(snapshot.seconds)} so far" if snapshot.seconds else "not begun"
    left = snapshot.pace * (snapshot.rounds - snapshot.round)
    text = f"{duration(snapshot.pace)} each"
    return f"{text} · {duration(left)} left" if left else f"{text} · {duration(snapshot.seconds)} in all"


def _validation(snapshot: Snapshot) -> str:
    if not math.isfinite(snapshot.validation_loss):
        return "nats per token"
    bits = f" · {number(snapshot.bits_per_byte)} bits/byte" if math.isfinite(snapshot.bits_per_byte) else ""
    return f"val. {number(snapshot.validation_loss)}{bits}"


def _states(snapshot: Snapshot) -> str:
    states = Counter(node.state for node in snapshot.nodes if node.state != "left")
    return " · ".join(f"{count} {state}" for state, count in sorted(states.items())) or "nobody is here"


def _against_exact(snapshot: Snapshot) -> str:
    """Beside the gradients in fp32, which an all-reduce would send and receive."""
    moved = snapshot.payload_bytes + snapshot.result_bytes
    if not moved or not snapshot.parameters:
        return ""
    ratio = 8 * snapshot.parameters / moved
    digits = 0 if ratio >= 10 else 1
    return f"{ratio:,.{digits}f}× less than fp32 gradients"
