"""Loss of every method against its bytes, on the embedded text: the published table.

Beside the presets there are two controls of Sign-Muon: a single worker with the same global batch, and one
iteration of Newton-Schulz, which hardly differs from Signum.
"""

from __future__ import annotations

from typing import Final

from bench.report import Report
from bench.simulated import BATCH, CONTEXT, NODES, Case, Losses, add_rows, simulate
from protos.methods import PRESETS

SIGN_MUON: Final = Case("sign-muon", {"name": "sign-muon"})
SIGN_MUON_ALONE: Final = Case("sign-muon, one worker", {"name": "sign-muon"}, nodes=1, batch=NODES * BATCH)
# With one iteration the best learning rate is half that of five.
SIGN_MUON_NS1: Final = Case("sign-muon, one iteration", {"name": "sign-muon", "lr": 0.016, "ns_steps": 1})
SIGNUM: Final = Case("signum", {"name": "signum"})
MUON: Final = Case("ddp-muon", {"name": "ddp-muon"})
# The flagship of thin links once more, with a quarter and with four times the local steps.
OFTEN: Final = Case("muloco-1bit, K=4", {"name": "muloco-1bit", "local_steps": 4, "outer_momentum": 0.5})
SELDOM: Final = Case("muloco-1bit, K=64", {"name": "muloco-1bit", "local_steps": 64})
FIRST: Final = (SIGN_MUON, SIGN_MUON_ALONE, SIGN_MUON_NS1, SIGNUM, MUON)
CONTROLS: Final = (SIGN_MUON_ALONE.label, SIGN_MUON_NS1.label)

STEPS, SEEDS = 512, 3
QUICK_STEPS: Final = 64


def cases(steps: int) -> list[Case]:
    """The first five, every other preset, and two variants; a round longer than the run is cut to it."""
    known = {case.label for case in FIRST}
    others = []
    for name, preset in PRESETS.items():
        if name not in known:
            shorter = {"local_steps": steps} if preset.local_steps > steps else {}
            others.append(Case(name, {"name": name, **shorter}))
    return [*FIRST, *others, *(case for case in (OFTEN, SELDOM) if case.method["local_steps"] <= steps)]


def run(quick: bool) -> Report:
    """The table of methods; quick: one seed and 64 steps instead of three and 512."""
    steps, seeds = (QUICK_STEPS, 1) if quick else (STEPS, SEEDS)
    outcomes = simulate(cases(steps), steps=steps, seeds=seeds)
    losses = Losses(outcomes)
    report = Report("methods")
    parity: dict[str, float] = {} if quick else {"floor": -0.03, "ceiling": 0.03}
    report.add("signmuon_minus_muon", losses.gap(SIGN_MUON, MUON), ceiling=None if quick else 0.02)
    report.add("signum_minus_signmuon", losses.gap(SIGNUM, SIGN_MUON), floor=0.08)
    report.add("m4_minus_m1", losses.gap(SIGN_MUON, SIGN_MUON_ALONE), **parity)
    report.add("ns1_minus_ns5", losses.gap(SIGN_MUON_NS1, SIGN_MUON), floor=None if quick else 0.05)
    sent = {label: runs[0].bytes_up for label, runs in outcomes.items()}
    report.add("muon_over_signmuon_bytes", sent[MUON.label] / sent[SIGN_MUON.label], floor=31)
    title = f"{steps} steps of {NODES * BATCH * CONTEXT} bytes, {seeds} seed(s)"
    add_rows(report, title, outcomes, CONTROLS)
    report.note("rounds are whole: steps may differ a little from the others'")
    if quick:
        report.note("one seed, a short run: differences below 0.03 are noise, so these have no bar here")
    return report
