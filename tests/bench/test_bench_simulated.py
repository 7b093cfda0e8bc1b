"""The benches of losses: which runs they make, what they report. Losses are made up where none is needed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import lordo, methods, muloco, simulated, variants
from bench.report import Report
from bench.simulated import Case, Losses, figure_name
from deploy.compare_outcome import Outcome, simulate
from deploy.compare_pool import Job
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


class Recorder:
    """Stands in for :func:`bench.simulated.simulate`: notes what is asked for and makes the losses up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.labels: list[str] = []
        self.steps = self.seeds = 0
        self.losses: dict[str, float] = {}  # where they are not to be made up
        self.sent: dict[str, int] = {}
        for module in (methods, muloco, lordo, variants):
            monkeypatch.setattr(module, "simulate", self.simulate)
        monkeypatch.setattr(lordo, "overlaps", lambda *, omega: [1.0] if omega == 1.0 else [0.9, 0.95])

    def simulate(self, cases: Sequence[Case], *, steps: int, seeds: int) -> dict[str, list[Outcome]]:
        self.labels, self.steps, self.seeds = [case.label for case in cases], steps, seeds
        return {
            label: [
                replace(
                    run,
                    validation_loss=self.losses.get(label, run.validation_loss),
                    bytes_up=self.sent.get(label, run.bytes_up),
                )
                for run in runs
            ]
            for label, runs in pretend(cases, steps=steps, seeds=seeds).items()
        }


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


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
def test_figures_come_first_and_have_their_bars(name: str, recorder: Recorder) -> None:
    run, figures = FIGURES[name]
    report = run(False)
    assert report.bench == name
    assert list(report.figures)[: len(figures)] == figures
    assert set(figures) - UNBARRED <= set(report.bars) and not UNBARRED & set(report.bars)
    assert any(figure.startswith("loss_") for figure in report.figures)
    assert len(report.tables[0].rows) == sum(figure.startswith("loss_") for figure in report.figures)


@pytest.mark.parametrize(
    ("module", "quick", "full", "bars"),
    [
        (
            methods,
            methods.cases(64),
            methods.cases(512),
            {"signum_minus_signmuon", "muon_over_signmuon_bytes"},
        ),
        (muloco, muloco.CASES, muloco.CASES, set()),
        (
            lordo,
            (lordo.GLOBAL, lordo.GLOBAL_NO_QHM, lordo.LOCAL_NO_QHM, lordo.K4),
            (*lordo.SMALL_BATCH, lordo.LARGE, lordo.LARGE_PLAIN),
            {"overlap_without_qhm", "overlap_with_qhm"},
        ),
        (
            variants,
            (variants.PRESET, *variants.VARIANTS[:2]),
            (variants.PRESET, *variants.VARIANTS, methods.SIGN_MUON, variants.LATE),
            set(),
        ),
    ],
)
def test_a_quick_run_is_short_and_has_no_bar_on_what_is_noise(
    recorder: Recorder, module: Any, quick: Sequence[Case], full: Sequence[Case], bars: set[str]
) -> None:
    report = module.run(True)
    assert recorder.labels == [case.label for case in quick]
    assert (recorder.steps, recorder.seeds) == (module.QUICK_STEPS, 1)
    assert report.bars.keys() == bars
    module.run(False)
    assert recorder.labels == [case.label for case in full]
    assert (recorder.steps, recorder.seeds) == (module.STEPS, module.SEEDS)
    assert recorder.seeds > 1 and recorder.steps > module.QUICK_STEPS


GAPS: dict[str, tuple[Any, Case, Case]] = {  # figure: bench, and whose loss minus whose
    "signmuon_minus_muon": (methods, methods.SIGN_MUON, methods.MUON),
    "signum_minus_signmuon": (methods, methods.SIGNUM, methods.SIGN_MUON),
    "m4_minus_m1": (methods, methods.SIGN_MUON, methods.SIGN_MUON_ALONE),
    "ns1_minus_ns5": (methods, methods.SIGN_MUON_NS1, methods.SIGN_MUON),
    "onebit_minus_fp32": (muloco, muloco.VOTE, muloco.FP32),
    "onebit_minus_adamw": (muloco, muloco.VOTE, muloco.ADAMW),
    "onebit_mean_minus_fp32": (muloco, muloco.ONE_BIT, muloco.FP32),
    "twobit_minus_fp32": (muloco, muloco.TWO_BITS, muloco.FP32),
    "qhm_gain": (lordo, lordo.GLOBAL_NO_QHM, lordo.GLOBAL),
    "global_minus_local_noqhm": (lordo, lordo.GLOBAL, lordo.LOCAL_NO_QHM),
    "k16_minus_k4": (lordo, lordo.GLOBAL, lordo.K4),
    "gap_to_lowrank_ddp": (lordo, lordo.LARGE, lordo.LARGE_PLAIN),
    "gap_to_lowrank_ddp_qhm": (lordo, lordo.GLOBAL, lordo.PLAIN_QHM),
    "gap_to_ldadam": (lordo, lordo.GLOBAL, lordo.LDADAM),
    "strong_minus_lordo": (lordo, lordo.STRONG, lordo.GLOBAL),
    "muon_minus_lordo": (lordo, lordo.MUON, lordo.GLOBAL),
    "late_minus_signmuon": (variants, variants.LATE, methods.SIGN_MUON),
}


@pytest.mark.parametrize("figure", GAPS)
def test_a_gap_says_whose_loss_is_above_whose(recorder: Recorder, figure: str) -> None:
    module, worse, better = GAPS[figure]
    recorder.losses = {worse.label: 1.75, better.label: 1.5}
    assert module.run(False).figures[figure] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("figure", "held", "missed"),
    [
        ("signmuon_minus_muon", 0.01, 0.03),
        ("signum_minus_signmuon", 0.09, 0.07),
        ("m4_minus_m1", -0.02, -0.04),
        ("m4_minus_m1", 0.02, 0.04),
        ("ns1_minus_ns5", 0.06, 0.04),
        ("onebit_minus_fp32", 0.01, 0.03),
        ("onebit_minus_adamw", -0.01, 0.01),
        ("qhm_gain", 0.06, 0.04),
        ("global_minus_local_noqhm", -0.04, -0.02),
        ("k16_minus_k4", 0.01, 0.03),
        ("gap_to_lowrank_ddp", 0.01, 0.03),
    ],
)
def test_a_loss_on_the_wrong_side_misses_its_bar(
    recorder: Recorder, figure: str, held: float, missed: float
) -> None:
    module, worse, better = GAPS[figure]
    for gap, misses in ((held, False), (missed, True)):
        recorder.losses = {worse.label: 1.5 + gap, better.label: 1.5}
        assert any(text.startswith(f"{figure} is") for text in module.run(False).missed()) == misses


def test_bytes_are_compared_with_those_of_the_exact_exchange(recorder: Recorder) -> None:
    recorder.sent = {methods.MUON.label: 32_000, methods.SIGN_MUON.label: 1000}
    assert methods.run(False).figures["muon_over_signmuon_bytes"] == 32
    recorder.sent[methods.SIGN_MUON.label] = 1100
    assert any("muon_over_signmuon_bytes" in text for text in methods.run(True).missed())
    recorder.sent = {muloco.FP32.label: 6000, muloco.ADAMW.label: 96_000, muloco.VOTE.label: 200}
    figures = muloco.run(False).figures
    assert (figures["fp32_over_onebit_bytes"], figures["adamw_over_onebit_bytes"]) == (30, 480)


@pytest.mark.parametrize(
    ("without", "with_term", "missed"),
    [
        ([1.0, 0.9999], [0.5, 0.99], set()),
        ([1.0, 0.99], [0.5, 0.99], {"overlap_without_qhm"}),
        ([1.0], [0.5, 0.9995], {"overlap_with_qhm"}),
    ],
)
def test_one_basis_that_turns_or_stands_misses_a_bar(
    recorder: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    without: list[float],
    with_term: list[float],
    missed: set[str],
) -> None:
    monkeypatch.setattr(lordo, "overlaps", lambda *, omega: without if omega == 1.0 else with_term)
    assert {text.split()[0] for text in lordo.run(True).missed()} == missed


def test_controls_are_in_the_table_and_on_no_front(recorder: Recorder) -> None:
    recorder.losses = dict.fromkeys(methods.CONTROLS, 0.1)  # below all others
    report = methods.run(True)
    rows = {str(row[0]): row[-1] for row in report.tables[0].rows}
    assert [rows[label] for label in methods.CONTROLS] == ["", ""]
    assert "yes" in rows.values()
    (front,) = (note for note in report.notes if note.startswith("the front"))
    assert not any(label in front for label in methods.CONTROLS)


def test_a_run_is_simulated_for_every_case_and_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Job] = []

    def run_jobs(given: Sequence[Job], processes: int, watcher: object) -> list[Outcome]:
        jobs.extend(given)
        labels = {"one": Case("one", {"name": "signum"}), "two": Case("two", {"name": "sign-muon"})}
        return [made_up(labels[job.label], job.seed, 16) for job in given]

    monkeypatch.setattr(simulated, "run_jobs", run_jobs)
    cases = [Case("one", {"name": "signum"}), Case("two", {"name": "sign-muon"}, nodes=2, batch=8)]
    outcomes = simulated.simulate(cases, steps=16, seeds=3)
    assert {label: [run.seed for run in runs] for label, runs in outcomes.items()} == {
        "one": [0, 1, 2],
        "two": [0, 1, 2],
    }
    assert [(job.runfile.run.nodes, job.runfile.data.batch) for job in jobs] == [(4, 4)] * 3 + [(2, 8)] * 3


def test_a_round_of_training_gives_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quick run of muloco, one round long and in this process."""

    def run_jobs(jobs: Sequence[Job], processes: int, watcher: object) -> list[Outcome]:
        return [simulate(job.label, job.runfile, build=job.build) for job in jobs]

    monkeypatch.setattr(simulated, "run_jobs", run_jobs)
    monkeypatch.setattr(muloco, "QUICK_STEPS", muloco.LOCAL_STEPS)
    report = muloco.run(True)
    figures = report.figures
    assert 16 < figures["fp32_over_onebit_bytes"] < 32, "a bit instead of 32, but four in the embedding"
    assert figures["adamw_over_onebit_bytes"] == pytest.approx(
        muloco.LOCAL_STEPS * figures["fp32_over_onebit_bytes"]
    )
    assert len({figures[f"loss_{figure_name(case.label)}"] for case in muloco.CASES}) == len(muloco.CASES)
    assert [row[2] for row in report.tables[0].rows] == [muloco.LOCAL_STEPS] * len(muloco.CASES)


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


def test_variants_are_measured_against_the_preset(recorder: Recorder) -> None:
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
