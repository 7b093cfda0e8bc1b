"""What the coordinator needs to know of a run, without the run file's schema."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.admission import MAX_WEIGHT
from coordinator.ramp import momentum_of
from coordinator.retally import EFFORT, Effort
from coordinator.rounds import Policy
from coordinator.suspicion import DEFAULTS, Thresholds
from protos.limits import LIMITS, Limits
from protos.methods import Basis, micro_steps
from protos.waits import HEARTBEAT_SECONDS

if TYPE_CHECKING:
    from protos.runfile import RunFile


@dataclass(frozen=True)
class RunPlan:
    """A run as the coordinator sees it; durations in seconds.

    Attributes:
        name: for people.
        run_file: the effective run file (TOML) that nodes receive.
        run_digest: of the run file; nodes must hold the same.
        method: name of the method.
        rounds: how many to train.
        nodes: how many to wait for before the first round.
        evaluate_every: rounds between two validation losses; 0 = only after the last.
        batch: sequences that a node reads in a micro-step, unless it has joined with another number.
        policy: when a round closes.
        adaptive: rounds wait less than the policy's deadline where that is unusual.
        heartbeat: seconds between two heartbeats; three missed ones are a departure.
        stall: seconds after which a stream that makes no progress is closed.
        local_steps, fragments, basis: of the method; they make the micro-steps of a round.
        dtype: of the shared parameters.
        momentum: behind the votes; 0: a newcomer's vote weighs in full at once.
        snapshot_every: rounds between two snapshots of the shared state; 0: as the results since then ask.
        data_digest: what nodes' data must be; empty = the first node's.
        transport: what carries the bytes of a round, see the run file's [exchange].
        thresholds: from which suspicion on something is done about a node.
        effort: how much of what nodes reduce is made a second time.
        max_weight: the largest that a node may join with.
        limits: what may be taken of the coordinator.
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
    heartbeat: float = HEARTBEAT_SECONDS
    stall: float = 60.0
    local_steps: int = 1
    fragments: int = 1
    basis: Basis = "global"
    dtype: str = "float32"
    momentum: float = 0.0
    adaptive: bool = True
    snapshot_every: int = 0
    data_digest: str = ""
    transport: str = "hub"
    thresholds: Thresholds = DEFAULTS
    effort: Effort = EFFORT
    max_weight: int = MAX_WEIGHT
    limits: Limits = LIMITS

    def samples(self, round_index: int, batch: int = 0) -> int:
        """Sequences that a node reads in a round, with a ``batch`` of its own if that is not 0."""
        steps = micro_steps(self.method, self.local_steps, round_index, self.fragments, self.basis)
        return (batch or self.batch) * steps

    @classmethod
    def of(
        cls,
        run_file: RunFile,
        *,
        nodes: int | None = None,
        dtype: str = "float32",
        snapshot_every: int = 0,
    ) -> RunPlan:
        """Take it from a run file; ``dtype`` is that of the shared parameters, ``nodes`` how many to wait for
        if not as many as the run file says."""
        method = run_file.method
        return cls(
            name=run_file.run.name,
            run_file=run_file.to_toml(),
            run_digest=run_file.digest,
            method=method.name,
            rounds=run_file.run.rounds,
            nodes=run_file.run.nodes if nodes is None else nodes,
            evaluate_every=run_file.run.evaluate_every,
            batch=run_file.data.batch,
            policy=Policy(run_file.round.deadline, run_file.round.start_timeout, run_file.round.quorum),
            local_steps=method.local_steps,
            fragments=method.fragments,
            basis=method.basis,
            dtype=dtype,
            momentum=momentum_of(method),
            adaptive=run_file.round.adaptive,
            snapshot_every=snapshot_every,
            transport=run_file.exchange.transport,
            thresholds=Thresholds.of(run_file.byzantine),
            effort=Effort.of(run_file.byzantine),
            max_weight=run_file.byzantine.max_weight,
            limits=run_file.limits.limits,
        )
