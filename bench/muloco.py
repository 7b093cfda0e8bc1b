"""One bit a parameter every 16 steps: local Muon with voted pseudo-gradients against exact ones, and AdamW.

The flagship for thin links: a pseudo-gradient of one bit and a scale for each matrix must cost hardly any
loss against one in fp32, and still be better than AdamW that exchanges fp32 gradients in every step.
"""

from __future__ import annotations

from typing import Final

from bench.report import Report
from bench.simulated import BATCH, CONTEXT, NODES, Case, Losses, add_rows, simulate

LOCAL_STEPS: Final = 16
FP32: Final = Case(
    "muloco fp32", {"name": "muloco", "local_steps": LOCAL_STEPS, "codec": "fp32", "embedding_codec": "fp32"}
)
VOTE: Final = Case("muloco-1bit", {"name": "muloco-1bit"})
# The same bit decoded and averaged instead of voted on.
ONE_BIT: Final = Case(
    "muloco 1bit mean",
    {"name": "muloco", "local_steps": LOCAL_STEPS, "codec": "1bit", "embedding_codec": "int4"},
)
TWO_BITS: Final = Case("muloco 2bit", {"name": "muloco", "local_steps": LOCAL_STEPS})
ADAMW: Final = Case("ddp-adamw", {"name": "ddp-adamw"})
CASES: Final = (FP32, VOTE, ONE_BIT, TWO_BITS, ADAMW)

STEPS, SEEDS = 512, 3
QUICK_STEPS: Final = 96


def run(quick: bool) -> Report:
    """Three seeds of 512 steps; quick: one of 96, without bars on differences that are noise there."""
    steps, seeds = (QUICK_STEPS, 1) if quick else (STEPS, SEEDS)
    outcomes = simulate(CASES, steps=steps, seeds=seeds)
    losses = Losses(outcomes)
    report = Report("muloco")
    report.add("onebit_minus_fp32", losses.gap(VOTE, FP32), ceiling=None if quick else 0.02)
    report.add("onebit_minus_adamw", losses.gap(VOTE, ADAMW), ceiling=None if quick else 0.0)
    report.add("onebit_mean_minus_fp32", losses.gap(ONE_BIT, FP32))
    report.add("twobit_minus_fp32", losses.gap(TWO_BITS, FP32))
    sent = {label: runs[0].bytes_up for label, runs in outcomes.items()}
    report.add("fp32_over_onebit_bytes", sent[FP32.label] / sent[VOTE.label])
    report.add("adamw_over_onebit_bytes", sent[ADAMW.label] / sent[VOTE.label])
    add_rows(report, f"{steps} steps of {NODES * BATCH * CONTEXT} bytes, {seeds} seed(s)", outcomes)
    report.note("bytes include the embedding, a seventh of this model: 'bench bytes' counts matrices alone")
    if quick:
        report.note("one seed, a short run: differences below 0.03 are noise, so these have no bar here")
    return report
