"""The run file: what it accepts, and what its digest stands for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from protos.buckets import MEDIAN
from protos.methods import LOCAL, LOW_RANK, PRESETS, VOTED
from protos.runfile import (
    CoordinatorConfig,
    DataConfig,
    MethodConfig,
    ModelConfig,
    RoundConfig,
    RunConfig,
    RunFile,
)


def test_an_empty_file_is_the_default_run() -> None:
    runfile = RunFile.parse("")
    assert runfile == RunFile()
    assert (runfile.method.name, runfile.method.scaling, runfile.method.lr) == (
        "sign-muon",
        "unit-gain",
        0.032,
    )


@pytest.mark.parametrize(
    ("name", "scaling", "lr", "other_lr", "reduced"),
    [
        ("sign-muon", "unit-gain", 0.032, 2e-3, "vote"),
        ("signum", "none", 1e-3, 2e-3, "vote"),
        ("ddp-muon", "match-rms", 1e-2, 6e-3, "mean"),
        ("ddp-adamw", "none", 6e-3, 6e-3, "mean"),
    ],
)
def test_a_method_brings_its_preset(
    name: Any, scaling: str, lr: float, other_lr: float, reduced: str
) -> None:
    method = MethodConfig(name=name)
    assert (method.scaling, method.lr) == (scaling, lr)
    assert (method.embedding_lr, method.vector_lr) == (other_lr, other_lr)
    assert (method.embeddings, method.vectors) == (reduced, reduced)


def test_a_mean_of_embeddings_brings_the_rate_of_adamw_for_them_alone() -> None:
    method = RunFile.parse('[method]\nembeddings = "mean"\nbeta1 = 0.8').method
    assert (method.embedding_lr, method.vector_lr, method.beta1) == (6e-3, 2e-3, 0.8)


def test_the_default_warmup_shrinks_with_the_run_and_a_given_one_does_not() -> None:
    assert RunFile.parse("[run]\nrounds = 1000").method.warmup == 50
    assert RunFile.parse("[run]\nrounds = 20").method.warmup == 2
    assert RunFile.parse("[run]\nrounds = 1").method.warmup == 0
    assert RunFile.parse("[run]\nrounds = 20\n[method]\nwarmup = 19").method.warmup == 19
    assert "warmup" not in RunFile.parse("[run]\nrounds = 20").method.model_fields_set
    shortened = RunFile(run=RunConfig(rounds=20), method=MethodConfig(name="ddp-adamw", lr=0.5)).method
    assert (shortened.name, shortened.lr, shortened.warmup) == ("ddp-adamw", 0.5, 2)


def test_durations_addresses_and_off_are_read() -> None:
    runfile = RunFile.parse(
        '[round]\ndeadline = "1 min 30 s"\nstart_timeout = 300\n'
        '[coordinator]\nlisten = "[::1]:0"\nmetrics = "off"'
    )
    assert (runfile.round.deadline, runfile.round.start_timeout) == (90.0, 300.0)
    assert (runfile.coordinator.address.host, runfile.coordinator.address.port) == ("::1", 0)
    assert runfile.coordinator.metrics is None


def test_a_value_without_effect_is_tolerated_where_it_is_the_default() -> None:
    assert RunFile.parse('[method]\nname = "ddp-adamw"\nns_steps = 5\nmomentum = 0.95\nembeddings = "mean"')


def test_a_file_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run]\nrounds = 7\n")
    assert RunFile.load(path) == RunFile(run=RunConfig(rounds=7))


def test_sections_check_their_rules_when_built_in_code_and_are_immutable() -> None:
    with pytest.raises(ValidationError, match="multiple of 2 x heads"):
        ModelConfig(heads=3)
    with pytest.raises(ValidationError, match="has no effect"):
        MethodConfig(name="ddp-adamw", ns_steps=3)
    with pytest.raises(ValidationError, match="frozen"):
        RunFile().run.rounds = 3  # type: ignore[misc]


def test_the_digest_ignores_form_and_the_coordinator_s_addresses() -> None:
    plain = RunFile.parse("[run]\nrounds = 600\n[method]\nlr = 1.0").digest
    assert len(plain) == 64
    for same in (
        "# a comment\n[method]\nlr = 1   # peak\n\n[run]\nrounds = 6_00",
        'run = { rounds = 600, name = "atoll" }\nmethod.lr = 1.0e0',
        '[run]\nrounds = 600\n[method]\nlr = 1\n[coordinator]\nlisten = "127.0.0.1:0"\nmetrics = "off"',
        '[run]\nrounds = 600\n[method]\nlr = 1\nwarmup = 50\n[round]\ndeadline = "1 min"',
    ):
        assert RunFile.parse(same).digest == plain


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("run", {"name": "other"}),
    ("run", {"seed": 1}),
    ("run", {"rounds": 513}),
    ("run", {"nodes": 4}),
    ("run", {"evaluate_every": 33}),
    ("run", {"validation_windows": 129}),
    ("model", {"name": "hf:gpt2"}),
    ("model", {"name": "own", "tensors": ["w matrix 2x3"]}),
    ("model", {"d_model": 128}),
    ("model", {"layers": 3}),
    ("model", {"heads": 4}),
    ("model", {"ff": 176}),
    ("model", {"context": 65}),
    ("model", {"vocab": 256}),
    ("model", {"tied": False}),
    ("data", {"source": "text.txt"}),
    ("data", {"tokenizer": "tokenizer.json"}),
    ("data", {"batch": 5}),
    ("method", {"name": "signum"}),
    ("method", {"embeddings": "mean"}),
    ("method", {"vectors": "mean"}),
    ("method", {"lr": 0.5}),
    ("method", {"embedding_lr": 0.5}),
    ("method", {"vector_lr": 0.5}),
    ("method", {"momentum": 0.9}),
    ("method", {"nesterov": False}),
    ("method", {"weight_decay": 0.1}),
    ("method", {"ns_steps": 6}),
    ("method", {"ns_coefficients": "quintic"}),
    ("method", {"scaling": "none"}),
    ("method", {"name": "ddp-adamw", "beta1": 0.8}),
    ("method", {"name": "ddp-adamw", "beta2": 0.8}),
    ("method", {"name": "ddp-adamw", "eps": 1e-6}),
    ("method", {"name": "sign-muon", "local_steps": 4}),
    ("method", {"name": "diloco", "optimizer": "muon"}),
    (
        "method",
        {"name": "diloco", "optimizer": "torch:SGD", "lr": 0.1, "optimizer_options": {"momentum": 0.5}},
    ),
    ("method", {"name": "diloco", "codec": "int4"}),
    ("method", {"name": "diloco", "embedding_codec": "int4"}),
    ("method", {"name": "diloco", "vector_codec": "bf16"}),
    ("method", {"name": "diloco", "error_feedback": False}),
    ("method", {"name": "diloco", "outer": "sgd"}),
    ("method", {"name": "diloco", "outer_lr": 0.6}),
    ("method", {"name": "diloco", "outer_momentum": 0.8}),
    ("method", {"name": "lordo", "rank": 4}),
    ("method", {"name": "lordo", "omega": 0.8}),
    ("method", {"name": "lordo", "mu": 0.1}),
    ("method", {"name": "lordo", "basis": "local"}),
    ("method", {"name": "lordo", "direction": "muon"}),
    ("method", {"name": "lordo", "moments_codec": "bf16"}),
    ("method", {"name": "lowrank-ddp", "basis_every": 8}),
    ("method", {"name": "muloco", "fragments": 4}),
    ("method", {"name": "muloco", "overlap": 4}),
    ("method", {"name": "muloco", "mix": 0.7}),
    ("method", {"delay": 1}),
    ("method", {"name": "muloco", "clip": 2.0}),
    ("method", {"name": "muloco", "trim": 1}),
    ("method", {"warmup": 49}),
    ("method", {"schedule": "linear"}),
    ("method", {"final": 0.06}),
    ("round", {"deadline": 61}),
    ("round", {"adaptive": False}),
    ("round", {"start_timeout": 601}),
    ("round", {"quorum": 0.7}),
]


def test_thresholds_of_suspicion_are_off_but_for_the_warning() -> None:
    run = RunFile.parse('[byzantine]\nwarn = 1\nexpel = 0\n[method]\nname = "diloco"\ntrim = "median"')
    assert (run.byzantine.warn, run.byzantine.expel, run.method.trim) == (1.0, 0.0, MEDIAN)
    assert RunFile.parse(run.to_toml()) == run
    assert run.digest == RunFile.model_validate({"method": {"name": "diloco", "trim": MEDIAN}}).digest


def test_every_other_value_changes_the_digest() -> None:
    covered = {(section, key) for section, change in CHANGES for key in change}
    fields = {(name, key) for name, section in RunFile() for key in type(section).model_fields}
    ways = ("byzantine", "exchange", "coordinator", "limits")  # they decide nothing that is computed
    assert covered == {(section, key) for section, key in fields if section not in ways}
    needs: dict[str, Any] = {"tokenizer": {"model": {"vocab": 300}}}
    digests = {
        RunFile.model_validate({section: change, **needs.get(next(iter(change)), {})}).digest
        for section, change in CHANGES
    }
    assert len(digests) == len(CHANGES)
    assert RunFile().digest not in digests


names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
rates = st.floats(1e-9, 100)
betas = st.floats(0, 1, exclude_max=True)


CODECS = ("fp32", "bf16", "int8", "int8:64", "int4", "2bit", "ternary", "1bit", "1bit-row")
MATRIX_CODECS = (*CODECS, "lowrank:4", "lowrank:8+1bit")
OPTIONS = st.dictionaries(
    st.from_regex(r"[a-z_][a-z0-9_]{0,9}", fullmatch=True).filter(
        lambda name: name not in ("lr", "params", "weight_decay")
    ),
    st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.lists(st.floats(0, 1), min_size=1, max_size=2),
    max_size=3,
)


@st.composite
def methods(draw: st.DrawFn) -> dict[str, Any]:
    """Values of [method] that agree with each other."""
    name = draw(st.sampled_from(list(PRESETS)))
    optional: dict[str, st.SearchStrategy[Any]] = {
        "lr": rates,
        "embedding_lr": rates,
        "vector_lr": rates,
        "weight_decay": st.floats(0, 10),
        "schedule": st.sampled_from(["cosine", "linear", "constant"]),
    }
    method: dict[str, Any] = {"name": name}
    if name in VOTED:
        optional["vectors"] = st.sampled_from(["vote", "mean"])
    if name in ("sign-muon", "signum", "ddp-muon"):
        optional |= {"momentum": betas, "nesterov": st.booleans()}
        optional["scaling"] = st.sampled_from(["unit-gain", "match-rms", "none"])
    else:
        optional |= {"beta1": betas, "beta2": betas, "eps": st.floats(1e-30, 1)}
    if name in LOW_RANK:
        optional |= {"rank": st.integers(1, 99), "omega": st.floats(0, 1)}
    if name in LOCAL:
        fragments = 1 if name == "lordo" else draw(st.integers(1, 6))
        each = draw(st.integers(1, 50))
        method |= {"local_steps": fragments * each, "fragments": fragments}
        method["overlap"] = draw(st.integers(0, each - 1))
        votes = () if name == "lordo" else ("vote", "vote-row")
        optional |= {
            "codec": st.sampled_from(MATRIX_CODECS + votes),
            "embedding_codec": st.sampled_from(MATRIX_CODECS),
            "vector_codec": st.sampled_from(CODECS[:5]),
            "outer": st.sampled_from(["average", "sgd", "nesterov"]),
            "outer_lr": rates,
            "mix": st.floats(0, 1, exclude_min=True),
            "clip": st.floats(0, 100),
            "trim": st.integers(0, 9),
        }
        if name != "lordo" and draw(st.booleans()):
            method |= {"optimizer": "torch:SGD", "lr": draw(rates), "optimizer_options": draw(OPTIONS)}
    return method | draw(st.fixed_dictionaries({}, optional=optional))


@st.composite
def run_files(draw: st.DrawFn) -> RunFile:
    method = draw(methods())
    heads = draw(st.integers(1, 8))
    rounds = draw(st.integers(max(2, method.get("fragments", 1)), 10**9))
    return RunFile(
        run=RunConfig(seed=draw(st.integers(0, 2**63 - 1)), rounds=rounds),
        model=ModelConfig(
            d_model=2 * heads * draw(st.integers(1, 64)),
            heads=heads,
            ff=draw(st.none() | st.integers(1, 4096)),
            tied=draw(st.booleans()),
            vocab=draw(st.integers(256, 4096)),
        ),
        data=DataConfig(source=draw(names), tokenizer=draw(names)),
        method=MethodConfig(**method),
        round=RoundConfig(
            deadline=draw(st.floats(1e-3, 600)), quorum=draw(st.floats(0.5, 1, exclude_min=True))
        ),
        coordinator=CoordinatorConfig(metrics=draw(st.none() | st.integers(0, 65535))),
    )


@settings(max_examples=60)
@given(run_files())
def test_the_written_run_file_reads_as_the_same_run(runfile: RunFile) -> None:
    again = RunFile.parse(runfile.to_toml())
    assert again == runfile
    assert again.digest == runfile.digest
    assert again.to_toml() == runfile.to_toml()


def test_reading_a_run_file_does_not_import_torch() -> None:
    code = "import sys, protos.runfile_text; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
