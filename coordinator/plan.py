"""What the coordinator needs to know of a run, without the run file's schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.rounds import Policy

if TYPE_CHECKING:
    from protos.runfile import RunFile


@dataclass(frozen=True)
class RunPlan:
    """A run as the coordinator sees it; durations in seconds.

    Attributes:
        name: for people.
        run_file: the effective run file (TOML) that nodes receive.
        run_digest: of the run file; nodes must hold the same.
        method: name of the method, for people.
        rounds: how many to train.
        nodes: how many to wait for before round 0.
        evaluate_every: rounds between two validation losses; 0 = only after the last.
        batch: sequences that each node reads a round.
        policy: when a round closes.
        heartbeat: seconds between two heartbeats; three missed ones are a departure.
        stall: seconds after which a stream that makes no progress is closed.
        dtype: of the shared parameters.
        data_digest: what nodes' data must be; empty = the first node's.
    """

    name: str
    run_file: str
    run_digest: str
    method: str
    rounds: int
    nodes: int
    evaluate_every: int
    batch: int
    policy: Policy
    heartbeat: float = 5.0
    stall: float = 60.0
    dtype: str = "float32"
    data_digest: str = ""

    @classmethod
    def of(cls, run_file: RunFile, *, dtype: str = "float32") -> RunPlan:
        """Take it from a run file; ``dtype`` is that of the shared parameters."""
        return cls(
            name=run_file.run.name,
            run_file=run_file.to_toml(),
            run_digest=run_file.digest,
            method=run_file.method.name,
            rounds=run_file.run.rounds,
            nodes=run_file.run.nodes,
            evaluate_every=run_file.run.evaluate_every,
            batch=run_file.data.batch,
            policy=Policy(run_file.round.deadline, run_file.round.start_timeout, run_file.round.quorum),
            dtype=dtype,
        )
