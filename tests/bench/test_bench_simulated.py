"""The benches of losses: which runs they make, what they report. Losses are made up where none is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bench import lordo, methods, muloco, variants
from bench.report import Report
from bench.simulated import Case, Losses, figure_name
from deploy.compare_outcome import Outcome, simulate
from protos.methods import PRESETS


def made_up(case: Case, seed: int, steps: int) -> Outcome:
    """An outcome whose loss follows from its label."""
    loss = 1.0 + (sum(map(ord, case.label)) % 97) / 100 + 0.001 * seed
    nbytes = 1000 + 7 * len(case.label)
    return Outcome(
        label=case.label, seed=seed, run_digest="", method=str(case.method["name"]), nodes=case.nodes,
        rounds=steps, steps=steps, tokens=steps * 1024, parameters=1000, state_bytes=4000, bytes_up=nbytes,
        bytes_down=nbytes, validation_loss=loss, bits_per_byte=loss / math.log(2), state_digest="",
        cpu_seconds=1.0,
    )  # fmt: skip


def pretend(cases: Sequence[Case], *, steps: int, seeds: int) -> dict[str, list[Outcome]]:
    """As :func:`bench.simulated.simulate`, without training; run files are checked all the same."""
    for case in cases:
        case.entry(steps).runfile(0)
    return {case.label: [made_up(case, seed, steps) for seed in range(seeds)] for case in cases}


FIGURES: dict[str, tuple[Callable[[bool], Report], list[str]]] = {
    "methods": (
        methods.run,
        [
            "signmuon_minus_muon", "signum_minus_signmuon", "m4_minus_m1", "ns1_minus_ns5",
            "muon_over_signmuon_bytes",
        ],
    ),
    "muloco": (muloco.run, ["onebit_minus_fp32", "onebit_minus_adamw"]),
    "lordo": (
        lordo.run,
        [
            "overlap_without_qhm", "overlap_with_qhm", "qhm_gain", "global_minus_local_noqhm", "k16_minus_k4",
            "gap_to_lowrank_ddp", "gap_to_lowrank_ddp_qhm", "gap_to_ldadam",
        ],
    ),
}  # fmt: skip
UNBARRED = {"gap_to_lowrank_ddp_qhm", "gap_to_ldadam"}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_come_first_and_have_their_bars(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, figures = FIGURES[name]
    for module in (methods, muloco, lordo):
        monkeypatch.setattr(module, "simulate", pretend)
    monkeypatch.setattr(lordo, "overlaps", lambda *, omega: [1.0] if omega == 1.0 else [0.9, 0.95])
    report = run(False)
    assert report.bench == name
    assert list(report.figures)[: len(figures)] == figures
    assert set(figures) - UNBARRED <= set(report.bars) and not UNBARRED & set(report.bars)
    assert any(figure.startswith("loss_") for figure in report.figures)
    assert len(report.tables[0].rows) == sum(figure.startswith("loss_") for figure in report.figures)
    quick = run(True)
    assert quick.bars.keys() <= report.bars.keys()


def test_a_gap_is_the_mean_over_paired_seeds() -> None:
    one, two = Case("one", {"name": "signum"}), Case("two", {"name": "signum"})
    losses = Losses(pretend([one, two], steps=4, seeds=3))
    assert losses.gap(one, two) == pytest.approx(-losses.gap(two, one))
    assert losses.gap(one, two) == pytest.approx(
        made_up(one, 0, 4).validation_loss - made_up(two, 0, 4).validation_loss
    )


@pytest.mark.parametrize("steps", [methods.STEPS, methods.QUICK_STEPS])
def test_the_table_of_methods_has_all_presets_at_equal_tokens(steps: int) -> None:
    cases = methods.cases(steps)
    variants = {case.label for case in (methods.OFTEN, methods.SELDOM)}
    assert {case.label for case in cases} == set(PRESETS) | set(methods.CONTROLS) | variants
    for case in cases:
        entry = case.entry(steps)
        run = entry.runfile(0)
        trained = sum(run.method.micro_steps(index) for index in range(run.run.rounds))
        assert trained * run.run.nodes * run.data.batch == pytest.approx(16 * steps, rel=0.05)
        assert run.method.warmup >= 1 or run.run.rounds == 1


def test_variants_are_measured_against_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "simulate", pretend)
    report = variants.run(False)
    cases = [variants.PRESET, *variants.VARIANTS, methods.SIGN_MUON, variants.LATE]
    outcomes = pretend(cases, steps=variants.STEPS, seeds=variants.SEEDS)
    losses = Losses(outcomes)
    for case in variants.VARIANTS:
        case.entry(variants.STEPS).runfile(0)  # a run file that is accepted
        gap = report.figures[f"minus_preset_{figure_name(case.label)}"]
        assert gap == pytest.approx(losses.gap(case, variants.PRESET))


def test_figure_names_are_words() -> None:
    assert figure_name("sign-muon, one worker") == "signmuon_one_worker"
    assert figure_name("lordo K=4") == "lordo_K4"


def test_overlap_of_bases() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((12, 8)))[0].astype(np.float32)
    turned = basis[:, :4] @ np.linalg.qr(rng.standard_normal((4, 4)))[0].astype(np.float32)
    assert lordo.overlap(basis[:, :4], turned) == pytest.approx(1.0, abs=1e-6)
    assert lordo.overlap(basis[:, :4], basis[:, 4:]) == pytest.approx(0.0, abs=1e-6)
    assert lordo.overlap(basis[:, :4], basis[:, 2:6]) == pytest.approx(0.5, abs=1e-6)


def test_without_the_full_rank_term_the_basis_never_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lordo, "OVERLAP_ROUNDS", 4)
    monkeypatch.setattr(lordo, "OVERLAP_STEPS", 4)
    without, with_term = lordo.overlaps(omega=1.0), lordo.overlaps(omega=0.9)
    assert len(without) == len(with_term) == 3
    assert min(without) > 1 - 1e-4
    assert max(with_term[1:]) < 0.9995


def test_ldadam_is_the_optimizer_of_its_case() -> None:
    entry = lordo.LDADAM.entry(3)
    plain = simulate("plain", entry.runfile(0))
    turned = simulate("ldadam", entry.runfile(0), build=lordo.LDADAM.build)
    assert math.isfinite(turned.validation_loss) and turned.validation_loss != plain.validation_loss
    assert turned.state_bytes > plain.state_bytes, "its error feedback is as large as the matrices"
