"""What else was tried on thin links: variants of one-bit pseudo-gradients, each against the preset, and votes
that are a round late.

The page docs/negative-results.md is written from this table: most of these changes bring nothing.
"""

from __future__ import annotations

from typing import Any, Final

from bench.methods import SIGN_MUON
from bench.report import Report
from bench.simulated import BATCH, CONTEXT, NODES, Case, Losses, add_rows, figure_name, simulate

STEPS, SEEDS = 512, 2
QUICK_STEPS: Final = 64


def _variant(label: str, **method: Any) -> Case:
    return Case(label, {"name": "muloco-1bit", **method})


PRESET: Final = _variant("muloco-1bit")
VARIANTS: Final = (
    _variant("error feedback", error_feedback=True),
    _variant("a scale for each row", codec="vote-row"),
    _variant("embedding exact", embedding_codec="fp32"),
    _variant("embedding voted", embedding_codec="vote-row"),
    _variant("no outer momentum", outer="average"),
    _variant("outer lr 1", outer_lr=1.0),
    _variant("twice the rate", lr=2e-2),
    _variant("two fragments", fragments=2),
    _variant("four steps late", overlap=4),
    _variant("local sign-muon, K=4", name="sign-muon", local_steps=4),
)
LATE: Final = Case("sign-muon, a round late", {"name": "sign-muon", "delay": 1})


def run(quick: bool) -> Report:
    """Two seeds of 512 steps; quick: one of 64 of the first variants."""
    steps, seeds = (QUICK_STEPS, 1) if quick else (STEPS, SEEDS)
    variants = VARIANTS[:2] if quick else VARIANTS
    votes = () if quick else (SIGN_MUON, LATE)
    outcomes = simulate([PRESET, *variants, *votes], steps=steps, seeds=seeds)
    losses = Losses(outcomes)
    report = Report("variants")
    for case in variants:
        report.add(f"minus_preset_{figure_name(case.label)}", losses.gap(case, PRESET))
    if votes:
        report.add("late_minus_signmuon", losses.gap(LATE, SIGN_MUON))
    add_rows(report, f"{steps} steps of {NODES * BATCH * CONTEXT} bytes, {seeds} seed(s)", outcomes)
    report.note("minus_preset: loss of the variant minus that of muloco-1bit, paired; above 0 it is worse")
    report.note("late_minus_signmuon: the same of delay = 1 against votes on the gradients of the round")
    return report
