"""LoRDO: does the full-rank term cure stagnation, and what do rank, infrequency and the baseline cost?

All runs exchange fp32 pseudo-gradients, so that only the optimizer is measured. Without its full-rank,
quasi-hyperbolic term (QHM, ``omega`` = 1) the weights never leave the span of the first basis; the overlap of
one basis with the next is then exactly 1, which needs no training to show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from bench.report import Report
from bench.simulated import CONTEXT, NODES, Case, Losses, add_rows, simulate
from deploy.simulation import Simulation
from optim.lordo.low_rank_ddp import LowRankDDP

EXACT: Final = {"codec": "fp32", "embedding_codec": "fp32"}
RANK: Final = 8


def _lordo(label: str, *, batch: int = 4, **method: Any) -> Case:
    values = {"name": "lordo", "rank": RANK, "local_steps": 16, "lr": 2e-2, **EXACT, **method}
    return Case(label, values, batch=batch)


def _low_rank(label: str, *, batch: int = 4, **method: Any) -> Case:
    return Case(label, {"name": "lowrank-ddp", "rank": RANK, "lr": 2e-2, **method}, batch=batch)


def _ldadam(model: nn.Module) -> LowRankDDP:
    """The strongest low-rank baseline. No run file offers it: replicas are equal only on equal machines."""
    return LowRankDDP(model, 1e-2, rank=RANK, omega=1.0, basis_every=1, ldadam=True)


GLOBAL: Final = _lordo("lordo")
GLOBAL_NO_QHM: Final = _lordo("lordo no-qhm", omega=1.0)
LOCAL_NO_QHM: Final = _lordo("lordo local no-qhm", omega=1.0, basis="local")
K4: Final = _lordo("lordo K=4", local_steps=4, lr=1e-2)
# A longer full-rank step with a smaller rate is the best found at this batch.
STRONG: Final = _lordo("lordo mu=0.1", mu=0.1, lr=1e-2)
MUON: Final = _lordo("lordo muon", direction="muon")
PLAIN_QHM: Final = _low_rank("lowrank-ddp qhm", omega=0.9)
LDADAM: Final = Case(
    "ldadam", {"name": "lowrank-ddp", "rank": RANK, "omega": 1.0, "basis_every": 1, "lr": 1e-2}, build=_ldadam
)
SMALL_BATCH: Final = (GLOBAL, GLOBAL_NO_QHM, LOCAL_NO_QHM, K4, STRONG, MUON, PLAIN_QHM, LDADAM)
# Parity with a plain low-rank baseline is a matter of the batch: 16 sequences of each node.
LARGE: Final = _lordo("lordo b=16", batch=16)
LARGE_PLAIN: Final = _low_rank("lowrank-ddp b=16", omega=1.0, batch=16)
LARGE_BATCH: Final = (LARGE, LARGE_PLAIN)

STEPS, SEEDS = 512, 3
QUICK_STEPS: Final = 64
OVERLAP_ROUNDS, OVERLAP_STEPS = 7, 8  # round 0 only finds the first basis


def run(quick: bool) -> Report:
    """Three seeds of 512 steps; quick: one of 64 without the large batch, and no bars on losses."""
    report = Report("lordo")
    without, with_term = overlaps(omega=1.0), overlaps(omega=0.9)
    report.add("overlap_without_qhm", min(without), floor=1 - 1e-4)
    report.add("overlap_with_qhm", max(with_term), ceiling=0.999)
    steps, seeds = (QUICK_STEPS, 1) if quick else (STEPS, SEEDS)
    cases = SMALL_BATCH[:4] if quick else SMALL_BATCH + LARGE_BATCH
    outcomes = simulate(cases, steps=steps, seeds=seeds)
    losses = Losses(outcomes)

    def gap(name: str, worse: Case, better: Case, **bar: float) -> None:
        if worse in cases and better in cases:
            report.add(name, losses.gap(worse, better), **({} if quick else bar))

    gap("qhm_gain", GLOBAL_NO_QHM, GLOBAL, floor=0.05)
    gap("global_minus_local_noqhm", GLOBAL, LOCAL_NO_QHM, ceiling=-0.03)
    gap("k16_minus_k4", GLOBAL, K4, ceiling=0.02)
    gap("gap_to_lowrank_ddp", LARGE, LARGE_PLAIN, ceiling=0.02)
    gap("gap_to_lowrank_ddp_qhm", GLOBAL, PLAIN_QHM)
    gap("gap_to_ldadam", GLOBAL, LDADAM)
    gap("strong_minus_lordo", STRONG, GLOBAL)
    gap("muon_minus_lordo", MUON, GLOBAL)
    add_rows(report, f"{steps} steps of {NODES} nodes, sequences of {CONTEXT}, {seeds} seed(s)", outcomes)
    report.note("overlap: |Q'^T Q|_F^2 / r of successive bases, mean over the matrices; 1 = the same span")
    report.note("four sequences a node and step, sixteen where the name says b=16")
    if quick:
        report.note("one seed, a short run: losses have no bar here")
    return report


def overlaps(*, omega: float) -> list[float]:
    """Overlap of each basis with the one before, from the second exchange on: the mean over the matrices."""
    case = _lordo("overlap", omega=omega, local_steps=OVERLAP_STEPS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        simulation = Simulation(case.entry(1 + (OVERLAP_ROUNDS - 1) * OVERLAP_STEPS).runfile(0))
        before: Mapping[str, np.ndarray] = {}
        found = []
        for _ in simulation.rounds():
            bases = dict(_bases(simulation.shared_tensors()))
            if before:
                found.append(float(np.mean([overlap(before[name], bases[name]) for name in bases])))
            before = bases
    finally:
        torch.set_num_threads(threads)
    return found


def overlap(one: np.ndarray, other: np.ndarray) -> float:
    """``|one^T other|_F^2 / r`` of two orthonormal bases ``[m, r]``: 1 for equal spans, 0 for orthogonal."""
    product = one.T.astype(np.float64) @ other.astype(np.float64)
    return float(np.square(product).sum() / one.shape[1])


def _bases(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    for name, tensor in tensors.items():
        if name.endswith("/basis"):
            yield name, tensor.numpy().copy()
