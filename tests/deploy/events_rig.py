"""Events of a short run of two nodes, as tests of logs, replay and diagnosis share them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from coordinator import events as of_coordinator
from deploy.event_log import Event, EventLog
from node import events as of_node

BEGIN = 1_777_636_800.0  # 2026-05-01T12:00:00Z
NODES = ("node-0", "node-1")


def done(number: int, digest: str = "", loss: float = 2.0) -> of_node.RoundDone:
    """A round that a node has applied."""
    return of_node.RoundDone(
        round=number,
        rounds=3,
        loss=loss,
        tokens=64,
        counted=True,
        voters=NODES,
        agreement=0.75,
        reason="all 2 contributions are in",
        digest=digest or f"{number:032x}",
        bytes_up=1000,
        bytes_down=1000,
        compute_seconds=0.5,
        busy_seconds=0.6,
        seconds={"compute": 0.5, "exchange": 0.1},
        began=BEGIN + 2 * number,
        spans=(("compute", 0.0, 0.5),),
    )


def of_the_coordinator() -> list[tuple[float, Event]]:
    """Seconds since the beginning, and the event: node-1 leaves in the last of three rounds."""
    told: list[tuple[float, Event]] = [
        (0.0, of_coordinator.NodeJoined("node-0", "reef", "ipv4:192.0.2.7:5000", 0)),
        (0.2, of_coordinator.NodeJoined("node-1", "lagoon", "ipv4:192.0.2.8:5000", 0)),
        (0.5, of_coordinator.RunBegun("r", "sign-muon", 0, 3, NODES, "2 nodes hold the state of round 0")),
    ]
    for index in range(3):
        at, voters = 1.0 + 2 * index, NODES if index < 2 else ("node-0",)
        silent = ("node-1",) if index == 2 else ()
        reason = f"{len(voters)} contributions"
        told += [
            (at, of_coordinator.RoundOpened(index, 1, NODES, (), 60.0, "60 s, the longest")),
            (
                at + 1,
                of_coordinator.RoundCommitted(index, 1, voters, silent, reason, 1.0, 0.1, 1000, 0.75, (1, 1)),
            ),
            *(
                (at + 1.1, of_coordinator.NodeReported(node, index, 2.0 - 0.1 * index, f"{index:032x}"))
                for node in voters
            ),
        ]
    return [
        *told,
        (7.5, of_coordinator.NodeLeft("node-1", "lagoon", "no heartbeat for 15 s", False)),
        (8.0, of_coordinator.CoordinatorStopped("done", "all 3 rounds are committed", 3)),
    ]


def of_a_node(name: str = "node-1", rounds: int = 2) -> list[tuple[float, Event]]:
    """The same of a node's own."""
    return [
        (0.1, of_node.Started("r", "sign-muon", 117_056, 14_656, "cpu", 1, 0)),
        (0.2, of_node.Joined(name, "192.0.2.1:4600", False)),
        *((2.2 + 2 * index, done(index)) for index in range(rounds)),
        (6.5, of_node.Abstained(2, "the gradient is not finite")),
    ]


class Clock:
    """Seconds since 1970, set by hand."""

    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> float:
        return self.now


def write(path: Path, who: str, told: Iterable[tuple[float, Event]]) -> Path:
    """A log of these events."""
    clock = Clock()
    with EventLog(path, who, clock=clock) as log:
        for at, event in told:
            clock.now = BEGIN + at
            log(event)
    return path


EVERY: list[of_coordinator.Event] = [
    of_coordinator.RunBegun("r", "sign-muon", 0, 3, NODES, "2 nodes hold the state of round 0"),
    of_coordinator.RunResumed("r", "sign-muon", 2, 3, NODES, "the journal holds 2 rounds"),
    of_coordinator.NodeJoined("node-0", "reef", "ipv6:%5B::1%5D:5000", 0),
    of_coordinator.NodeRejoined("node-0", "reef", "ipv4:192.0.2.7:5000", 2),
    of_coordinator.NodeLeft("node-0", "reef", "interrupted", True),
    of_coordinator.NodeReported("node-0", 1, 2.5, "ab" * 16, 2.6, 3.7),
    of_coordinator.TopologyMade(3, 1, NODES, "2 nodes reduce, the slowest link takes 0.8 s"),
    of_coordinator.RoundOpened(1, 4, NODES, ("node-1",), 0.7, "0.7 s: median"),
    of_coordinator.RoundCommitted(1, 4, NODES, (), "all 2 contributions are in", 1.5, 0.1, 100, math.nan),
    of_coordinator.CatchUpPlanned(
        "node-2", "load", 7, 1_000_000, "a kept snapshot is cheaper than 900 rounds"
    ),
    of_coordinator.SnapshotBegun("s1", 7, NODES, 1_000_000),
    of_coordinator.SnapshotComplete("s1", 7, 1_000_000, "cd" * 16, 12.0),
    of_coordinator.SnapshotFailed("s1", 7, "node-1 left"),
    of_coordinator.NodeDeviated("node-1", 7, "ab" * 16, "cd" * 16, 2, "2 of 3 nodes hold cd"),
    of_coordinator.DigestAgreed(7, "cd" * 16),
    of_coordinator.JournalTrouble("the disk is full", fatal=True),
    of_coordinator.RunPaused(7, "a planned power cut"),
    of_coordinator.RunUnpaused(7),
    of_coordinator.NodeExpelled("node-1", "reef", "votes nonsense"),
    of_coordinator.TokenAdded("reef", "node", 1.8e9),
    of_coordinator.TokenUsed("reef", "node", "192.0.2.7"),
    of_coordinator.AccessRefused("expired", "reef", "192.0.2.7", "0123456789abcdef", "it expired", 3),
    of_coordinator.TokenEnded("reef", "node", "revoked"),
    of_coordinator.NodeSuspected("node-1", "reef", 7, "warn", "replays", 1.0, "its votes are old: 1.00"),
    of_coordinator.SliceDisputed("node-1", "reef", 7, "disputed", ("node-0",), "they contradict each other"),
    of_coordinator.CoordinatorStopped("suspended", "SIGTERM", 8),
]
